"""Read Gemma 4's assistants (Google's files or llama.cpp's GGUF). Their layers have only queries
and read the keys and values of the target's last layer of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.heads import AssistantHead, AssistantLayer, Centroids
from edge_spec.core.model_parts import LayerKind
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.families.gemma import GEMMA4, gemma4_of_gguf, stated_kinds
from edge_spec.exporters.families.stated import GgufKeys, StatedConfig
from edge_spec.exporters.gguf_reader import ASSISTANT, GgufFile, Metadata
from edge_spec.exporters.heads.eagle import head_config
from edge_spec.exporters.heads.head_files import (
    GGUF,
    HF,
    Form,
    HeadFiles,
    Names,
    StoredTensors,
    count,
    mapping,
    parts,
    require_shapes,
)
from edge_spec.exporters.stored_tensor import StoredTensor, damaged

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")  # in config.json
_CENTROIDS, _ORDERING = "centroids", "ordering"
_FORM = Form(
    "whole clusters?",
    "layer",
    "layer",
    parts("""
    whole     embed        model.embed_tokens                token_embd             vocab,hidden
    whole     norm         model.norm                        output_norm            hidden
    whole     pre.weight   pre_projection                    nextn.pre_projection   hidden,twice
    whole     post.weight  post_projection                   nextn.post_projection  target,hidden
    clusters  centroids    masked_embedding.centroids        masked_embd_centroids  clusters,hidden
    clusters  ordering     masked_embedding.token_ordering!  masked_embd_ordering!  vocab
"""),
    parts("""
    layer  q.weight       self_attn.q_proj            attn_q               queries,hidden
    layer  o.weight       self_attn.o_proj            attn_output          hidden,queries
    layer  q_norm         self_attn.q_norm            attn_q_norm          head_dim
    layer  gate.weight    mlp.gate_proj               ffn_gate             inner,hidden
    layer  up.weight      mlp.up_proj                 ffn_up               inner,hidden
    layer  down.weight    mlp.down_proj               ffn_down             hidden,inner
    layer  input_norm     input_layernorm             attn_norm            hidden
    layer  attended_norm  post_attention_layernorm    post_attention_norm  hidden
    layer  mlp_norm       pre_feedforward_layernorm   ffn_norm             hidden
    layer  added_norm     post_feedforward_layernorm  post_ffw_norm        hidden
    layer  scale          layer_scalar!               layer_output_scale   one
