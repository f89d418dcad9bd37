"""A published model: what it says of itself, and its weights where they can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.recommended_sampling import RecommendedSampling

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"  # names of chat templates
SpecialTokens = Mapping[str, str | Sequence[str]]  # such as {"bos_token": "<s>"}


class Tensors(Protocol):
    """Named weights in Hugging Face's names and layout, read as they are asked for."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> Iterator[str]: ...

    def float32(self, name: str) -> np.ndarray: ...


@runtime_checkable
class TensorRows(Tensors, Protocol):
    """Weights of which some rows can be read without the others."""

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return [len(rows), columns] of a matrix; rows: their indices, int64."""


@runtime_checkable
class SharesTables(Protocol):
    """A published model of which at least the embedding and the output matrix can be read."""

    def shared_tables(self) -> TensorRows:
        """Raises ModelFileError where they are missing."""


class ModelInfo(Protocol):
    """Holds what a published model says of itself, known before its weights are read."""

    path: Path
    config: ModelConfig
    chat_template: str | None
    eos_ids: tuple[int, ...]  # the first is the one that chat templates know
    end_sources: Mapping[int, str]  # what states each of them, such as a file
    bos_id: int | None
    adds_bos: bool  # whether every prompt begins with it
    sampling: RecommendedSampling
    named_templates: Mapping[str, str]  # other ones than `chat_template`, by name
    special_tokens: SpecialTokens  # as chat templates are given them; "": one that there is not

    @property
    def weight_types(self) -> frozenset[str]:
        """Says how the file stores weights, in ggml's names, such as "Q4_0"."""

    def tokenizer_json(self) -> str:
        """The tokenizer in the format of the `tokenizers` library."""


def is_plain(source: ModelInfo) -> bool:
    """Return whether every library runs and every exporter writes it: read whole, and a Llama."""
    return isinstance(source, TensorRows) and not source.config.features()


@runtime_checkable
class DigestedTokenizer(Protocol):
    """A `ModelInfo` whose tokenizer takes long to make, so that it is kept once it is made."""

    @property
    def tokenizer_digest(self) -> str | None:
        """Hexadecimal; changes with what `tokenizer_json` returns. None: it takes not long."""


class Checkpoint(ModelInfo, TensorRows, Protocol):
    """A model as its authors published it, opened but not yet converted."""
