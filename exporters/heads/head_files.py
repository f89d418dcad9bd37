"""Common parts of head readers: files, tensor names and shapes, and usual config.json keys."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.families.family import LAYER_NAMES
from edge_spec.exporters.families.stated import GgufKeys
from edge_spec.exporters.gguf_reader import GgufFile, Metadata
from edge_spec.exporters.stored_tensor import KINDS, StoredTensor, damaged

_SHOWN = 200  # characters of a name in messages
_MAX_LAYERS = 64  # of a head


def other_target(told: str) -> UsageError:
    return UsageError(told, remedy="Use the head with the model that it was trained for.")


def not_computed(told: str) -> UnsupportedModelError:
    return UnsupportedModelError(told, remedy="Use another head.")


def unusable(path: Path, what: str) -> ModelFileError:
    return damaged(f"{path}: config.json has no {what}")


def unknown_tensor(path: Path, name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} has a tensor {name[:_SHOWN]}, which no known head has",
        remedy="Use a head of a kind that docs/drafters.md lists, or none.",
    )


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """A head's files (or those of a model that contains it) and its target."""

    path: Path
    values: Mapping[str, Any]  # config.json's, or by its keys
    tensors: Mapping[str, StoredTensor]  # of all files
    target: ModelConfig
    has_weights: bool  # False: only describe the head


class StoredTensors(Mapping[str, np.ndarray]):
    """Read a tensor as float32 at each access; nothing is cached."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> np.ndarray:
        return self._stored[name].float32()

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


_ROWS = ("confidence_head.proj.weight", "shared_gate.weight")  # vectors in GGUF


@dataclass(frozen=True)
class Names:
    """Map one format's tensor names to ours.

    whole: outside layers; of_layers: after `layer`, in which {} is the number, if any. prefix: of
    all. ignored: endings of unneeded names.
    """

    whole: Mapping[str, str]
    of_layers: Mapping[str, str]
    layer: str = "layers.{}."
    prefix: str = ""
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def rename(self, path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return the head's tensors by our names. Raises UnsupportedModelError for an unknown
        one."""
        named: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            if not name.startswith(self.prefix) or name.endswith(self.ignored):
                continue
            ours = self._table.get(name)
            if ours is None:
                raise unknown_tensor(path, name)
            if ours.endswith(_ROWS) and len(tensor.shape) == 1:
                tensor = replace(tensor, shape=(1, *tensor.shape), data=tensor.data[None])
            named[ours] = tensor
        return named

    @cached_property
    def _table(self) -> Mapping[str, str]:
        layers = {n: self.layer.format(n) for n in range(_MAX_LAYERS if "{}" in self.layer else 1)}
        of_layers = {
            prefix + theirs: f"layers.{layer}.{ours}"
            for layer, prefix in layers.items()
            for theirs, ours in self.of_layers.items()
        }
        return {self.prefix + theirs: ours for theirs, ours in {**self.whole, **of_layers}.items()}

    @cached_property
    def theirs(self) -> Mapping[str, str]:
        """Our names -> full ones in files, for messages."""
        return {ours: theirs for theirs, ours in self._table.items()}


