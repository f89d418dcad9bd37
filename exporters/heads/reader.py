"""Recognises trained heads by what is in their directories, never by names of directories.

Medusa-1 heads are read here: as FasterDecoding publishes them, once their weights are safetensors,
and those that share one output matrix over a part of the vocabulary: `lm_head.weight` and `d2t`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import HeadMatrix, MedusaHead, TrainedHead
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
from edge_spec.exporters.heads.eagle import DFLASH_MARKS, dflash_head, eagle_head, trained_gguf_head
from edge_spec.exporters.heads.head_files import (
    HeadFiles,
    Names,
    Shapes,
    not_computed,
    require_shapes,
    scored_tokens,
)
from edge_spec.exporters.heads.mtp import (
    directory_head,
    first_tensor,
    gguf_head,
    is_gguf_head,
    mtp_head,
)
from edge_spec.exporters.hf_source import NUM_MTP, mtp_prefix, only_pickled, read_json, read_weights
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

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
        if files.values.get(NUM_MTP):
            return mtp_head(files)
    return eagle_head(files)


def _tensors(path: Path) -> dict[str, StoredTensor]:
    """Heads are published under names of their own, with integers among their tensors."""
    return read_weights(path, "*.safetensors")


# Head, then residual block, or the output matrix after the last one.
_BLOCK = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d{1,2})\.(\d{1,2})\.weight")
_SHARED, _TOKENS = "lm_head.weight", "d2t"
_ROWS_AT_ONCE = 16384


def medusa_head(files: HeadFiles) -> MedusaHead:
    """Counts heads and blocks by the tensors: published code ignores what config.json says of it.
    Raises as `open_head` does."""
    path, tensors, target = files.path, files.tensors, files.target
    is_sharing = _SHARED in tensors
    counted = _BLOCK if is_sharing else _OUTPUT
    found = [match for match in map(counted.fullmatch, tensors) if match]
    if not found or (is_sharing and _TOKENS not in tensors):
        missing = _TOKENS if found else "0.0.linear.weight" if is_sharing else "0.1.weight"
        raise damaged(f"{path}: tensor {missing} is missing")
    num_heads = 1 + max(int(match[1]) for match in found)
    num_blocks = max(int(match[2]) for match in found) + is_sharing
    hidden, vocab, token_ids = target.hidden_size, target.vocab_size, None
    names = [[f"{head}.{b}.linear." for b in range(num_blocks)] for head in range(num_heads)]
    shapes: Shapes = {}
    for name in chain(*names):
        shapes |= {name + "weight": (hidden, hidden), name + "bias": (hidden,)}
    if is_sharing:
        token_ids = scored_tokens(files)
        outputs, num_scored = [_SHARED], vocab if token_ids is None else len(token_ids)
        shapes |= {_SHARED: (num_scored, hidden), _TOKENS: (num_scored,)}
    else:
        outputs = [f"{head}.{num_blocks}.weight" for head in range(num_heads)]
        shapes |= dict.fromkeys(outputs, (vocab, hidden))
    require_shapes(path, Names({}, {}), tensors, shapes)
    if not files.has_weights:
        return MedusaHead(path, hidden, vocab, num_heads, (), (), token_ids)
    blocks = tuple(
        tuple((tensors[b + "weight"].float32(), tensors[b + "bias"].float32()) for b in of_head)
        for of_head in names
    )
    matrices = tuple(_output(tensors[name]) for name in outputs)
    return MedusaHead(path, hidden, vocab, num_heads, blocks, matrices, token_ids)


def _output(stored: StoredTensor) -> HeadMatrix:
    """Read in parts: float32 of a whole one may take gigabytes."""
    starts = range(0, stored.shape[0], _ROWS_AT_ONCE)
    parts = [stored.rows(slice(start, start + _ROWS_AT_ONCE)) for start in starts]
    return HeadMatrix(tuple(part.float32 for part in parts), is_output=True)
