"""A published model: its description, and its weights where they can be read."""

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
    """Weights with Hugging Face's names and layout, read on access."""

    @property
    def config(self) -> ModelConfig: ...

    def names(self) -> Iterator[str]: ...

    def float32(self, name: str) -> np.ndarray: ...


@runtime_checkable
class TensorRows(Tensors, Protocol):
    """Weights that can be read row by row."""

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return [len(rows), columns]. rows: int64."""


@runtime_checkable
class SharesTables(Protocol):
    """A published model with at least a readable embedding and output matrix."""

    def shared_tables(self) -> TensorRows:
        """Raises ModelFileError if they are missing."""


class ModelInfo(Protocol):
    """A published model's description, known before its weights are read."""

    path: Path
    config: ModelConfig
    chat_template: str | None
    eos_ids: tuple[int, ...]  # the first is the one that chat templates use
    end_sources: Mapping[int, str]  # where each is declared, such as a file
    bos_id: int | None
    adds_bos: bool  # whether every prompt begins with it
    sampling: RecommendedSampling
    named_templates: Mapping[str, str]  # those other than `chat_template`, by name
    special_tokens: SpecialTokens  # as passed to chat templates; "": none
    # Hexadecimal; changes with `tokenizer_json`'s result. None: that is built fast.
    tokenizer_digest: str | None

    @property
    def weight_types(self) -> frozenset[str]:
        """Types of the stored weights, in ggml's names, such as "Q4_0"."""

    def tokenizer_json(self) -> str:
        """Return the tokenizer in the format of the `tokenizers` library."""


def is_plain(source: ModelInfo) -> bool:
    """Return whether all runtimes and exporters take it: a Llama, readable as a whole."""
    return isinstance(source, TensorRows) and not source.config.features()


class Checkpoint(ModelInfo, TensorRows, Protocol):
    """A model as its authors published it, opened but not yet converted."""
