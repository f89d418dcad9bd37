"""Holds what a trained head is read from, whichever kind it is.

Then the names and shapes of an EAGLE head's tensors: as they are published, and as `EagleHead` has
them.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import EagleHead, HeadExperts
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.gguf_reader import Metadata
from edge_spec.exporters.stored_tensor import INTEGERS, StoredTensor


def download_again(told: str) -> ModelFileError:
    return ModelFileError(told, remedy="Download the head again.")


def other_target(told: str) -> UsageError:
    return UsageError(told, remedy="Use the head with the model that it was trained for.")


def not_computed(told: str) -> UnsupportedModelError:
    return UnsupportedModelError(told, remedy="Use another head.")


def no_known_head(told: str) -> UnsupportedModelError:
    remedy = "Use a head of a kind that docs/drafters.md lists."
    return UnsupportedModelError(told, remedy=remedy)


@dataclass(frozen=True, eq=False)
class HeadFiles:
    """The files of a head, or of a model that brings one, and the target that it is read for."""

    path: Path
    values: Mapping[str, Any]  # of config.json, or by its keys
    tensors: Mapping[str, StoredTensor]  # of all files
    target: ModelConfig
    has_weights: bool  # else they stay unread, for a look at the head alone


class StoredTensors(Mapping[str, np.ndarray]):
    """Reads a tensor as float32 whenever it is asked for, and keeps none."""

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


def scored_tokens(path: Path, offsets: StoredTensor, vocab_size: int) -> np.ndarray:
    """Returns the target's id of each scored token, [tokens] int64. offsets: `d2t`, how much larger
    it is than the head's own. Raises ModelFileError for what is no list of numbers, UsageError for
    ids that the target has not."""
    if offsets.kind is not INTEGERS["I64"][0] or len(offsets.shape) != 1:
        raise download_again(f"{path}: d2t is no list of 64-bit numbers")
    ids = np.frombuffer(offsets.data.tobytes(), np.int64) + np.arange(offsets.shape[0])
    if not len(ids) or ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < len(ids):
        raise other_target(
            f"{path}: d2t names a token twice, or one beyond the target's vocabulary of "
            f"{vocab_size}"
        )
    return ids


def known_token(path: Path, token: int, vocab_size: int) -> int:
    """Returns the mask token. Raises UsageError for one that the target has not."""
    if not 0 <= token < vocab_size:
        told = f"{path}: its mask token {token} is beyond the target's vocabulary of {vocab_size}"
        raise other_target(told)
    return token


def mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def count(path: Path, values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or not 1 <= value <= 1 << 24:
        raise unusable(path, f"usable {name}")
    return value


def unusable(path: Path, what: str) -> ModelFileError:
    return download_again(f"{path}: config.json has no {what}")


_Keys = Mapping[str, tuple[str, type]]  # of config.json: in GGUF, with their types
GGUF_SIZES: _Keys = {
    "hidden_size": ("embedding_length", int),
    "intermediate_size": ("feed_forward_length", int),
    "num_attention_heads": ("attention.head_count", int),
    "num_key_value_heads": ("attention.head_count_kv", int),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", float),
}


def stated_in_gguf(
    metadata: Metadata, required: _Keys, optional: _Keys, whose: str, remedy: str
) -> dict[str, Any]:
    """Returns what GGUF states of a head, by the keys of config.json. Raises UnsupportedModelError,
    which says whose rotary embedding is scaled."""
    architecture = metadata.require("general.architecture", str)
    scaling = metadata.get(f"{architecture}.rope.scaling.type", str)
    if scaling not in (None, "none"):
        raise UnsupportedModelError(
            f"{metadata.path} scales its rotary embedding by {reprlib.repr(scaling)}, which is not "
            f"computed for {whose}",
            remedy=remedy,
        )
    values = {
        name: metadata.require(f"{architecture}.{key}", kind)
        for name, (key, kind) in required.items()
    }
    for name, (key, kind) in optional.items():
        if (found := metadata.get(f"{architecture}.{key}", kind)) is not None:
            values[name] = found
    rotated = metadata.get(f"{architecture}.rope.dimension_count", int)
    if rotated and values.get("head_dim"):
        # Of which config.json states a share, that is rounded down.
        values["partial_rotary_factor"] = (rotated + 0.5) / values["head_dim"]
    return values


_ALL = re.compile(r"(layers\.\d+\.experts\.)([a-z_]+)\.weight")
_SHARED_GATE = "shared_gate.weight"


def each_expert(
    path: Path, named: Mapping[str, StoredTensor], experts: HeadExperts
) -> dict[str, StoredTensor]:
    """Returns the tensors by names of ours, those of each expert apart. Raises ModelFileError for
    those of all at once that are of another shape."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in named.items():
        every = _ALL.fullmatch(name)
        if every is not None:
            found |= _apart(path, every[1], every[2], tensor, experts)
        elif name.endswith(_SHARED_GATE) and len(tensor.shape) == 1:  # as GGUF has it
            found[name] = replace(tensor, shape=(1, *tensor.shape), data=tensor.data[None])
        else:
            found[name] = tensor
    return found


