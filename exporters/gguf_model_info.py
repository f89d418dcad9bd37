"""Open a GGUF file as a checkpoint in Hugging Face's names and layout, or describe it for a library
that runs it as it is."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gguf.constants import GGMLQuantizationType

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_info import DEFAULT_TEMPLATE, SpecialTokens
from edge_spec.core.recommended_sampling import RecommendedSampling, recommended_sampling
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.checkpoint import (
    MAX_CONTEXT_TOKENS,
    ModelText,
    StoredCheckpoint,
    StoredWeights,
)
from edge_spec.exporters.families import BY_ARCHITECTURE, BY_MODEL_TYPE
from edge_spec.exporters.families.family import (
    MODEL_NAMES,
    arranged,
    hf_name,
    model_config,
    read_gguf,
    turned,
)
from edge_spec.exporters.families.stated import EXPERTS, GgufKeys
from edge_spec.exporters.gguf_reader import (
    HEAD_ARCHITECTURES,
    GgufFile,
    Metadata,
    first_architecture,
    is_only_mtp,
    main_layers,
    no_model,
    open_gguf_file,
    require_language_model,
)
from edge_spec.exporters.gguf_tokenizer import (
    COLUMNS,
    Vocabulary,
    tokenizer_digest,
    tokenizer_from_gguf,
)
from edge_spec.exporters.hf_source import template_fields
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

# llama.cpp keys (after the architecture) of ModelConfig fields that may differ per layer.
_COUNTS = {
    "embedding_length": "hidden_size",
    "block_count": "num_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_heads",
    "attention.head_count_kv": "num_kv_heads",
    "attention.key_length": "head_dim",
}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "experts_used"}
MODEL_KEYS = {  # in the order written
    "vocab_size": "vocab_size",
    "context_length": "context_length",
    **_COUNTS,
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_epsilon",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
}
# llama.cpp's names of SamplingParams.
SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}

_TEMPLATE = "tokenizer.chat_template"
# Special tokens that chat templates use; GGUF misspells one.
TEMPLATE_TOKENS = {
    "bos": "bos_token",
    "eos": "eos_token",
    "unknown": "unk_token",
    "seperator": "sep_token",
    "padding": "pad_token",
    "cls": "cls_token",
    "mask": "mask_token",
    # Fill-in-the-middle.
    "fim_pre": "prefix_token",
    "fim_suf": "suffix_token",
    "fim_mid": "middle_token",
    "fim_rep": "repository_token",
    "fim_sep": "file_token",
    "fim_pad": "padding_token",
}
# Older GGUF names.
_OLDER_TOKENS = {"prefix": "prefix_token", "suffix": "suffix_token", "middle": "middle_token"}
STOP_TOKENS = ("eos", "eot", "eom")  # end of sequence, turn, message
# End a fill-in-the-middle: padding, another repository or file.
_FIM_STOP_TOKENS = ("fim_pad", "fim_rep", "fim_sep")


def open_gguf(path: Path) -> StoredCheckpoint:
    """Raises ModelFileError for a damaged file, UnsupportedModelError for another family."""
    architecture = first_architecture(path)
    if architecture is not None and architecture not in BY_ARCHITECTURE:
        raise _unsupported(path, architecture)  # before the vocabulary is read
    file = open_gguf_file(path)
    require_language_model(file)
    return checkpoint_of(file)


def checkpoint_of(file: GgufFile) -> StoredCheckpoint:
    metadata = Metadata(file.metadata, file.path)
    architecture = metadata.require("general.architecture", str)
    family = BY_ARCHITECTURE.get(architecture)
    if family is None:
        raise _unsupported(file.path, architecture)
    stored = {hf_name(name, family): tensor for name, tensor in file.tensors.items()}
    _require_weights(metadata, stored)
    stated = read_gguf(family, GgufKeys(metadata, architecture, stored))
    config = model_config(family, stated, stored)
    tensors = arranged(config, stored)
    if family.is_permuted:
        tensors = {n: turned(n, each, config.head_dim, True) for n, each in tensors.items()}
    return StoredCheckpoint(file.path, config, tensors, **text_fields(file))


def text_fields(file: GgufFile) -> dict[str, Any]:
    """Return the `ModelText` fields. Raises ModelFileError."""
    metadata = Metadata(file.metadata, file.path)
    ends = _stated_ends(metadata)
    bos = metadata.get("tokenizer.ggml.bos_token_id", int)
    # llama.cpp adds BOS by default only for SentencePiece vocabularies.
    spm = metadata.get("tokenizer.ggml.model", str) == "llama"
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", bool)
    return dict(
        **_templates(metadata),
        special_tokens=_special_tokens(metadata),
        eos_ids=tuple(ends),
        end_sources=ends,
        bos_id=bos,
        adds_bos=bos is not None and (spm if adds_bos is None else adds_bos),
        read_tokenizer=partial(_tokenizer_json, file),
        sampling=_sampling(metadata.values),
        tokenizer_digest=tokenizer_digest(file),
    )


def _templates(metadata: Metadata) -> dict[str, Any]:
    named = {
        key.removeprefix(f"{_TEMPLATE}."): metadata.require(key, str)
        for key in metadata.values
        if key.startswith(f"{_TEMPLATE}.")
    }
    default = metadata.get(_TEMPLATE, str)
    return template_fields(named if default is None else {**named, DEFAULT_TEMPLATE: default})


def _token_ids(metadata: Metadata, names: Iterable[str]) -> dict[str, int]:
    """Return token IDs by GGUF's names. As in llama.cpp, an ID beyond the vocabulary is ignored."""
    num_tokens = len(metadata.get("tokenizer.ggml.tokens", list) or ())
    stated = {name: metadata.get(f"tokenizer.ggml.{name}_token_id", int) for name in names}
    return {name: id for name, id in stated.items() if id is not None and 0 <= id < num_tokens}


