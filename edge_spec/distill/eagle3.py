"""An EAGLE-3 head (Li et al. 2025): one decoder layer over the inputs of three of the target's.

It is trained as it drafts: after the first position it reads its own last state in the place of
features, beside the tokens that the target wrote (training-time test, section 3.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from edge_spec.core.model import TensorRows
from edge_spec.distill.network import Rotation, normed
from edge_spec.distill.small_draft_files import stated_scaling
from edge_spec.distill.trainee import Teacher, Tensor, as_arrays, likeliest, parameter
from edge_spec.distill.windows import Batch

_SPREAD = 0.02  # of what begins at random


class Eagle3Trainee:
    """Begins as the target's last layer over its last feature, and the target's output matrix."""

    def __init__(
        self, teacher: Teacher, source: TensorRows, num_positions: int, seed: int = 0
    ) -> None:
        self.num_positions = num_positions
        self.parameters = _beginning(teacher, source, np.random.default_rng(seed))
        self._teacher = teacher
        self._embedding = torch.tensor(source.float32("model.embed_tokens.weight"))
        # Trained as it will be read: what config.json cannot state is not there for either.
        scaled = stated_scaling(teacher.config) is not None
        plain = replace(teacher.config, rope_scaling=None)
        self._rotation = Rotation(teacher.config if scaled else plain)

    def scores(self, batch: Batch) -> list[Tensor]:
        tokens = np.concatenate([batch.next_tokens[:, :, None], batch.written], axis=2)
        embedded = self._embedding[torch.from_numpy(np.maximum(tokens, 0))]
        anchors = torch.from_numpy(batch.anchors)
        joined = torch.from_numpy(batch.features).flatten(start_dim=2)
        stream, attention = self._linear(joined, "fc"), _Attention(batch, self._heads)
        found = []
        for position in range(self.num_positions):
            stream = self._layer(embedded[:, :, position], stream, attention)
            normed = self._normed(stream[anchors], "norm")
            found.append(self._linear(normed, "lm_head"))
        return found

    def drafts(self, batch: Batch) -> np.ndarray:
        return likeliest(self.scores(batch), self._teacher.token_ids)

    def stored(self) -> dict[str, np.ndarray]:
        ids, vocab_size = self._teacher.token_ids, self._teacher.config.vocab_size
        return {
            **as_arrays(self.parameters),
            "d2t": ids - np.arange(len(ids)),
            "t2d": np.isin(np.arange(vocab_size), ids),
        }

    def texts(self) -> Mapping[str, str]:
        return {}

    def description(self) -> dict[str, Any]:
        config = self._teacher.config
        told: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": 1,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "hidden_act": "silu",
            "vocab_size": config.vocab_size,
            "draft_vocab_size": len(self._teacher.token_ids),
        }
        scaling = stated_scaling(config)
        return told if scaling is None else {**told, "rope_scaling": scaling}

    def _layer(self, embedded: Tensor, stream: Tensor, attention: _Attention) -> Tensor:
        read = torch.cat(
            [
                self._normed(embedded, "midlayer.input_layernorm"),
                self._normed(stream, "midlayer.hidden_norm"),
            ],
            dim=-1,
        )
        stream = stream + self._linear(attention.mixed(read), "midlayer.self_attn.o_proj")
        inner = self._normed(stream, "midlayer.post_attention_layernorm")
        gate = torch.nn.functional.silu(self._linear(inner, "midlayer.mlp.gate_proj"))
        up = self._linear(inner, "midlayer.mlp.up_proj")
        return stream + self._linear(gate * up, "midlayer.mlp.down_proj")

    def _heads(self, read: Tensor, name: str, positions: Tensor) -> Tensor:
        """[windows, heads, rows, head_dim], every query head with its own keys and values."""
        config = self._teacher.config
        made = self._linear(read, f"midlayer.self_attn.{name}_proj")
        made = made.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
        if name != "v":
            made = self._rotation.turned(made, positions)
        return made.repeat_interleave(config.num_heads // made.shape[1], dim=1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.linear(x, self.parameters[name + ".weight"])

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return normed(x, self.parameters[name + ".weight"], self._teacher.config.norm_epsilon)


class _Attention:
    """Of one batch: rows of later positions see what the first position made of all rows up to
    theirs, and what the positions between made of their own row."""

    def __init__(self, batch: Batch, heads: Any) -> None:
        self._heads = heads
        self._made: list[tuple[Tensor, Tensor]] = []  # keys and values, by position
        width = batch.next_tokens.shape[1]
        self._rows = torch.arange(width)
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        self._sees = causal & torch.from_numpy(batch.is_row)[:, None, None, :]
        self._sees |= torch.eye(width, dtype=torch.bool)  # padding sees itself

    def mixed(self, read: Tensor) -> Tensor:
        """[windows, rows, query heads * head_dim]."""
        positions = self._rows + len(self._made)
        queries = self._heads(read, "q", positions)
        self._made.append((self._heads(read, "k", positions), self._heads(read, "v", positions)))
        (keys, values), *later = self._made
        scores = (queries @ keys.transpose(-1, -2)).masked_fill(~self._sees, -torch.inf)
        own = [(queries * each).sum(dim=-1, keepdim=True) for each, _ in later]
        scaled = torch.cat([scores, *own], dim=-1) * queries.shape[-1] ** -0.5
        weights = torch.softmax(scaled, dim=-1)
        width = keys.shape[2]
        mixed = weights[..., :width] @ values
        for at, (_, each) in enumerate(later):
            mixed = mixed + weights[..., width + at, None] * each
        return mixed.transpose(1, 2).flatten(start_dim=2)


def _beginning(
    teacher: Teacher, source: TensorRows, random: np.random.Generator
) -> dict[str, Tensor]:
    config, hidden = teacher.config, teacher.config.hidden_size
    late = f"model.layers.{config.num_layers - 1}."
    small = random.standard_normal((hidden, 3 * hidden)) * _SPREAD * hidden**-0.5
    small[:, 2 * hidden :] += np.eye(hidden)
    made = {
        "fc": small,
        "midlayer.input_layernorm": np.ones(hidden),
        "midlayer.hidden_norm": source.float32(late + "input_layernorm.weight"),
        "norm": source.float32("model.norm.weight"),
        "lm_head": teacher.output,
    }
    for name in ("post_attention_layernorm", "self_attn.o_proj", *_MLP):
        made["midlayer." + name] = source.float32(f"{late}{name}.weight")
    for name in "qkv":
        matrix = source.float32(f"{late}self_attn.{name}_proj.weight")
        beside = random.standard_normal(matrix.shape) * _SPREAD
        made[f"midlayer.self_attn.{name}_proj"] = np.concatenate([beside, matrix], axis=1)
    return {name + ".weight": parameter(each) for name, each in made.items()}


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