def expert_shapes(
    config: ModelConfig, experts: HeadExperts, prefix: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields what a layer with experts has beside its own MLP."""
    hidden = config.hidden_size
    yield prefix + "router.weight", (experts.count, hidden)
    yield prefix + _SHARED_GATE, (1, hidden)
    for expert in range(experts.count):
        own = f"{prefix}experts.{expert}."
        yield own + "gate.weight", (experts.size, hidden)
        yield own + "up.weight", (experts.size, hidden)
        yield own + "down.weight", (hidden, experts.size)


def _apart(
    path: Path, prefix: str, part: str, tensor: StoredTensor, experts: HeadExperts
) -> Iterator[tuple[str, StoredTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[0] != experts.count:
        raise ModelFileError(
            f"{path}: the matrices of its experts have the shape {list(tensor.shape)}, expected "
            f"{experts.count} of them",
            remedy="Download the model again.",
        )
    parts = {"gate": slice(experts.size), "up": slice(experts.size, None)}
    for expert in range(experts.count):
        own = replace(tensor, shape=tensor.shape[1:], data=tensor.data[expert])
        if part == "gate_up":
            for name, rows in parts.items():
                yield f"{prefix}{expert}.{name}.weight", own.rows(rows)
        else:
            yield f"{prefix}{expert}.{part}.weight", own


Shapes = dict[str, tuple[int, ...]]

# Theirs -> ours, without the names of layers.
_WHOLE = {
    "fc.weight": "fc.weight",
    "fc.bias": "fc.bias",
    "input_norm.weight": "fc_norm",
    "embed_tokens.weight": "embed",
    "lm_head.weight": "head",
    "norm.weight": "norm",
}
_OF_LAYERS = {
    "hidden_norm.weight": "hidden_norm",
    "input_layernorm.weight": "input_norm",
    "post_attention_layernorm.weight": "post_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_PROJECTION = re.compile(r"(?:self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_TURNED = re.compile(r"layers\.\d+\.[qk](?:\.weight|\.bias|_norm)")
TURNS_HALVES = "rope_is_neox_style"  # of config.json
_LAYER = re.compile(r"(?:midlayer|layers\.(\d{1,3}))\.(.+)")
VOCABULARY = ("d2t", "t2d")  # what is scored, and the same as a mask
_TARGETS = ("verifier_norm.weight", "verifier_lm_head.weight")  # what training compares with
_SHOWN = 200  # characters of a name in a message


def named_as_ours(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Raises UnsupportedModelError for a tensor that no format has, or that stands twice."""
    named: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if name in (*VOCABULARY, *_TARGETS) or name.endswith("rotary_emb.inv_freq"):
            continue
        ours = our_name(name.removeprefix("model."))
        if ours is None or ours in named:
            what = "weights that no known head has, such as" if ours is None else "two of"
            raise no_known_head(f"{path} has {what} {name[:_SHOWN]}")
        named[ours] = tensor
    return named


def our_name(name: str) -> str | None:
    if name in _WHOLE:
        return _WHOLE[name]
    if match := re.fullmatch(r"fc_norm\.(\d)\.weight", name):
        return f"feature_norm.{match[1]}"
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return None
    prefix = f"layers.{int(layer[1] or 0)}."
    if layer[2] in _OF_LAYERS:
        return prefix + _OF_LAYERS[layer[2]]
    projection = _PROJECTION.fullmatch(layer[2])
    return projection and f"{prefix}{projection[1]}.{projection[2]}"


def published_name(ours: str) -> str:
    """The inverse of `our_name`, for messages."""
    whole = {own: theirs for theirs, own in _WHOLE.items()}
    of_layers = {own: theirs for theirs, own in _OF_LAYERS.items()}
    if ours in whole:
        return whole[ours]
    kind, index, *rest = ours.split(".")
    if kind == "feature_norm":
        return f"fc_norm.{index}.weight"
    name = of_layers.get(rest[0])
    if name is None:
        room = "self_attn" if rest[0] in "qkvo" else "mlp"
        name = f"{room}.{rest[0]}_proj.{rest[1]}"
    return f"layers.{index}.{name}"


def require_shapes(
    head: EagleHead,
    named: Mapping[str, StoredTensor],
    scored: int,
    stated: frozenset[str],
    published: Callable[[str], str] = published_name,
) -> None:
    """scored: tokens. stated: names of which config.json says that the head has them.
    published: what a tensor of ours is called in the file.

    Raises as `require_exactly` does."""
    shapes = _required_shapes(head)
    for group in _optional_groups(head, scored):
        if not group.keys().isdisjoint(named.keys() | stated):
            shapes |= group
    lacking = f"which a head of the kind {head.kind} has not"
    require_exactly(head.path, named, shapes, published, lacking)


def require_exactly(
    path: Path,
    named: Mapping[str, StoredTensor],
    shapes: Shapes,
    published: Callable[[str], str],
    lacking: str,
) -> None:
    """Raises ModelFileError for a tensor that is missing or of another shape,
    UnsupportedModelError for one too many, of which `lacking` says that such heads lack it."""
    for name in [*shapes, *named]:
        if name not in shapes:
            raise no_known_head(f"{path} has a tensor {published(name)}, {lacking}")
        require_shape(path, published(name), named.get(name), shapes[name])


def require_shape(
    path: Path, name: str, stored: StoredTensor | None, expected: tuple[int, ...]
) -> None:
    """Raises ModelFileError for a tensor that is missing or of another shape."""
    if stored is None or stored.shape != expected:
        found = "is missing" if stored is None else f"has the shape {list(stored.shape)}"
        raise ModelFileError(
            f"{path}: tensor {name} {found}, expected {list(expected)}",
            remedy="Download the head again, or use it with its own target.",
        )


def _required_shapes(head: EagleHead) -> Shapes:
    config, hidden = head.config, head.config.hidden_size
    joined = 2 * hidden if head.joins_embedding else len(head.feature_layers) * head.feature_size
    shapes: Shapes = {"fc.weight": (hidden, joined)}
    if not head.joins_embedding:
        shapes |= {"norm": (hidden,), "layers.0.hidden_norm": (hidden,)}
    if head.norms_inputs:
        shapes |= {name: (hidden,) for name in ("embed_norm", "state_norm", "norm")}
    for layer in range(config.num_layers):
        beside = layer == 0 and not head.joins_embedding
        own = layer_shapes(config, 2 * hidden if beside else hidden)
        if layer or beside or head.norms_inputs:  # what EAGLE-1's first layer reads is not normed
            own["input_norm"] = (hidden,)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
        if head.experts is not None:
            shapes |= expert_shapes(config, head.experts, f"layers.{layer}.")
    return shapes


def layer_shapes(config: ModelConfig, read: int) -> Shapes:
    """Returns the shapes of a layer's matrices and of its norm before the MLP. read: the width of
    what its attention reads."""
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


def _optional_groups(head: EagleHead, scored: int) -> Iterator[Shapes]:
    """Yields what a head has all of, or nothing."""
    config, hidden = head.config, head.config.hidden_size
    yield {"fc.bias": (hidden,)}
    yield {"embed": (config.vocab_size, hidden)}
    yield {"head": (scored, hidden)}
    if not head.joins_embedding:
        yield {"fc_norm": (len(head.feature_layers) * head.feature_size,)}
        yield {
            f"feature_norm.{each}": (head.feature_size,) for each in range(len(head.feature_layers))
        }
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        yield {prefix + f"{name}_norm": (config.head_dim,) for name in "qk"}
        if layer or head.joins_embedding:
            yield {prefix + "q_gate.weight": (config.query_size, hidden)}
        sizes = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
        yield {prefix + f"{name}.bias": (size,) for name, size in sizes.items()}


def with_halves(config: ModelConfig, named: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns queries, keys and their norms of a head that turns neighbouring numbers as pairs, in
    the order in which pairs are a half apart."""
    rotated, size = config.rotated, config.head_dim
    order = np.concatenate(
        [np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, size)]
    )
    found = {}
    for name, tensor in named.items():
        if _TURNED.fullmatch(name):
            starts = np.arange(0, tensor.shape[0], size)
            found[name] = replace(tensor, row_order=(starts[:, None] + order).ravel())
    return found
