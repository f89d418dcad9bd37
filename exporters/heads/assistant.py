"""The assistants of Gemma 4, as Google publishes them and as llama.cpp converts them: layers with
queries alone, which read the keys and values of the target's last layers of their kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import AssistantHead, AssistantLayer, Centroids
from edge_spec.core.model_parts import LayerKind
from edge_spec.errors import ModelFileError, UnsupportedModelError, UsageError
from edge_spec.exporters.families.gemma import GEMMA4, gemma4_of_gguf, stated_kinds
from edge_spec.exporters.families.gguf_values import GgufKeys
from edge_spec.exporters.families.stated import StatedConfig
from edge_spec.exporters.gguf_reader import ASSISTANT, GgufFile, Metadata
from edge_spec.exporters.heads.head_files import (
    HeadFiles,
    Shapes,
    StoredTensors,
    count,
    mapping,
    no_known_head,
    require_exactly,
)
from edge_spec.exporters.stored_tensor import StoredTensor

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # of config.json
_ORDERING = "ordering"
# Theirs -> ours, in directories and in GGUF files.
_WHOLE = {
    "model.embed_tokens.weight": "embed",
    "model.norm.weight": "norm",
    "pre_projection.weight": "pre.weight",
    "post_projection.weight": "post.weight",
    "masked_embedding.centroids.weight": "centroids",
    "masked_embedding.token_ordering": _ORDERING,
}
_WHOLE_OF_FILES = {
    "token_embd.weight": "embed",
    "output_norm.weight": "norm",
    "nextn.pre_projection.weight": "pre.weight",
    "nextn.post_projection.weight": "post.weight",
    "masked_embd_centroids.weight": "centroids",
    "masked_embd_ordering": _ORDERING,
}
_IGNORED = ("lm_head.weight", "rope_freqs.weight")  # the first is the embedding, the other is read
_OF_LAYERS = {
    "input_layernorm.weight": "input_norm",
    "self_attn.q_proj.weight": "q.weight",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.o_proj.weight": "o.weight",
    "post_attention_layernorm.weight": "attended_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate.weight",
    "mlp.up_proj.weight": "up.weight",
    "mlp.down_proj.weight": "down.weight",
    "post_feedforward_layernorm.weight": "added_norm",
    "layer_scalar": "scale",
}
_OF_BLOCKS = {
    "attn_norm.weight": "input_norm",
    "attn_q.weight": "q.weight",
    "attn_q_norm.weight": "q_norm",
    "attn_output.weight": "o.weight",
    "post_attention_norm.weight": "attended_norm",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate.weight",
    "ffn_up.weight": "up.weight",
    "ffn_down.weight": "down.weight",
    "post_ffw_norm.weight": "added_norm",
    "layer_output_scale.weight": "scale",
}
_IN_DIRECTORIES = _WHOLE, _OF_LAYERS, "model.layers."
_IN_FILES = _WHOLE_OF_FILES, _OF_BLOCKS, "blk."
_EVERY_NAME = _WHOLE | _WHOLE_OF_FILES
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,3})\.(.+)")
_OWN_TARGET = "Use the assistant with the model that it was trained for."
_AGAIN = "Download the assistant again."


@dataclass(frozen=True)
class _Sizes:
    """What the files of an assistant state of it."""

    hidden_size: int
    target_size: int
    intermediate_size: int
    num_heads: int
    vocab_size: int
    norm_epsilon: float
    head_dim: int  # of layers that state none
    kinds: tuple[LayerKind, ...]
    num_centroids: int = 0
    num_active: int = 0  # of these


def directory_assistant(files: HeadFiles) -> AssistantHead:
    """Raises as `open_head` does."""
    path, values = files.path, files.values
    text = {**GEMMA4.defaults, "num_kv_shared_layers": 0, **mapping(values, "text_config")}
    stated = StatedConfig(text, path / "config.json")
    if stated.values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise UnsupportedModelError(
            f"{path} has an activation that is not computed for assistants",
            remedy="Use the model without --draft.",
        )
    kinds, epsilon, head_dim = _kinds(stated)
    has_clusters = bool(values.get("use_ordered_embeddings"))
    sizes = _Sizes(
        hidden_size=count(path, text, "hidden_size"),
        target_size=count(path, values, "backbone_hidden_size"),
        intermediate_size=count(path, text, "intermediate_size"),
        num_heads=count(path, text, "num_attention_heads"),
        vocab_size=count(path, text, "vocab_size"),
        norm_epsilon=epsilon,
        head_dim=head_dim,
        kinds=kinds,
        num_centroids=count(path, values, "num_centroids") if has_clusters else 0,
        num_active=count(path, values, "centroid_intermediate_top_k") if has_clusters else 0,
    )
    return _assistant(files, sizes)


def _kinds(stated: StatedConfig) -> tuple[tuple[LayerKind, ...], float, int]:
    """Returns that of each layer, the epsilon of norms, and the usual size of a head."""
    try:
        epsilon = float(stated.values["rms_norm_eps"])
        return tuple(stated_kinds(stated)), epsilon, stated.head_dim
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{stated.path} lacks a valid value: {error}", remedy=_AGAIN) from None


def gguf_assistant(path: Path, target: ModelConfig, has_weights: bool) -> AssistantHead:
    """Raises as `open_head` does."""
    file = GgufFile(path)
    keys = GgufKeys(Metadata(file.metadata, path), ASSISTANT, file.tensors)
    values = keys.values(is_permuted=False)
    values |= gemma4_of_gguf(keys, values)
    kinds, epsilon, head_dim = _kinds(StatedConfig(values, path))
    embedding = file.tensors.get("token_embd.weight")
    sizes = _Sizes(
        hidden_size=values["hidden_size"],
        target_size=keys.require("embedding_length_out", int),
        intermediate_size=values["intermediate_size"],
        num_heads=values["num_attention_heads"],
        vocab_size=0 if embedding is None else embedding.shape[0],
        norm_epsilon=epsilon,
        head_dim=head_dim,
        kinds=kinds,
    )
    return _assistant(HeadFiles(path, {}, file.tensors, target, has_weights), sizes)


def _assistant(files: HeadFiles, sizes: _Sizes) -> AssistantHead:
    path, target = files.path, files.target
    named = _named(path, files.tensors)
    published = partial(_published, _IN_FILES if path.is_file() else _IN_DIRECTORIES)
    if not sizes.num_centroids:  # which files may have all the same
        named.pop("centroids", None)
        named.pop(_ORDERING, None)
    layers = tuple(_layer(path, kind, sizes, target) for kind in sizes.kinds)
    _require_target(path, sizes, target)
    require_exactly(path, named, _shapes(sizes, layers), published, "which no assistant has")
    embed = named["embed"]
    return AssistantHead(
        path=path,
        config=_config(sizes, target),
        target_size=sizes.target_size,
        embedding_scale=target.embedding_scale,
        layers=layers,
        tensors=StoredTensors(named) if files.has_weights else {},
        output_rows=lambda rows: embed.rows(rows).float32(),
        centroids=_centroids(path, named, sizes, target) if sizes.num_centroids else None,
    )


def _config(sizes: _Sizes, target: ModelConfig) -> ModelConfig:
    """Rotary embeddings are those of its kinds of layers."""
    return ModelConfig(
        architecture=AssistantHead.drafted_by,
        num_layers=len(sizes.kinds),
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_heads=sizes.num_heads,
        num_kv_heads=1,
        head_dim=sizes.head_dim,
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        norm_epsilon=sizes.norm_epsilon,
        rope_theta=target.rope_theta,
        qk_norm=True,
    )


def _layer(path: Path, kind: LayerKind, sizes: _Sizes, target: ModelConfig) -> AssistantLayer:
    """Raises UsageError where the target has no keys and values that such a layer could read."""
    seen = [layer for layer in target.attending if _is_alike(target.kind(layer), kind)]
    head_dim = kind.head_dim or sizes.head_dim
    if not seen:
        window = "all of the text" if kind.window is None else f"{kind.window} tokens"
        _refuse(path, f"it reads layers that see {window}, which this one does not have")
    source = target.kv_source(seen[-1])
    heads = target.heads(source)
    if heads.head_dim != head_dim or sizes.num_heads % heads.num_kv_heads:
        _refuse(
            path,
            f"{sizes.num_heads} heads of {head_dim} read {heads.num_kv_heads} of {heads.head_dim}",
        )
    return AssistantLayer(kind, source, head_dim)


def _is_alike(theirs: LayerKind, own: LayerKind) -> bool:
    return theirs.convolution is None and theirs.window == own.window


def _require_target(path: Path, sizes: _Sizes, target: ModelConfig) -> None:
    if sizes.target_size != target.hidden_size:
        _refuse(
            path,
            f"it reads states of {sizes.target_size} numbers, this target's have "
            f"{target.hidden_size}",
        )
    if sizes.vocab_size != target.vocab_size:
        _refuse(
            path,
            f"its vocabulary has {sizes.vocab_size} tokens, this target's {target.vocab_size}",
        )


def _refuse(path: Path, told: str) -> NoReturn:
    raise UsageError(f"{path} is an assistant of another target: {told}", remedy=_OWN_TARGET)


def _named(path: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    named = {}
    for name, tensor in tensors.items():
        layer = _LAYER.fullmatch(name)
        own = _OF_LAYERS.get(layer[2], _OF_BLOCKS.get(layer[2])) if layer else _EVERY_NAME.get(name)
        if own is None and name not in _IGNORED:
            raise no_known_head(f"{path} has a tensor {name[:200]}, which no assistant has")
        if own is not None:
            named[f"layers.{int(layer[1])}.{own}" if layer else own] = tensor
    return named


def _published(forms: tuple[Mapping[str, str], Mapping[str, str], str], ours: str) -> str:
    """Returns what files of a form call a tensor of ours, for messages."""
    whole, of_layers, prefix = forms
    if ours.startswith("layers."):
        _, index, own = ours.split(".", 2)
        return f"{prefix}{index}.{next(theirs for theirs, our in of_layers.items() if our == own)}"
    return next(theirs for theirs, our in whole.items() if our == ours)


def _shapes(sizes: _Sizes, layers: tuple[AssistantLayer, ...]) -> Shapes:
    hidden, inner = sizes.hidden_size, sizes.intermediate_size
    shapes: Shapes = {
        "embed": (sizes.vocab_size, hidden),
        "norm": (hidden,),
        "pre.weight": (hidden, 2 * sizes.target_size),
        "post.weight": (sizes.target_size, hidden),
    }
    if sizes.num_centroids:
        shapes |= {"centroids": (sizes.num_centroids, hidden), _ORDERING: (sizes.vocab_size,)}
    for index, layer in enumerate(layers):
        queries = sizes.num_heads * layer.head_dim
        own: Shapes = {
            "q.weight": (queries, hidden),
            "q_norm": (layer.head_dim,),
            "o.weight": (hidden, queries),
            "gate.weight": (inner, hidden),
            "up.weight": (inner, hidden),
            "down.weight": (hidden, inner),
            "scale": (1,),
        }
        own |= {f"{norm}_norm": (hidden,) for norm in ("input", "attended", "mlp", "added")}
        shapes |= {f"layers.{index}.{name}": shape for name, shape in own.items()}
    return shapes


def _centroids(
    path: Path, named: Mapping[str, StoredTensor], sizes: _Sizes, target: ModelConfig
) -> Centroids:
    """Raises ModelFileError for what is no order of the vocabulary, UsageError for one of
    another."""
    if sizes.vocab_size % sizes.num_centroids or sizes.num_active > sizes.num_centroids:
        raise ModelFileError(
            f"{path} divides {sizes.vocab_size} tokens into {sizes.num_centroids} clusters, of "
            f"which it scores {sizes.num_active}",
            remedy=_AGAIN,
        )
    stored = named[_ORDERING]
    if stored.kind.name not in ("I64", "I32"):
        raise ModelFileError(f"{path}: its token_ordering is no list of numbers", remedy=_AGAIN)
    kind: Any = np.int64 if stored.kind.name == "I64" else np.int32
    ordering = np.frombuffer(stored.data.tobytes(), kind).astype(np.int64)
    if not np.array_equal(np.sort(ordering), np.arange(target.vocab_size)):
        _refuse(path, "its token_ordering is no order of this target's tokens")
    clusters = ordering.reshape(sizes.num_centroids, -1)
    return Centroids(named["centroids"].float32(), clusters, sizes.num_active)
