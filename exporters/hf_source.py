"""A Hugging Face model directory as a checkpoint."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.recommended_sampling import RecommendedSampling, recommended_sampling
from edge_spec.errors import ModelFileError, UnknownArchitectureError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.families import BY_MODEL_TYPE, told_model_types
from edge_spec.exporters.families.family import Family
from edge_spec.exporters.families.stated import StatedConfig, lacked_feature
from edge_spec.exporters.families.tensors import (
    apart,
    biases_and_norms,
    named_as_ours,
    whole_norms,
    without_unread,
)
from edge_spec.exporters.hf_files import (
    read_json,
    read_text,
    stated_ends,
    template_fields,
    token_ids,
)
from edge_spec.exporters.mtp_layers import without_mtp
from edge_spec.exporters.safetensors_reader import read_safetensors
from edge_spec.exporters.stored_tensor import StoredTensor
from edge_spec.models.bundle_files import is_below

_OF_ANSWERS = ("decoder_start_token_id", "forced_bos_token_id")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHOWN = 200  # characters of a name in a message


def open_directory(path: Path) -> StoredCheckpoint:
    """Raises ModelFileError for missing or damaged files, UnknownArchitectureError for a family,
    UnsupportedModelError for what of a known one is not supported."""
    values = read_json(path / "config.json")
    family = _known_family(path, values)
    values = {**family.defaults, **values, **_of_text(path, values)}
    values |= {usual: values[own] for usual, own in family.keys.items() if own in values}
    values |= _beginning(path)
    stated = StatedConfig(values, path / "config.json")
    lacked = lacked_feature(values, family.computes)
    if lacked is not None:
        raise stated.refuse(lacked)
    stored = named_as_ours(family, without_mtp(values, _read_tensors(path)))
    config = _config(stated, family, stored)
    if family.of_tensors is not None:
        stored = family.of_tensors(config, stored)
    stored = without_unread(config, stored)
    tensors = apart(config, stored) | whole_norms(family, stored)
    if config.tied_embeddings:
        tensors.pop("lm_head.weight", None)
    return StoredCheckpoint(path=path, config=config, tensors=tensors, **text_fields(path, values))


def _beginning(path: Path) -> dict[str, Any]:
    """Returns what generation_config.json states of the tokens that answers begin with, which
    transformers 5 states there alone."""
    generation = read_json(path / "generation_config.json", required=False)
    stated = {key: generation.get(key) for key in _OF_ANSWERS}
    return {key: value for key, value in stated.items() if value is not None}


def text_fields(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a `ModelInfo` says of text: its template, special tokens and tokenizer.

    values: of config.json. Raises ModelFileError; that the tokenizer is missing, when it is read.
    """
    tokenizer_config = read_json(path / "tokenizer_config.json", required=False)
    generation = read_json(path / "generation_config.json", required=False)
    ends = stated_ends(path, values)
    bos_ids = token_ids(path / "config.json", "bos_token_id", values.get("bos_token_id"))
    return {
        **template_fields(path, tokenizer_config),
        "eos_ids": tuple(ends),
        "end_sources": ends,
        "bos_id": bos_ids[0] if bos_ids else None,
        "adds_bos": _adds_bos(path, tokenizer_config, bos_ids),
        "read_tokenizer": lambda: read_text(path / "tokenizer.json"),
        "sampling": _sampling(generation),
    }


def _read_tensors(path: Path) -> dict[str, StoredTensor]:
    if not (path / INDEX).exists():
        return read_safetensors(path / SINGLE)
    tensors: dict[str, StoredTensor] = {}
    for file in shards(path):
        tensors |= read_safetensors(path / file)
    return tensors


def shards(path: Path) -> list[str]:
    """The files of `path` that its INDEX names. Raises ModelFileError."""
    names = read_json(path / INDEX).get("weight_map")
    if not (isinstance(names, dict) and names and all(isinstance(f, str) for f in names.values())):
        raise ModelFileError(f"{path / INDEX} has no weight_map", remedy="Download it again.")
    files = sorted(set(names.values()))
    for file in files:
        if "/" in file or not is_below(file):
            raise ModelFileError(
                f"{path / INDEX} names a file outside the directory: {file[:_SHOWN]!r}",
                remedy="Do not use this model.",
            )
    return files


