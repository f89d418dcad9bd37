"""A GGUF file of the Llama family as a checkpoint in Hugging Face's names and layout."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np

from edge_spec.core.config import ModelConfig, RopeScaling
from edge_spec.core.recommended_sampling import RecommendedSampling, recommended_sampling
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import SUPPORTED_ARCHITECTURES, StoredCheckpoint
from edge_spec.exporters.gguf_kind import require_language_model
from edge_spec.exporters.gguf_reader import GgufFile, first_architecture
from edge_spec.exporters.gguf_tokenizer import tokenizer_digest, tokenizer_from_gguf
from edge_spec.exporters.stored_tensor import StoredTensor

MODEL_NAMES = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
LAYER_NAMES = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)

# llama.cpp's names of what it takes from generation_config.json: those of SamplingParams.
SAMPLING_KEYS = MappingProxyType(
    {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
    }
)
_LACKED_SAMPLING = ("xtc_probability", "mirostat")  # what turns on a sampling that ours lacks

STOP_TOKENS = ("eos", "eot", "eom")  # end of the sequence, of a turn, of a message


def open_gguf(path: Path) -> StoredCheckpoint:
    """Raises ModelFileError for a damaged file, UnsupportedModelError for another family."""
    architecture = first_architecture(path)
    if architecture is not None and architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(path, architecture)  # without reading a vocabulary of any size
    file = GgufFile(path)
    require_language_model(file)
    return checkpoint_of(file)


def checkpoint_of(file: GgufFile) -> StoredCheckpoint:
    """Raises as `open_gguf`."""
    path = file.path
    metadata = Metadata(file.metadata, path)
    config = _config(metadata, file.tensors)
    # llama.cpp stores q and k of "llama" for its interleaved rotation (convert_hf_to_gguf,
    # LlamaModel.permute); the Qwen families keep Hugging Face's order.
    interleaved = config.architecture == "llama"
    tensors = {}
    for name, tensor in file.tensors.items():
        if interleaved and (".attn_q." in name or ".attn_k." in name):
            tensor = _in_halves(tensor, config.head_dim)
        tensors[hf_name(name)] = tensor
    return StoredCheckpoint(
        path=path,
        config=config,
        tensors=tensors,
        **text_fields(file),
    )


def text_fields(file: GgufFile) -> TextFields:
    """How text becomes tokens, and where it ends. Raises ModelFileError."""
    metadata = Metadata(file.metadata, file.path)
    stop_ids = (metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in STOP_TOKENS)
    bos = metadata.get("tokenizer.ggml.bos_token_id", int)
    # llama.cpp adds BOS by default for SentencePiece vocabularies only.
    spm = metadata.get("tokenizer.ggml.model", str) == "llama"
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", bool)
    return TextFields(
        chat_template=metadata.get("tokenizer.chat_template", str),
        eos_ids=tuple(sorted({stop for stop in stop_ids if stop is not None})),
        bos_id=bos,
        adds_bos=bos is not None and (spm if adds_bos is None else adds_bos),
        read_tokenizer=lambda: str(tokenizer_from_gguf(metadata.values, metadata.path).to_str()),
        sampling=_sampling(metadata.values),
        tokenizer_digest=tokenizer_digest(file),
    )


def _sampling(values: Mapping[str, Any]) -> RecommendedSampling:
    """Reads what the file states of sampling. llama.cpp penalizes repetitions in the last tokens
    alone, ours in the whole text; of no last tokens, neither does."""
    stated = {name: _as_written(values.get(key)) for key, name in SAMPLING_KEYS.items()}
    if values.get("general.sampling.penalty_last_n") == 0:
        del stated["repetition_penalty"]
    lacked = [
        f"{name} {reprlib.repr(values[key])}"
        for name in _LACKED_SAMPLING
        if (key := f"general.sampling.{name}") in values and not _is_zero(values[key])
    ]
    return recommended_sampling(stated, tuple(lacked))


def _is_zero(value: Any) -> bool:
    return isinstance(value, int | float) and value == 0


def _as_written(value: Any) -> Any:
    """Returns a float32 as the decimal number that it was written from: 0.6, not 0.60000002."""
    is_short = isinstance(value, float) and abs(value) < float(np.finfo(np.float32).max)
    return float(str(np.float32(value))) if is_short else value


class TextFields(TypedDict):
    """The fields of a Checkpoint that concern its text."""

    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool
    read_tokenizer: Callable[[], str]
    sampling: RecommendedSampling
    tokenizer_digest: str


class Metadata:
    """Typed look-ups that name the file when a value is missing or of another type."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, key: str, kind: type) -> Any:
        value = self.values.get(key)
        if kind is float and isinstance(value, int):
            value = float(value)
        if value is not None and not isinstance(value, kind):
            raise ModelFileError(
                f"{self.path}: {_cut(key)} is {reprlib.repr(value)}, expected {kind.__name__}",
                remedy="Convert the model again.",
            )
        return value

    def require(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(
                f"{self.path} lacks {_cut(key)}", remedy="Convert the model again."
            )
        return value


def _cut(key: str) -> str:
    """A key has the architecture's name in it, which may be any text."""
    return key if len(key) < 80 else reprlib.repr(key)


def _config(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> ModelConfig:
    architecture = metadata.require("general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise _unsupported(metadata.path, architecture)

    if not tensors:
        raise UnsupportedModelError(
            f"{metadata.path} has a vocabulary and no weights",
            remedy="Give the file that has them.",
        )

    def value(key: str, kind: type = int) -> Any:
        return metadata.get(f"{architecture}.{key}", kind)

    def needed(key: str, kind: type = int) -> Any:
        return metadata.require(f"{architecture}.{key}", kind)

    num_heads = needed("attention.head_count")
    hidden_size = needed("embedding_length")
    embeddings = tensors.get("token_embd.weight")
    if embeddings is None or num_heads < 1:
        raise ModelFileError(
            f"{metadata.path} lacks token_embd.weight or attention heads",
            remedy="Convert the model again.",
        )
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    if tokens is not None and len(tokens) > embeddings.shape[0]:
        raise ModelFileError(
            f"{metadata.path} has {len(tokens)} tokens, but embeddings of {embeddings.shape[0]}",
            remedy="Convert the model again.",
        )
    window = value("attention.sliding_window")
    context_length = needed("context_length")
    return ModelConfig(
        architecture=architecture,
        num_layers=needed("block_count"),
        hidden_size=hidden_size,
        intermediate_size=needed("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv") or num_heads,
        head_dim=_head_dim(metadata, architecture, hidden_size // num_heads),
        vocab_size=embeddings.shape[0],
        context_length=min(context_length, window) if window else context_length,
        norm_epsilon=needed("attention.layer_norm_rms_epsilon", float),
        rope_theta=value("rope.freq_base", float) or 10000.0,
        rope_scaling=_rope_scaling(metadata, architecture, tensors),
        tied_embeddings="output.weight" not in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
    )


def _unsupported(path: Path, architecture: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} is a {reprlib.repr(architecture)} model",
        remedy=f"Supported architectures: {', '.join(SUPPORTED_ARCHITECTURES)}.",
    )


def _head_dim(metadata: Metadata, architecture: str, otherwise: int) -> int:
    """Raises UnsupportedModelError unless keys, values and what is rotated are of one size."""
    head_dim: int | None = metadata.get(f"{architecture}.attention.key_length", int)
    if head_dim is None:
        head_dim = otherwise
    if metadata.get(f"{architecture}.attention.value_length", int) not in (None, head_dim):
        raise UnsupportedModelError(
            f"{metadata.path} has keys of {head_dim} elements and values of another size",
            remedy="Use a model whose keys and values are of one size.",
        )
    rotated = metadata.get(f"{architecture}.rope.dimension_count", int)
    if rotated not in (None, head_dim):
        raise UnsupportedModelError(
            f"{metadata.path} rotates {rotated} of the {head_dim} elements of a head",
            remedy="Use a model that rotates all of them.",
        )
    return head_dim


def _rope_scaling(
    metadata: Metadata, architecture: str, tensors: Mapping[str, StoredTensor]
) -> RopeScaling | None:
    factors = tensors.get("rope_freqs.weight")
    if factors is not None:
        return RopeScaling("factors", factors=tuple(map(float, factors.float32().ravel())))
    kind = metadata.get(f"{architecture}.rope.scaling.type", str)
    if kind in (None, "none"):
        return None
    if kind != "linear":
        raise UnsupportedModelError(
            f"{metadata.path} scales its rotary embedding by {reprlib.repr(kind)}",
            remedy="Supported: none, linear and llama3.",
        )
    return RopeScaling(
        "linear", factor=metadata.require(f"{architecture}.rope.scaling.factor", float)
    )


def _in_halves(tensor: StoredTensor, head_dim: int) -> StoredTensor:
    """Reads rows as two halves a head that are stored as interleaved pairs."""
    rows = tensor.shape[0]
    if head_dim < 2 or rows % head_dim or head_dim % 2:
        return tensor  # Checkpoint refuses its shape
    stored = np.arange(rows).reshape(-1, head_dim // 2, 2)
    return replace(tensor, row_order=stored.swapaxes(1, 2).ravel())


def hf_name(name: str) -> str:
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES:
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return name