def _special_tokens(metadata: Metadata) -> SpecialTokens:
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    names = {**_OLDER_TOKENS, **TEMPLATE_TOKENS}
    ids = _token_ids(metadata, names)
    return {names[key]: tokens[id] for key, id in ids.items() if isinstance(tokens[id], str)}


def _stated_ends(metadata: Metadata) -> dict[int, str]:
    keys: dict[int, list[str]] = {}
    for names in (STOP_TOKENS, _FIM_STOP_TOKENS):
        for name, id in sorted(_token_ids(metadata, names).items(), key=lambda each: each[::-1]):
            keys.setdefault(id, []).append(f"{name}_token_id")
    return {id: ", ".join(stating) for id, stating in keys.items()}


_tokenizers: WeakKeyDictionary[GgufFile, str] = WeakKeyDictionary()


def _tokenizer_json(file: GgufFile) -> str:
    """Build it once per open file; a large one takes a second."""
    if file not in _tokenizers:
        _tokenizers[file] = tokenizer_from_gguf(file.metadata, file.path).to_str()
    return _tokenizers[file]


def _sampling(values: Mapping[str, Any]) -> RecommendedSampling:
    """Read the recommended sampling. llama.cpp penalizes repetitions only in the last tokens, we
    everywhere; with penalty_last_n 0, neither does."""
    stated = {name: _as_written(values.get(key)) for key, name in SAMPLING_KEYS.items()}
    if values.get("general.sampling.penalty_last_n") == 0:
        del stated["repetition_penalty"]
    return recommended_sampling(stated)


def _as_written(value: Any) -> Any:
    """Return a float32 as the decimal it was written from: 0.6, not 0.60000002."""
    is_short = isinstance(value, float) and abs(value) < float(np.finfo(np.float32).max)
    return float(str(np.float32(value))) if is_short else value


def _require_weights(metadata: Metadata, tensors: Mapping[str, StoredTensor]) -> None:
    path, embeddings = metadata.path, tensors.get("model.embed_tokens.weight")
    if not tensors:
        raise UnsupportedModelError(
            f"{path} has a vocabulary and no weights", remedy="Give the file that has them."
        )
    if embeddings is None:
        raise damaged(f"{path} lacks token_embd.weight")
    tokens = metadata.get("tokenizer.ggml.tokens", list)
    if tokens is not None and len(tokens) > embeddings.shape[0]:
        raise damaged(f"{path} has {len(tokens)} tokens, but embeddings of {embeddings.shape[0]}")


def _unsupported(path: Path, architecture: str) -> UnsupportedModelError:
    remedy = f"Supported architectures: {', '.join(BY_ARCHITECTURE)}."
    if architecture in BY_MODEL_TYPE:
        remedy = "Give its Hugging Face directory, which is read."
    return UnsupportedModelError(f"{path} is a {reprlib.repr(architecture)} model", remedy=remedy)


