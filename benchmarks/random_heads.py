"""Trained heads with random weights, in the files and shapes of published ones: a random head's
tokens are never right, but its speed and memory are a trained one's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from edge_spec.core.config import ModelConfig

_ROWS_AT_ONCE = 8192
Shapes = dict[str, tuple[int, ...]]


def write_eagle3(directory: Path, target: ModelConfig, scored: int) -> Path:
    """One layer of the target's shape, which scores `scored` tokens."""
    hidden, inner = target.hidden_size, target.intermediate_size
    shapes: Shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj.weight": (target.query_size, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (target.kv_size, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (target.kv_size, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, target.query_size),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "lm_head.weight": (scored, hidden),
        "norm.weight": (hidden,),
    }
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{norm}.weight"] = (hidden,)
    config = {
        **_sizes(target),
        "num_hidden_layers": 1,
        "draft_vocab_size": scored,
    }
    return _written(directory, config, shapes, scored)


def write_medusa(
    directory: Path, target: ModelConfig, scored: int | None, num_heads: int = 3
) -> Path:
    """One block a head, and one output matrix that they share over `scored` tokens; None: one of
    their own over all tokens each, as they are published."""
    hidden = target.hidden_size
    shapes: Shapes = {}
    for head in range(num_heads):
        shapes[f"{head}.0.linear.weight"] = (hidden, hidden)
        shapes[f"{head}.0.linear.bias"] = (hidden,)
        if scored is None:
            shapes[f"{head}.1.weight"] = (target.vocab_size, hidden)
    if scored is not None:
        shapes["lm_head.weight"] = (scored, hidden)
    return _written(directory, {"medusa_num_heads": num_heads}, shapes, scored)


def write_dflash(directory: Path, target: ModelConfig, block_size: int = 16) -> Path:
    """Five layers of the target's shape, from the features of five of its layers."""
    hidden, inner, count = target.hidden_size, target.intermediate_size, 5
    layers = np.linspace(1, target.num_layers - 3, count).astype(int).tolist()
    shapes: Shapes = {
        "fc.weight": (hidden, count * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(count):
        own = {
            "self_attn.q_proj": (target.query_size, hidden),
            "self_attn.k_proj": (target.kv_size, hidden),
            "self_attn.v_proj": (target.kv_size, hidden),
            "self_attn.o_proj": (hidden, target.query_size),
            "self_attn.q_norm": (target.head_dim,),
            "self_attn.k_norm": (target.head_dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        shapes |= {f"layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    config = {
        "block_size": block_size,
        **_sizes(target),
        "num_hidden_layers": count,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": 0, "target_layer_ids": layers},
    }
    return _written(directory, config, shapes, None)


def _sizes(target: ModelConfig) -> dict[str, object]:
    """Returns what the config of a head takes over from its target's."""
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "rms_norm_eps": target.norm_epsilon,
        "rope_theta": target.rope_theta,
        "vocab_size": target.vocab_size,
    }


def _written(
    directory: Path, config: dict[str, object], shapes: Shapes, scored: int | None
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: ("F16", shape, 2) for name, shape in shapes.items()}
    if scored is not None:
        tensors["d2t"] = ("I64", (scored,), 8)
    header, end = {}, 0
    for name, (kind, shape, size) in tensors.items():
        start, end = end, end + size * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    random = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        for name, shape in shapes.items():
            scale = 0.0 if "norm" in name else 0.02
            for start in range(0, shape[0], _ROWS_AT_ONCE):
                part = (min(_ROWS_AT_ONCE, shape[0] - start), *shape[1:])
                values = random.standard_normal(part, np.float32) * np.float32(scale)
                file.write((values + np.float32("norm" in name)).astype(np.float16).tobytes())
        file.write(np.zeros(scored or 0, np.int64).tobytes())
    return directory
