"""Recognises trained heads by what is in their directories, never by names of directories."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import TrainedHead
from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_reader import (
    ASSISTANT,
    DFLASH,
    EAGLE3,
    HEAD_ARCHITECTURES,
    first_architecture,
)
from edge_spec.exporters.heads.assistant import (
    MODEL_TYPES,
    directory_assistant,
    gguf_assistant,
)
from edge_spec.exporters.heads.dflash import MARKS as DFLASH_MARKS
from edge_spec.exporters.heads.dflash import dflash_head
from edge_spec.exporters.heads.eagle import eagle_head
from edge_spec.exporters.heads.gguf_heads import trained_gguf_head
from edge_spec.exporters.heads.head_files import HeadFiles, not_computed
from edge_spec.exporters.heads.medusa import medusa_head
from edge_spec.exporters.heads.mtp import (
    directory_head,
    first_tensor,
    gguf_head,
    is_gguf_head,
    mtp_head,
)
from edge_spec.exporters.hf_source import only_pickled, read_json, read_weights
from edge_spec.exporters.mtp_layers import STATED, mtp_prefix
from edge_spec.exporters.stored_tensor import INTEGERS, StoredTensor

# Of config.json, any of which only heads have.
_MARKS = (
    "draft_vocab_size",
    "eagle_config",
    *DFLASH_MARKS,
    "medusa_num_heads",
    "speculators_config",
    "speculators_model_type",
)
_GGUF_HEADS: Mapping[str | None, Callable[[Path, ModelConfig, bool], TrainedHead]] = {
    ASSISTANT: gguf_assistant,
    EAGLE3: trained_gguf_head,
    DFLASH: trained_gguf_head,
}
_SPECULATORS = ("eagle", "eagle3", "peagle", "dflash", "dspark")


def says_head(config: Path) -> bool:
    """Returns whether this config.json alone is a trained head's: EAGLE-1 heads have no mark but
    their single layer."""
    try:
        values = read_json(config)
    except ModelFileError:
        return False
    return _is_marked(values) or values.get("num_hidden_layers") == 1


def _is_marked(values: Mapping[str, Any]) -> bool:
    return any(mark in values for mark in _MARKS) or values.get("model_type") in MODEL_TYPES


def is_head(path: Path, is_targets: bool = False) -> bool:
    """Returns whether this is a trained head's directory, or a GGUF file with one; its weights stay
    unread. is_targets: it is the target itself."""
    if path.is_file():
        return is_head_alone(path) or is_gguf_head(path, is_targets)
    if not (path / "config.json").is_file():
        return False
    try:
        values = read_json(path / "config.json")
        if _is_apart(path, values):
            return True
        tensors = _tensors(path)
        return first_tensor(tensors) is not None or mtp_prefix(values, tensors) is not None
    except (ModelFileError, UnsupportedModelError):
        return False  # whoever opens it as a model says what is wrong


def is_head_alone(path: Path) -> bool:
    """Returns whether this is a head's directory or GGUF file and no model's: an MTP layer lies
    beside its model's own."""
    if path.is_file():
        return first_architecture(path) in HEAD_ARCHITECTURES
    try:
        return _is_apart(path, read_json(path / "config.json"))
    except (ModelFileError, UnsupportedModelError):
        return False


def _is_apart(path: Path, values: Mapping[str, Any]) -> bool:
    """values: of config.json. Raises ModelFileError, UnsupportedModelError."""
    if _is_marked(values):
        return True
    if values.get("num_hidden_layers") == 1 and only_pickled(path):
        return True  # EAGLE-1 as it was published at first; `open_head` says what to do
    return "fc.weight" in _tensors(path)


def open_head(path: Path, target: ModelConfig, has_weights: bool = True) -> TrainedHead:
    """has_weights: else they stay unread, for a look at the head alone. Raises ModelFileError for a
    damaged head, UnsupportedModelError for a kind that is not computed, UsageError for the head of
    another target."""
    if path.is_file():
        opened = _GGUF_HEADS.get(first_architecture(path), gguf_head)
        return opened(path, target, has_weights)
    values, tensors = read_json(path / "config.json"), _tensors(path)
    return _opened(HeadFiles(path, values, tensors, target, has_weights))


def _opened(files: HeadFiles) -> TrainedHead:
    kind = files.values.get("speculators_model_type")
    if kind is not None and kind not in _SPECULATORS:
        told = f"{files.path} is a head of the kind {str(kind)[:100]}, which is not computed"
        raise not_computed(f"{told}; known are {', '.join(_SPECULATORS)}")
    if files.values.get("model_type") in MODEL_TYPES:
        return directory_assistant(files)
    if any(mark in files.values for mark in DFLASH_MARKS):
        return dflash_head(files)
    if "medusa_num_heads" in files.values:
        return medusa_head(files)
    if not any(mark in files.values for mark in _MARKS):
        if first_tensor(files.tensors) is not None:
            return directory_head(files)
        if files.values.get(STATED):
            return mtp_head(files)
    return eagle_head(files)


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Heads are published under names of their own, with integers among their tensors."""
    return read_weights(path, "*.safetensors", INTEGERS)
