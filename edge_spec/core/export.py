"""Describes what an exporter is: it writes one format of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edge_spec.core.model import Progress
from edge_spec.core.model_info import Checkpoint, TensorRows
from edge_spec.errors import UsageError


@dataclass(frozen=True)
class ExportOptions:
    """Says what to write. `quantization` names are the format's own; None is its default. From
    `compute` on, an exporter refuses what it does not know (`require_only`)."""

    quantization: str | None = None
    num_layers: int | None = None  # only the first ones, for a draft; None: all
    check: bool = True  # compare the result with the reference and refuse it beyond its bound
    compute: str | None = None  # the unit that the graph is laid out for, such as "gpu"
    context_length: int | None = None  # tokens, where the format fixes it
    hidden_states: bool = False  # whether the graph returns them beside its scores

    def require_only(self, format: str, *known: str) -> None:
        """Raises UsageError if one of the last three options is set and not `known`."""
        for name in ("compute", "context_length", "hidden_states"):
            if name not in known and getattr(self, name):
                raise UsageError(
                    f"the {format} exporter has no option {name.replace('_', '-')}",
                    remedy="Leave it out, or choose another --format.",
                )


@dataclass(frozen=True)
class ExportReport:
    """Says what was written and how far it is from its source, on the packaged text."""

    path: Path
    num_bytes: int
    parity: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was left out, and why; a line each


class Exporter(Protocol):
    """The entry point `edge_spec.exporters`: writes one format."""

    format: str

    def export(
        self, checkpoint: Checkpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport: ...


@runtime_checkable
class ReadingExporter(Protocol):
    """An exporter with a reader of its own, for models that `open_checkpoint` refuses."""

    def open_source(self, path: Path) -> Any:
        """Return what `export` takes. Raises ModelFileError, UnsupportedModelError."""


@runtime_checkable
class ScreeningExporter(Protocol):
    """An exporter that tells from a model's description whether it can write it."""

    format: str

    def require_exportable(self, checkpoint: Any) -> None:
        """Raises UnsupportedModelError. checkpoint: what `export` takes, with unread weights."""


# The name of a matrix in Hugging Face's layout, and [rows, in] float32 that it is multiplied with.
Observe = Callable[[str, np.ndarray], None]


class LayerStream(Protocol):
    """Sequences on their way through a model, of which no more than a matrix is in memory."""

    num_done: int  # layers

    def advance(self) -> None:
        """Passes the next layer."""

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return [len(rows), vocab] float32 after the last layer; rows: which of all sequences'
        tokens, counted through."""


@runtime_checkable
class StreamsLayers(Protocol):
    """A runtime that can pass sequences through a model a layer at a time."""

    def open_layers(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> LayerStream:
        """Embeds the sequences, each of which sees only itself. `observe` hears what a matrix is
        multiplied with before it is read. Raises ContextFullError for a sequence that is too long.
        """