def _sampling(generation: Mapping[str, Any]) -> RecommendedSampling:
    """Reads what generation_config.json states of sampling. `do_sample` false means the likeliest
    token, whatever else is stated, and true alone means temperature 1."""
    samples = generation.get("do_sample")
    if samples is False:
        return recommended_sampling({**generation, "temperature": 0.0})
    stated = dict(generation)
    if samples is True and stated.get("temperature") is None:
        stated["temperature"] = 1.0
    return recommended_sampling(stated)


def _adds_bos(path: Path, tokenizer_config: Mapping[str, Any], bos_ids: Sequence[int]) -> bool:
    """Says whether texts begin with BOS. Where tokenizer_config.json is silent, as Llama 3's,
    tokenizer.json decides."""
    stated = tokenizer_config.get("add_bos_token")
    if stated is not None or not bos_ids:
        return bool(stated)
    processor = read_json(path / "tokenizer.json", required=False).get("post_processor") or {}
    try:
        if processor.get("type") in ("RobertaProcessing", "BertProcessing"):
            return bool(processor["cls"][1] == bos_ids[0])
        for template in (processor, *processor.get("processors", ())):
            if template.get("type") == "TemplateProcessing":
                first = template["single"][0]["SpecialToken"]["id"]
                return bool(template["special_tokens"][first]["ids"][0] == bos_ids[0])
    except (AttributeError, IndexError, KeyError, TypeError):  # it begins with the text itself
        return False
    return False


def _known_family(path: Path, values: Mapping[str, Any]) -> Family:
    architecture = str(values.get("model_type"))
    family = BY_MODEL_TYPE.get(architecture)
    if family is None:
        if values.get("is_encoder_decoder"):
            raise UnknownArchitectureError(
                f"{path / 'config.json'}: model_type is {reprlib.repr(architecture)}, which has an "
                "encoder and a decoder of a kind that this version does not compute",
                remedy="Of such models it runs T5, Flan-T5, BART, Marian, mBART, Pegasus, M2M-100 "
                "and NLLB.",
            )
        lacked = lacked_feature(values)
        raise UnknownArchitectureError(
            f"{path / 'config.json'}: model_type is {reprlib.repr(architecture)}"
            + (f", which has {lacked}" if lacked else ""),
            remedy=f"Readable: {told_model_types()}. Else: edge-spec export MODEL OUT --format "
            "optimum.",
        )
    return family


def _of_text(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what is stated of the text model alone, where other models stand beside it."""
    found = values.get("text_config", {})
    if not isinstance(found, dict):
        raise ModelFileError(
            f"{path / 'config.json'}: text_config is {reprlib.repr(found)}, expected an object",
            remedy="Download the file again.",
        )
    return found


def _config(
    stated: StatedConfig, family: Family, tensors: Mapping[str, StoredTensor]
) -> ModelConfig:
    values = stated.values
    try:
        rope = stated.rope()
        fields: dict[str, Any] = {
            "architecture": str(values["model_type"]),
            "num_layers": int(values["num_hidden_layers"]),
            "hidden_size": int(values["hidden_size"]),
            "intermediate_size": int(values["intermediate_size"]),
            "num_heads": stated.num_heads,
            "num_kv_heads": int(values.get("num_key_value_heads") or stated.num_heads),
            "head_dim": stated.head_dim,
            "vocab_size": int(values["vocab_size"]),
            "context_length": stated.context_length,
            "norm_epsilon": float(values["rms_norm_eps"]),
            "rope_theta": rope.theta,
            "rope_scaling": rope.scaling,
            "tied_embeddings": bool(values.get("tie_word_embeddings", False)),
            "activation": stated.activation,
            "rotary_dim": stated.rotary_dim,
            **biases_and_norms(tensors),
        }
        config = ModelConfig(**{**fields, **family.of_config(stated)})
        has_head = config.encoder is None or "lm_head.weight" in tensors
        return config if has_head else replace(config, tied_embeddings=True)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"{stated.path} lacks a valid value: {error}",
            remedy="Download the file again.",
        ) from None
