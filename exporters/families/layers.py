"""Finds which layers of a model are of which kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edge_spec.core.model_parts import LayerKind

FULL, SLIDING = "full_attention", "sliding_attention"  # as layer_types of config.json names them
MAX_LAYERS = 10_000
# What GGUF calls the norms of what sublayers add, and we do.
GGUF_POST_NORMS = {"post_attention_norm": "self_attn.post_norm", "post_ffw_norm": "mlp.post_norm"}
# What GGUF calls the router, and the matrices of all experts at once.
GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}


def last_of(period: int, num_layers: int) -> list[str]:
    """Returns SLIDING but for the last of every `period` layers, which see all of the text."""
    layers = range(min(num_layers, MAX_LAYERS))
    return [FULL if period and (layer + 1) % period == 0 else SLIDING for layer in layers]


def kv_sources(kinds: Sequence[LayerKind], num_own: int) -> tuple[int, ...]:
    """Returns whose keys and values each layer attends to, where only the first ones have their
    own: those of the last of these that is of its kind. Raises ValueError where there is none."""
    if not 0 < num_own <= len(kinds):
        raise ValueError(f"{num_own} of {len(kinds)} layers have keys and values")
    last = {kind: layer for layer, kind in enumerate(kinds[:num_own])}
    if not last.keys() >= set(kinds):
        raise ValueError("a layer attends to the keys and values of none before it")
    sources = tuple(last[kind] for kind in kinds[num_own:])
    return (*range(num_own), *sources) if sources else ()


def of_types(kinds: Mapping[str, LayerKind], types: Sequence[str]) -> dict[str, Any]:
    """Returns the fields of a description whose layers are of these types."""
    used = [name for name in kinds if name in types]
    return {
        "layer_kinds": tuple(kinds[name] for name in used),
        "kind_of_layer": tuple(used.index(name) for name in types),
    }
