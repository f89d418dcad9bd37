"""The encoder of an encoder-decoder: from a source to the keys and values that a decoder reads."""

from __future__ import annotations

import numpy as np

from edge_spec.runtimes.reference.arithmetic import Arithmetic
from edge_spec.runtimes.reference.operations import Heads, mix, side_by_side


def encoded(model: Arithmetic, source: np.ndarray) -> np.ndarray:
    """Returns keys and values of all the decoder's layers [layers, 2, heads, tokens, head_dim].

    source: its tokens, each of which sees all others.
    """
    config = model.config
    assert config.encoder is not None
    x = model.embed(source, np.arange(len(source)), "encoder")
    for layer in range(config.encoder.num_layers):
        x = _layer(model, x, f"encoder.layers.{layer}.")
    x = model.norm(x, "encoder.norm")
    layers = [f"model.layers.{layer}.cross_attn." for layer in range(config.num_layers)]
    return np.stack(
        [[model.split_heads(x, f"{prefix}{part}_proj") for part in "kv"] for prefix in layers]
    )


def _layer(model: Arithmetic, x: np.ndarray, prefix: str) -> np.ndarray:
    """The residual stream [tokens, hidden] after a layer."""
    relative, positions = model.config.relative_positions, np.arange(len(x))
    x, normed = model.read(x, prefix + "input_layernorm")
    heads = Heads(*(model.split_heads(normed, f"{prefix}self_attn.{part}_proj") for part in "qkv"))
    bias = None
    if relative is not None:
        weight = model.weight("encoder.relative_bias.weight")
        bias = relative.bias(weight, positions, positions, both_ways=True)
    seen = np.ones((len(x), len(x)), bool)
    mixed = mix(heads, seen, model.divisor(model.config.head_dim), None, bias=bias)
    x = x + model.linear(side_by_side(mixed), prefix + "self_attn.o_proj")
    return model.with_mlp(x, prefix)
