"""Describes families: where their files state what a decoder is, and how they name its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.families.stated_metadata import StatedMetadata
from edge_spec.exporters.stored_tensor import StoredTensor

Fields = Mapping[str, Any]  # of a ModelConfig
Parts = Mapping[str, str]
# From tensors by our names to the same in our shapes, such as of all experts to those of each.
ShapedTensors = Callable[[ModelConfig, Mapping[str, StoredTensor]], dict[str, StoredTensor]]
# Of the text model's tensors, and of those that are left, in models that read pictures too.
TEXT_PREFIXES = ("language_model.model.", "model.language_model.")
_PICTURES = ("vision_tower.", "multi_modal_projector.")
PICTURES = (*_PICTURES, *(f"model.{part}" for part in _PICTURES))


def no_fields(stated: Any) -> Fields:
    return {}


@dataclass(frozen=True)
class Family:
    """Describes how the files of one family differ from Llama's; every name not mapped here is
    the same.

    of_config, of_metadata: the fields of the description that only this family states, or states in
    its own way, from config.json and from GGUF.
    """

    model_types: tuple[str, ...]  # of config.json
    architectures: tuple[str, ...]  # of GGUF, as general.architecture
    of_config: Callable[[StatedConfig], Fields] = no_fields
    of_metadata: Callable[[StatedMetadata], Fields] = no_fields
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of keys that config.json may lack
    keys: Parts = field(default_factory=dict)  # of config.json: what others call them, and this one
    parts: Parts = field(default_factory=dict)  # of a layer: its name in safetensors, and ours
    # Of a layer: its name in GGUF, and ours; with the ending where ours has none.
    gguf_parts: Parts = field(default_factory=dict)
    others: Parts = field(default_factory=dict)  # beside layers: names in both formats, and ours
    norm_offset: float = 0.0  # what safetensors' norms lack of what is multiplied with
    is_permuted: bool = False  # GGUF has rows of q and k as interleaved pairs
    prefixes: tuple[str, ...] = ()  # of the text model's tensors where others stand beside it
    ignored: tuple[str, ...] = ()  # prefixes of the tensors that text does not need
    computes: tuple[str, ...] = ()  # features that most families lack, as stated.py names them
    rename: Callable[[str], str] | None = None  # from all names in safetensors to ours
    of_tensors: ShapedTensors | None = None  # of safetensors that have other shapes
    # Of model_types that are computed in part: what of them is.
    limits: Parts = field(default_factory=dict)
