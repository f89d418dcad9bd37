"""Common parts of head readers: files, tensor names and shapes, and usual config.json keys."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import DFlashHead, EagleHead
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
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


class Part(NamedTuple):
    """A tensor of a head. group: tensors that a head has together. theirs: its names in Hugging
    Face's files, in GGUF and in further formats. sizes: of its shape, by name."""

    group: str
    ours: str
    theirs: tuple[str, ...]
    sizes: tuple[str, ...]


def parts(table: str) -> tuple[Part, ...]:
    """Read a part from each line. A name in files ends in .weight, or .bias as ours does, unless it
    has a "!"; "-": the format has none."""
    found = []
    for line in table.strip().splitlines():
        group, ours, *theirs, sizes = line.split()
        end = ".bias" if ours.endswith(".bias") else ".weight"
        full = ("" if name == "-" else (name + end).removesuffix("!" + end) for name in theirs)
        found.append(Part(group, ours, tuple(full), tuple(sizes.split(","))))
    return tuple(found)


HF, GGUF = range(2)  # formats, as columns of the tables
WHOLE = parts("""
    fc    fc.weight  fc            fc           hidden,joined
    embed embed      embed_tokens  token_embd   vocab,hidden
    head  head       lm_head       output       scored,hidden
    norm  norm       norm          output_norm  hidden
""")
LAYER = parts("""
    layer   q.weight       self_attn.q_proj          attn_q       queries,read
    layer   k.weight       self_attn.k_proj          attn_k       keys,read
    layer   v.weight       self_attn.v_proj          attn_v       keys,read
    layer   o.weight       self_attn.o_proj          attn_output  hidden,queries
    layer   gate.weight    mlp.gate_proj             ffn_gate     inner,hidden
    layer   up.weight      mlp.up_proj               ffn_up       inner,hidden
    layer   down.weight    mlp.down_proj             ffn_down     hidden,inner
    layer   post_norm      post_attention_layernorm  ffn_norm     hidden
    input   input_norm     input_layernorm           attn_norm    hidden
    hidden  hidden_norm    hidden_norm               attn_norm_2  hidden
    norms   q_norm         self_attn.q_norm          attn_q_norm  head_dim
    norms   k_norm         self_attn.k_norm          attn_k_norm  head_dim
    biases  q.bias         self_attn.q_proj          attn_q       queries
    biases  k.bias         self_attn.k_proj          attn_k       keys
    biases  v.bias         self_attn.v_proj          attn_v       keys
    gate    q_gate.weight  -                         -            queries,hidden
""")
_ROWS = ("confidence.weight", "shared_gate.weight")  # vectors in GGUF
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Form:
    """The tensors of a kind of head. whole, first, others: groups outside layers, of the first
    layer, and of others; a head has all of a group with "?" or none."""

    whole: str
    first: str
    others: str
    parts: tuple[Part, ...] = WHOLE
    layer_parts: tuple[Part, ...] = LAYER

    def names(self, column: int, of_layers: int | None = None, **where: Any) -> Names:
        """Return the names of a format. of_layers: its column for layers, if another. where: as in
        Names."""
        layer_column = column if of_layers is None else of_layers
        return Names(
            {each.theirs[column]: each.ours for each in self.parts if each.theirs[column]},
            {
                each.theirs[layer_column]: each.ours
                for each in self.layer_parts
                if each.theirs[layer_column]
            },
            **where,
        )

    def shapes(
        self,
        sizes: Mapping[str, int],
        of_layers: Sequence[Mapping[str, int]],
        present: Collection[str],
    ) -> Shapes:
        """Return the required tensors. of_layers: sizes of each layer. present: names, each of
        which requires its group."""
        scopes = [("", self.whole, self.parts, sizes)]
        for layer, own in enumerate(of_layers):
            groups = self.others if layer else self.first
            scopes.append((f"layers.{layer}.", groups, self.layer_parts, {**sizes, **own}))
        shapes: Shapes = {}
        for prefix, groups, among, known in scopes:
            for group in groups.split():
                own_parts = [part for part in among if part.group == group.rstrip("?")]
                if any(prefix + part.ours in present for part in own_parts) or group[-1] != "?":
                    for part in own_parts:
                        shape = tuple(known[size] for size in part.sizes)
                        shapes[prefix + part.ours] = shape
        return shapes


def head_shapes(
    form: Form, head: EagleHead | DFlashHead, present: Collection[str], **more: int
) -> Shapes:
    """Return the required tensors of a head with layers. more: sizes of its own parts."""
    config, hidden = head.config, head.config.hidden_size
    joins = isinstance(head, EagleHead) and head.joins_embedding
    sizes = {
        "hidden": hidden,
        "joined": 2 * hidden if joins else len(head.feature_layers) * head.feature_size,
        "feature": head.feature_size,
        "inner": config.intermediate_size,
        "queries": config.query_size,
        "keys": config.kv_size,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "scored": config.vocab_size if head.token_ids is None else len(head.token_ids),
        "read": hidden,
        **more,
    }
    of_layers: list[Mapping[str, int]] = [{}] * config.num_layers
    if "hidden" in form.first.split():  # reads embedding and feature concatenated
        of_layers[0] = {"read": 2 * hidden}
    return form.shapes(sizes, of_layers, present)


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