_ENDS = ("weight", "bias")
# A layer's names, in Hugging Face's files and in GGUF.
LAYER = {
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    **{f"self_attn.{part}_proj.{end}": f"{part}.{end}" for part in "qkvo" for end in _ENDS},
    **{f"mlp.{part}_proj.weight": f"{part}.weight" for part in ("gate", "up", "down")},
}
GGUF_LAYER = {
    f"{gguf}.{end}": LAYER[f"{hf}.{end}"]
    for gguf, hf in LAYER_NAMES.items()
    for end in _ENDS
    if f"{hf}.{end}" in LAYER
}

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(config: ModelConfig, read: int) -> Shapes:
    """Return shapes of a layer's matrices and MLP norm. read: width of the attention's input."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return {
        "q.weight": (config.query_size, read),
        "k.weight": (config.kv_size, read),
        "v.weight": (config.kv_size, read),
        "o.weight": (hidden, config.query_size),
        "gate.weight": (inner, hidden),
        "up.weight": (inner, hidden),
        "down.weight": (hidden, inner),
        "post_norm": (hidden,),
    }


def require_shapes(
    path: Path, names: Names, named: Mapping[str, StoredTensor], shapes: Shapes
) -> None:
    """Raises ModelFileError for missing or wrong tensors, UnsupportedModelError for extra ones."""
    for name in [*shapes, *named]:
        if name not in shapes:
            raise unknown_tensor(path, names.theirs.get(name, name))
        require_shape(path, names.theirs.get(name, name), named.get(name), shapes[name])


def require_shape(
    path: Path, name: str, stored: StoredTensor | None, expected: tuple[int, ...]
) -> None:
    if stored is None or stored.shape != expected:
        found = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
        raise ModelFileError(
            f"{path}: tensor {name} {found}, expected {list(expected)}",
            remedy="Download the head again, or use it with its own target.",
        )


_Head = TypeVar("_Head", EagleHead, DFlashHead)
_TURNED = re.compile(r"layers\.\d+\.[qk](?:\.weight|\.bias|_norm)")


def with_weights(head: _Head, files: HeadFiles, named: Mapping[str, StoredTensor]) -> _Head:
    """Return the head with its tensors, which stay in their files until used."""
    if not files.has_weights:
        return head
    if files.values.get("rope_is_neox_style") is False:
        named = {**named, **dict(_with_halves(head.config, named))}
    return replace(
        head,
        tensors=StoredTensors(named),
        embed_rows=_rows_of(named.get("embed")),
        head_rows=_rows_of(named.get("head")),
    )


def _rows_of(table: StoredTensor | None) -> Callable[[np.ndarray], np.ndarray] | None:
    return None if table is None else lambda rows: table.rows(rows).float32()


def _with_halves(
    config: ModelConfig, named: Mapping[str, StoredTensor]
) -> Iterable[tuple[str, StoredTensor]]:
    """Yield q, k and their norms, reordered from interleaved pairs to halves."""
    rotated, size = config.rotated, config.head_dim
    order = np.concatenate(
        [np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)]
    )
    for name, tensor in named.items():
        if _TURNED.fullmatch(name):
            starts = np.arange(0, tensor.shape[0], size)
            yield name, tensor.in_order((starts[:, None] + order).ravel())


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def count(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise unusable(path, f"usable {name}")
    return value


def feature_layers(
    path: Path, ids: Any, target: ModelConfig, *, are_outputs: bool
) -> tuple[int, ...]:
    """Return the layers whose inputs the head reads. ids: config.json's, of inputs or outputs.

    Raises ModelFileError, UsageError.
    """
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise damaged(f"{path} names no layers")
    found = tuple(each + are_outputs for each in ids)
    # The last layer's output is no layer's input: features have it after the final norm.
    if ids != sorted(set(ids)) or not 0 <= found[0] <= found[-1] < target.num_layers:
        raise other_target(
            f"{path} drafts from the {'outputs' if are_outputs else 'inputs'} of the layers {ids}, "
            f"which a target of {target.num_layers} layers has not"
        )
    return found


def mask_token(path: Path, values: Mapping[str, Any], name: str, vocab_size: int) -> int:
    """Raises ModelFileError for an invalid token, UsageError for one beyond the target's."""
    token = values.get(name)
    if not isinstance(token, int) or isinstance(token, bool):
        raise unusable(path, f"usable {name}")
    if not 0 <= token < vocab_size:
        told = f"{path}: its mask token {token} is beyond the target's vocabulary of {vocab_size}"
        raise other_target(told)
    return token


def scored_tokens(files: HeadFiles) -> np.ndarray | None:
    """Return the target's ID of each scored token, [tokens] int64; None for all.

    `d2t` holds the IDs less the head's own. Raises ModelFileError for an invalid tensor, UsageError
    for IDs beyond the target's.
    """
    path, vocab_size = files.path, files.target.vocab_size
    offsets, scored = files.tensors.get("d2t"), files.values.get("draft_vocab_size")
    if scored == vocab_size:  # the published code then maps nothing
        return None
    if offsets is None:
        if scored is not None:
            told = f"{path} scores {scored} tokens, but does not say which"
            raise damaged(f"{told}: tensor d2t is missing")
        return None
    if offsets.kind is not KINDS["I64"][0] or len(offsets.shape) != 1:
        raise damaged(f"{path}: d2t is no list of 64-bit numbers")
    ids = np.frombuffer(offsets.data.tobytes(), np.int64) + np.arange(offsets.shape[0])
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
        raise other_target(
            f"{path}: d2t names a token twice, or one beyond the target's vocabulary of "
            f"{vocab_size}"
        )
    return ids


FurtherKeys = Mapping[str, tuple[str, type]]  # config.json key -> GGUF key and type


def gguf_values(file: GgufFile, target: ModelConfig, further: FurtherKeys) -> dict[str, Any]:
    """Return GGUF metadata by config.json's keys. further: keys beyond the usual ones.

    Raises UnsupportedModelError for a scaled rotary embedding.
    """
    architecture = Metadata(file.metadata, file.path).require("general.architecture", str)
    stated = {f"{architecture}.context_length": target.context_length, **file.metadata}
    keys = GgufKeys(Metadata(stated, file.path), architecture, file.tensors)
    values = keys.as_config(is_permuted=False)
    if values["rope_scaling"] is not None:
        raise not_computed(
            f"{file.path} scales its rotary embedding by "
            f"{reprlib.repr(values['rope_scaling']['rope_type'])}, which is not computed for heads "
            "in GGUF files"
        )
    found = {name: keys.get(key, kind) for name, (key, kind) in further.items()}
    return values | {name: value for name, value in found.items() if value is not None}