"""),
)
# The output matrix equals the embedding.
_NAMES = _FORM.names(HF, layer="model.layers.{}.", ignored=("lm_head.weight",))
# Rotary factors are also in the metadata.
_GGUF_NAMES = _FORM.names(GGUF, layer="blk.{}.", ignored=("rope_freqs.weight",))
_OWN_TARGET = "Use the assistant with the model that it was trained for."


def directory_assistant(files: HeadFiles) -> AssistantHead:
    path, values = files.path, files.values
    text = {**GEMMA4.defaults, "num_kv_shared_layers": 0, **mapping(values, "text_config")}
    stated = StatedConfig(text, path / "config.json")
    if stated.values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise UnsupportedModelError(
            f"{path} has an activation that is not computed for assistants",
            remedy="Use the model without --draft.",
        )
    clusters = (0, 0)
    if values.get("use_ordered_embeddings"):
        keys = ("num_centroids", "centroid_intermediate_top_k")
        clusters = (count(path, values, keys[0]), count(path, values, keys[1]))
    target_size = count(path, values, "backbone_hidden_size")
    return _assistant(files, _NAMES, stated, target_size, clusters)


def gguf_assistant(path: Path, target: ModelConfig, has_weights: bool) -> AssistantHead:
    file = GgufFile(path)
    keys = GgufKeys(Metadata(file.metadata, path), ASSISTANT, file.tensors)
    values = keys.as_config(is_permuted=False)
    values |= gemma4_of_gguf(keys, values)
    if (embedding := file.tensors.get("token_embd.weight")) is not None:
        values["vocab_size"] = embedding.shape[0]
    files = HeadFiles(path, values, file.tensors, target, has_weights)
    target_size = keys.require("embedding_length_out", int)
    return _assistant(files, _GGUF_NAMES, StatedConfig(values, path), target_size, (0, 0))


def _kinds(stated: StatedConfig) -> Sequence[LayerKind]:
    try:
        return stated_kinds(stated)
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise damaged(f"{stated.path} lacks a valid value: {error}") from None


def _assistant(
    files: HeadFiles,
    names: Names,
    stated: StatedConfig,
    target_size: int,
    clusters: tuple[int, int],
) -> AssistantHead:
    """clusters: the number of token clusters, and how many of them are scored; 0: none."""
    path, target, values = files.path, files.target, stated.values
    kinds, named = _kinds(stated), names.rename(path, files.tensors)
    config = head_config(path, values, named, target, AssistantHead.drafted_by)
    num_tokens = count(path, values, "vocab_size")
    if not clusters[0]:  # files may still have them
        named.pop(_CENTROIDS, None)
        named.pop(_ORDERING, None)
    layers = tuple(_layer(path, kind, config, target) for kind in kinds)
    if target_size != target.hidden_size:
        told = f"states of {target_size} numbers, this target's have {target.hidden_size}"
        _refuse(path, f"it reads {told}")
    if num_tokens != target.vocab_size:
        told = f"{num_tokens} tokens, this target's {target.vocab_size}"
        _refuse(path, f"its vocabulary has {told}")
    sizes = {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "vocab": config.vocab_size,
        "target": target_size,
        "twice": 2 * target_size,
        "clusters": clusters[0],
        "one": 1,
    }
    of_layers = [
        {"queries": config.num_heads * layer.head_dim, "head_dim": layer.head_dim}
        for layer in layers
    ]
    present = {_CENTROIDS} if clusters[0] else set()
    require_shapes(path, names, named, _FORM.shapes(sizes, of_layers, present))
    embed = named["embed"]
    return AssistantHead(
        path=path,
        config=config,
        target_size=target_size,
        embedding_scale=target.embedding_scale,
        layers=layers,
        tensors=StoredTensors(named) if files.has_weights else {},
        output_rows=lambda rows: embed.rows(rows).float32(),
        centroids=_centroids(path, named, config.vocab_size, clusters) if clusters[0] else None,
    )


def _layer(path: Path, kind: LayerKind, config: ModelConfig, target: ModelConfig) -> AssistantLayer:
    kinds = ((layer, target.kind(layer)) for layer in target.attending)
    seen = [layer for layer, each in kinds if each.window == kind.window]
    head_dim = kind.head_dim or config.head_dim
    if not seen:
        window = "all of the text" if kind.window is None else f"{kind.window} tokens"
        _refuse(path, f"it reads layers that see {window}, which this one does not have")
    source = target.kv_source(seen[-1])
    heads = target.heads(source)
    if heads.head_dim != head_dim or config.num_heads % heads.num_kv_heads:
        _refuse(
            path,
            f"{config.num_heads} heads of {head_dim} read {heads.num_kv_heads} of {heads.head_dim}",
        )
    return AssistantLayer(kind, source, head_dim)


def _refuse(path: Path, told: str) -> NoReturn:
    raise UsageError(f"{path} is an assistant of another target: {told}", remedy=_OWN_TARGET)


def _centroids(
    path: Path, named: Mapping[str, StoredTensor], num_tokens: int, clusters: tuple[int, int]
) -> Centroids:
    num_centroids, num_active = clusters
    if num_tokens % num_centroids or num_active > num_centroids:
        raise damaged(
            f"{path} divides {num_tokens} tokens into {num_centroids} clusters, of which it scores "
            f"{num_active}"
        )
    stored = named[_ORDERING]
    if stored.kind.name not in ("I64", "I32"):
        raise damaged(f"{path}: its token_ordering is no list of numbers")
    kind: Any = np.int64 if stored.kind.name == "I64" else np.int32
    ordering = np.frombuffer(stored.data.tobytes(), kind).astype(np.int64)
    if not np.array_equal(np.sort(ordering), np.arange(num_tokens)):
        _refuse(path, "its token_ordering is no order of this target's tokens")
    clusters_of_tokens = ordering.reshape(num_centroids, -1)
    return Centroids(named[_CENTROIDS].float32(), clusters_of_tokens, num_active)
