"""What an exporter is: it writes one format of a model."""

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
    """What to write. `quantization` is one of the format's names; None is its default. Exporters
    refuse unsupported options from `compute` on (`require_only`)."""

    quantization: str | None = None
    num_layers: int | None = None  # only the first ones, for a draft; None: all
    check: bool = True  # compare with the reference; refuse a difference beyond the bound
    compute: str | None = None  # unit that the graph is laid out for, such as "gpu"
    context_length: int | None = None  # tokens, where the format fixes it
    hidden_states: bool = False

    def require_only(self, format: str, *known: str) -> None:
        """Raise UsageError for an option from `compute` on that is set and not `known`."""
        for name in ("compute", "context_length", "hidden_states"):
            if name not in known and getattr(self, name):
                raise UsageError(
                    f"the {format} exporter has no option {name.replace('_', '-')}",
                    remedy="Leave it out, or choose another --format.",
                )


@dataclass(frozen=True)
class ExportReport:
    """What was written, and its distance from the source on the packaged text."""

    path: Path
    num_bytes: int
    parity: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what was left out and why, a line each


class Exporter(Protocol):
    """Writes one format; found by the entry point group `edge_spec.exporters`."""

    format: str

    def export(
        self, checkpoint: Checkpoint, out: Path, options: ExportOptions, progress: Progress
    ) -> ExportReport: ...


@runtime_checkable
class ReadingExporter(Protocol):
    """An exporter with a reader for models that `open_checkpoint` refuses."""

    def open_source(self, path: Path) -> Any:
        """Return the input of `export`. Raises ModelFileError, UnsupportedModelError."""


@runtime_checkable
class ScreeningExporter(Protocol):
    """An exporter that judges from a description whether it can write a model."""

    format: str

    def require_exportable(self, checkpoint: Any) -> None:
        """Raise UnsupportedModelError. checkpoint: the input of `export`, weights unread."""


# Receives a matrix's Hugging Face name and its input, [rows, in] float32.
Observe = Callable[[str, np.ndarray], None]


class LayerStream(Protocol):
    """Sequences on their way through a model, with at most one matrix in memory."""

    num_done: int  # layers

    def advance(self) -> None:
        """Pass the next layer."""

    def logits(self, rows: np.ndarray) -> np.ndarray:
        """Return [len(rows), vocab] float32 after the last layer. rows: indices into the
        concatenated sequences."""


@runtime_checkable
class StreamsLayers(Protocol):
    """A runtime that can pass sequences through a model by layers."""

    def open_layers(
        self,
        source: TensorRows,
        sequences: Sequence[Sequence[int]],
        observe: Observe | None = None,
    ) -> LayerStream:
        """Embed the sequences, which do not see each other. `observe` receives each matrix's input
        before the matrix is read. Raises ContextFullError."""
