"""Reads what a GGUF file says of itself, for a library that runs it as it is."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import SpecialTokens
from edge_spec.core.recommended_sampling import RecommendedSampling
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import MAX_CONTEXT_TOKENS, StoredCheckpoint
from edge_spec.exporters.families import BY_ARCHITECTURE
from edge_spec.exporters.families.stated import EXPERTS
from edge_spec.exporters.families.tensors import MODEL_NAMES, hf_name
from edge_spec.exporters.gguf_metadata import (
    HEAD_ARCHITECTURES,
    Metadata,
    column,
    no_model,
    require_language_model,
    token_texts,
)
from edge_spec.exporters.gguf_reader import GgufFile, open_gguf_file
from edge_spec.exporters.gguf_source import checkpoint_of, text_fields
from edge_spec.exporters.mtp_layers import is_only_mtp, main_layers
from edge_spec.exporters.stored_tensor import StoredTensor

# Keys that the library asserts for these architectures.
_ASSERTED = {
    "llada-moe": "expert_count",
    "smallthinker": "expert_count",
    "paddleocr": "rope.dimension_sections",
}
_LIBRARY_SCALINGS = ("yarn",)
_MAX_COUNT = 1 << 31  # the library keeps counts in 32 bits
_BAICHUAN_LAYERS = (32, 40)  # by which the library tells how positions are encoded


@dataclass(frozen=True, eq=False)
class GgufModelInfo:
    """A GGUF file of a model that this version cannot convert."""

    path: Path
    config: ModelConfig
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    read_tokenizer: Callable[[], str]
    sampling: RecommendedSampling
    named_templates: Mapping[str, str]
    special_tokens: SpecialTokens
    tokenizer_digest: str
    end_sources: Mapping[int, str]  # what states each of eos_ids
    tensors: Mapping[str, StoredTensor]  # by Hugging Face's names, as far as there are any

    @property
    def weight_types(self) -> frozenset[str]:
        return frozenset(tensor.kind.name for tensor in self.tensors.values())

    def tokenizer_json(self) -> str:
        return self.read_tokenizer()

    def shared_tables(self) -> SharedTables:
        """Raises ModelFileError where there is none."""
        needed = MODEL_NAMES["token_embd.weight"]
        if needed not in self.tensors:
            raise ModelFileError(
                f"{self.path} lacks token_embd.weight", remedy="Convert the model again."
            )
        return SharedTables(self.config, self.tensors)


@dataclass(frozen=True, eq=False)
class SharedTables:
    """The embedding and the output matrix of such a file, which need no description of it."""

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]

    def names(self) -> Iterator[str]:
        return (name for name in MODEL_NAMES.values() if name in self.tensors)

    def float32(self, name: str) -> np.ndarray:
        return self.tensors[name].float32()

    def float32_rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        return self.tensors[name].rows(rows).float32()


def open_model_info(path: Path) -> StoredCheckpoint | GgufModelInfo:
    """Checks of the supported architectures everything that a conversion needs, of others, and of
    variants that cannot be converted, that the file is complete. Raises ModelFileError,
    UnsupportedModelError.

    The library ends the process where an assertion of its own fails, so all that it asserts about
    a file and does not report is checked here.
    """
    file = open_gguf_file(path)
    require_language_model(file)
    metadata = Metadata(file.metadata, path)
    architecture = metadata.require("general.architecture", str)
    if architecture in HEAD_ARCHITECTURES:
        raise no_model(path)
    _check_vocabulary(file)
    _check_vectors(file)
    if architecture in BY_ARCHITECTURE and not _is_beyond_ours(metadata, architecture):
        return checkpoint_of(file)
    _check_architecture(metadata)
    if main_layers(metadata) is not None and is_only_mtp(file.tensors):
        raise UnsupportedModelError(
            f"{path} has the layer for multi-token prediction alone, not the model",
            remedy="Name it as the --draft of its model.",
        )
    tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}
    config = _config(metadata, is_tied="lm_head.weight" not in tensors)
    return GgufModelInfo(path, config, tensors=tensors, **text_fields(file))


def _is_beyond_ours(metadata: Metadata, architecture: str) -> bool:
    """Says whether a model of a family that exporters know has what only a library runs: experts,
    or a rotary embedding that is stretched in another way."""
    experts = EXPERTS not in BY_ARCHITECTURE[architecture].computes and metadata.get(
        f"{architecture}.expert_count", int
    )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", str)
    return bool(experts) or scaling in _LIBRARY_SCALINGS


def _check_vocabulary(file: GgufFile) -> None:
    num_tokens = len(token_texts(file.metadata, file.path))
    for key in ("token_type", "scores"):
        column(file.metadata, file.path, key, num_tokens)


def _check_vectors(file: GgufFile) -> None:
    """Norms and biases are added and multiplied as they are stored, in float32."""
    for name, tensor in file.tensors.items():
        is_vector = len(tensor.shape) == 1 and name.endswith((".weight", ".bias"))
        if is_vector and tensor.kind != GGMLQuantizationType.F32:
            raise UnsupportedModelError(
                f"{file.path}: the vector {name} is stored as {tensor.kind.name}, expected F32",
                remedy="Convert the model again.",
            )


def _check_architecture(metadata: Metadata) -> None:
    architecture = metadata.require("general.architecture", str)
    key = _ASSERTED.get(architecture)
    layers = metadata.get("baichuan.block_count", int)
    if key and not metadata.values.get(f"{architecture}.{key}"):
        problem = f"lacks {architecture}.{key}"
    elif architecture == "baichuan" and layers not in _BAICHUAN_LAYERS:
        problem = f"has {layers} layers, expected one of {_BAICHUAN_LAYERS}"
    else:
        return
    raise ModelFileError(f"{metadata.path} {problem}", remedy="Convert the model again.")


def _config(metadata: Metadata, is_tied: bool) -> ModelConfig:
    """Reads the dimensions that all architectures state; 0 where this one does not."""
    architecture = metadata.require("general.architecture", str)
    tokens = metadata.require("tokenizer.ggml.tokens", list)

    def largest(key: str, otherwise: int = 0) -> int:
        """A number, or the largest where each layer has one of its own."""
        value: Any = metadata.values.get(f"{architecture}.{key}", otherwise)
        if isinstance(value, np.ndarray) and value.size:
            value = int(value.max())
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
            raise ModelFileError(
                f"{metadata.path}: {reprlib.repr(architecture)}.{key} is no count",
                remedy="Convert the model again.",
            )
        return value

    own_layers = main_layers(metadata)
    num_heads = largest("attention.head_count")
    hidden_size = largest("embedding_length")
    return ModelConfig(
        architecture=architecture,
        num_layers=largest("block_count") if own_layers is None else own_layers,
        hidden_size=hidden_size,
        intermediate_size=largest("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=largest("attention.head_count_kv", num_heads),
        head_dim=largest("attention.key_length", hidden_size // max(num_heads, 1)),
        vocab_size=len(tokens),
        context_length=_context_length(metadata, architecture),
        norm_epsilon=_norm_epsilon(metadata, architecture),
        rope_theta=metadata.get(f"{architecture}.rope.freq_base", float) or 10000.0,
        tied_embeddings=is_tied,
        num_experts=largest("expert_count"),
        experts_used=largest("expert_used_count"),
    )


def _context_length(metadata: Metadata, architecture: str) -> int:
    found: int = metadata.require(f"{architecture}.context_length", int)
    if not 1 <= found <= MAX_CONTEXT_TOKENS:
        raise ModelFileError(
            f"{metadata.path}: its context is {found} tokens, expected 1 to {MAX_CONTEXT_TOKENS}",
            remedy="Convert the model again.",
        )
    return found


def _norm_epsilon(metadata: Metadata, architecture: str) -> float:
    for kind in ("rms_", ""):
        key = f"{architecture}.attention.layer_norm_{kind}epsilon"
        epsilon: float | None = metadata.get(key, float)
        if epsilon is not None:
            if not 0 < epsilon < 1:
                raise ModelFileError(
                    f"{metadata.path}: {reprlib.repr(key)} is {epsilon}",
                    remedy="Convert the model again.",
                )
            return epsilon
    return 0.0  # a model without