@dataclass(frozen=True, eq=False)
class GgufModelInfo(ModelText):
    """A GGUF model that this version cannot convert."""

    config: ModelConfig
    tensors: Mapping[str, StoredTensor]  # by Hugging Face's names where they exist

    @property
    def weight_types(self) -> frozenset[str]:
        return frozenset(tensor.kind.name for tensor in self.tensors.values())

    def shared_tables(self) -> StoredWeights:
        """Return the embedding, the norm and the output matrix, if it has one."""
        if MODEL_NAMES["token_embd.weight"] not in self.tensors:
            raise damaged(f"{self.path} lacks token_embd.weight")
        names = [name for name in MODEL_NAMES.values() if name in self.tensors]
        return StoredWeights(self.config, {name: self.tensors[name] for name in names})


_ASSERTED = {
    "llada-moe": "expert_count",
    "smallthinker": "expert_count",
    "paddleocr": "rope.dimension_sections",
}
_BAICHUAN_LAYERS = (32, 40)  # by which the library chooses the position encoding


def open_model_info(path: Path) -> StoredCheckpoint | GgufModelInfo:
    """Open a GGUF file for llama.cpp, and check what it asserts for all architectures: a failed
    assertion ends the process. A supported architecture is checked as for conversion, others only
    for completeness. Raises ModelFileError, UnsupportedModelError."""
    file = open_gguf_file(path)
    require_language_model(file)
    metadata = Metadata(file.metadata, path)
    architecture = metadata.require("general.architecture", str)
    if architecture in HEAD_ARCHITECTURES:
        raise no_model(path)
    vocabulary = Vocabulary(file.metadata, path)
    for key in COLUMNS:
        vocabulary.numbers(key, 0.0)
    _check_vectors(file)
    family = BY_ARCHITECTURE.get(architecture)
    mixes = metadata.get(f"{architecture}.expert_count", int)
    if family is not None and (EXPERTS in family.computes or not mixes):
        return checkpoint_of(file)
    _check_architecture(metadata, architecture)
    if main_layers(metadata) is not None and is_only_mtp(file.tensors):
        raise UnsupportedModelError(
            f"{path} has the layer for multi-token prediction alone, not the model",
            remedy="Name it as the --draft of its model.",
        )
    tensors = {hf_name(name): tensor for name, tensor in file.tensors.items()}
    config = _dimensions(metadata, GgufKeys(metadata, architecture, tensors))
    return GgufModelInfo(path, config, tensors=tensors, **text_fields(file))


def _check_architecture(metadata: Metadata, architecture: str) -> None:
    key = _ASSERTED.get(architecture)
    layers = metadata.get("baichuan.block_count", int)
    if key and not metadata.values.get(f"{architecture}.{key}"):
        raise damaged(f"{metadata.path} lacks {architecture}.{key}")
    if architecture == "baichuan" and layers not in _BAICHUAN_LAYERS:
        told = f"has {layers} layers, expected one of {_BAICHUAN_LAYERS}"
        raise damaged(f"{metadata.path} {told}")


def _check_vectors(file: GgufFile) -> None:
    """llama.cpp requires float32 norms and biases."""
    for name, tensor in file.tensors.items():
        is_vector = len(tensor.shape) == 1 and name.endswith((".weight", ".bias"))
        if is_vector and tensor.kind != GGMLQuantizationType.F32:
            raise UnsupportedModelError(
                f"{file.path}: the vector {name} is stored as {tensor.kind.name}, expected F32",
                remedy="Convert the model again.",
            )


def _dimensions(metadata: Metadata, keys: GgufKeys) -> ModelConfig:
    """Return the largest value of each dimension over all layers; 0 if missing."""
    counts: dict[str, Any] = {
        field: max(keys.per_layer(key, 0), default=0) for key, field in (_COUNTS | _EXPERTS).items()
    }
    counts["num_layers"] = main_layers(metadata) or counts["num_layers"]
    counts["num_kv_heads"] = counts["num_kv_heads"] or counts["num_heads"]
    usual_size = counts["hidden_size"] // max(counts["num_heads"], 1)
    counts["head_dim"] = counts["head_dim"] or usual_size
    context_length = int(keys.require("context_length", int))
    if not 1 <= context_length <= MAX_CONTEXT_TOKENS:
        raise damaged(
            f"{keys.path}: its context is {context_length} tokens, expected 1 to "
            f"{MAX_CONTEXT_TOKENS}"
        )
    epsilons = (
        keys.get(f"attention.layer_norm_{kind}epsilon", float) or 0.0 for kind in ("rms_", "")
    )
    return ModelConfig(
        architecture=keys.architecture,
        **counts,
        vocab_size=len(metadata.require("tokenizer.ggml.tokens", list)),
        context_length=context_length,
        norm_epsilon=max(epsilons),
        rope_theta=keys.get("rope.freq_base", float) or 10000.0,
        tied_embeddings="lm_head.weight" not in keys.tensors,
    )
