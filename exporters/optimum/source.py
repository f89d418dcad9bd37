"""Reads what an export needs of a Hugging Face directory, whatever its architecture."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_spec.core.recommended_sampling import RecommendedSampling
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.hf_source import INDEX, SINGLE, read_json, shards, text_fields

_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class OptimumSource:
    """A directory that holds nothing which has to be executed to be read."""

    path: Path
    model_type: str
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    adds_bos: bool  # whether every prompt begins with it
    read_tokenizer: Callable[[], str]
    sampling: RecommendedSampling


def open_source(path: Path) -> OptimumSource:
    """Weights stay unread. Raises ModelFileError, UnsupportedModelError."""
    if not path.is_dir():
        raise UnsupportedModelError(
            f"{path} is no directory, which is all that optimum exports",
            remedy="Give a Hugging Face directory with config.json and safetensors.",
        )
    values = read_json(path / "config.json")
    tokenizer_config = read_json(path / "tokenizer_config.json", required=False)
    for name, content in (("config.json", values), ("tokenizer_config.json", tokenizer_config)):
        if content.get("auto_map"):
            raise UnsupportedModelError(
                f"{path / name} asks to run code of the model's own (auto_map)",
                remedy="Only architectures that transformers brings itself can be exported.",
            )
    model_type = values.get("model_type")
    if not isinstance(model_type, str):
        raise ModelFileError(
            f"{path / 'config.json'}: model_type is {reprlib.repr(model_type)}",
            remedy="Download the file again.",
        )
    _require_causal(path, values)
    _require_safetensors(path)
    return OptimumSource(path, model_type, **text_fields(path, values))


def _require_causal(path: Path, values: Mapping[str, Any]) -> None:
    if values.get("is_encoder_decoder"):
        raise UnsupportedModelError(
            f"{path / 'config.json'} is of a model with an encoder and a decoder",
            remedy="Only models that write text token by token, without an encoder, can run.",
        )
    if "quantization_config" in values:
        raise UnsupportedModelError(
            f"{path / 'config.json'}: the weights are quantized already",
            remedy="Export the model that they were quantized from.",
        )


def _require_safetensors(path: Path) -> None:
    names = shards(path) if (path / INDEX).exists() else [SINGLE]
    for name in names:
        if (path / name).is_file() and name.endswith(".safetensors"):
            continue
        if name == SINGLE and any(next(path.glob(kind), None) for kind in _PICKLES):
            raise UnsupportedModelError(
                f"{path} has its weights as a pickle, which can run code when it is read",
                remedy="Use the model's safetensors.",
            )
        raise ModelFileError(
            f"there is no safetensors file {path / name}", remedy="Download the model again."
        )
