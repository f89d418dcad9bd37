"""What a GGUF file says of itself, for a library that runs it as it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.architecture import ModelConfig
from edge_spec.errors import ModelFileError
from edge_spec.exporters.checkpoint import SUPPORTED_ARCHITECTURES, Checkpoint
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_source import Metadata, checkpoint_of, text_fields


@dataclass(frozen=True, eq=False)
class PublishedGguf:
    """A GGUF file of an architecture that this version cannot convert."""

    path: Path
    config: ModelConfig
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    read_tokenizer: Callable[[], str]

    def tokenizer_json(self) -> str:
        return self.read_tokenizer()


def open_published(path: Path) -> Checkpoint | PublishedGguf:
    """Of the supported architectures everything is checked that a conversion needs, of others
    that the file is complete. Raises ModelFileError."""
    file = GgufFile(path)
    if file.metadata.get("general.architecture") in SUPPORTED_ARCHITECTURES:
        return checkpoint_of(file)
    metadata = Metadata(file.metadata, path)
    return PublishedGguf(path, _config(metadata), **text_fields(metadata))


def _config(metadata: Metadata) -> ModelConfig:
    """Dimensions as far as all architectures state them; 0 where this one does not."""
    architecture = metadata.require("general.architecture", str)
    tokens = metadata.require("tokenizer.ggml.tokens", list)

    def largest(key: str, otherwise: int = 0) -> int:
        """A number, or the largest where each layer has one of its own."""
        value: Any = metadata.values.get(f"{architecture}.{key}", otherwise)
        if isinstance(value, np.ndarray) and value.size:
            value = int(value.max())
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelFileError(
                f"{metadata.path}: {architecture}.{key} is no count",
                remedy="Convert the model again.",
            )
        return value

    num_heads = largest("attention.head_count")
    hidden_size = largest("embedding_length")
    return ModelConfig(
        architecture=architecture,
        num_layers=largest("block_count"),
        hidden_size=hidden_size,
        intermediate_size=largest("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=largest("attention.head_count_kv", num_heads),
        head_dim=largest("attention.key_length", hidden_size // max(num_heads, 1)),
        vocab_size=len(tokens),
        context_length=metadata.require(f"{architecture}.context_length", int),
        norm_epsilon=0.0,
        rope_theta=metadata.get(f"{architecture}.rope.freq_base", float) or 10000.0,
    )
