"""An EAGLE-3 head (Li et al. 2025): one decoder layer over the inputs of three of the target's.

Each of the three is normed first, as in EAGLE-3.1: it then learns the same in fewer steps.

It is trained as it drafts: after the first position it reads its own last state in the place of
features, beside the tokens that the target wrote (training-time test, section 3.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from edge_spec.core.model_info import TensorRows
from edge_spec.distill.small_draft_files import stated_scaling
from edge_spec.distill.trainee import (
    DecoderLayers,
    Rotation,
    Teacher,
    Tensor,
    as_arrays,
    likeliest,
    parameter,
)
from edge_spec.distill.windows import Batch
from edge_spec.loader.head import StoredTables

_SPREAD = 0.02  # of what begins at random
_FEATURES = 3
_LAYER = "midlayer"


class Eagle3Trainee:
    """Begins as the target's last layer over its last feature, and the target's output matrix."""

    def __init__(
        self, teacher: Teacher, source: TensorRows, num_positions: int, seed: int = 0
    ) -> None:
        self.num_positions = num_positions
        self.parameters = _beginning(teacher, source, np.random.default_rng(seed))
        self._teacher = teacher
        self._tables = StoredTables(source)
        # Trained as it will be read: what config.json cannot state is not there for either.
        scaled = stated_scaling(teacher.config) is not None
        plain = replace(teacher.config, rope_scaling=None)
        self._rotation = Rotation(teacher.config if scaled else plain)

    def scores(self, batch: Batch) -> list[Tensor]:
        """Scores rows; of those before the first anchor, later ones see the keys and values alone:
        nothing else is made of them."""
        layers = DecoderLayers(self._teacher, self.parameters, self._rotation)
        block = _AnchorBlock(batch)
        features = _joined(layers, torch.as_tensor(batch.features))
        read = _read(layers, self._embedded(batch.next_tokens), features)
        attention = _Attention(batch, block, layers, read)
        stream, read = block.of(features), block.of(read)
        normed = []
        for position in range(self.num_positions):
            if position:
                written = batch.written[:, :, position - 1]
                tokens = np.take_along_axis(written, block.rows.cpu().numpy(), axis=1)
                read = _read(layers, self._embedded(tokens), stream)
            stream = layers.after_attention(stream, attention.mixed(read, position), _LAYER)
            normed.append(layers.normed(stream[block.is_anchor], "norm"))
        scores: list[Tensor] = list(layers.linear(torch.stack(normed), "lm_head").unbind())
        return scores

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
            "fc_norm": True,
        }
        scaling = stated_scaling(config)
        return told if scaling is None else {**told, "rope_scaling": scaling}

    def _embedded(self, tokens: np.ndarray) -> Tensor:
        """[windows, rows, hidden_size]. Nothing is learnt of what follows -1, which is no token."""
        ids, places = np.unique(np.maximum(tokens, 0), return_inverse=True)
        return torch.as_tensor(self._tables.embed(ids))[
            torch.as_tensor(places.reshape(tokens.shape))
        ]


def _joined(layers: DecoderLayers, features: Tensor) -> Tensor:
    """[windows, rows, hidden_size] of [windows, rows, layers, hidden_size]. Late layers have larger
    features than early ones, and a text's first token a hundred times larger ones."""
    each = [layers.normed(features[:, :, at], f"fc_norm.{at}") for at in range(_FEATURES)]
    return layers.linear(torch.cat(each, dim=-1), "fc")


def _read(layers: DecoderLayers, embedded: Tensor, stream: Tensor) -> Tensor:
    """Returns what the attention reads: tokens beside features, or states in their place."""
    token = layers.normed(embedded, f"{_LAYER}.input_layernorm")
    return torch.cat([token, layers.normed(stream, f"{_LAYER}.hidden_norm")], dim=-1)


class _AnchorBlock:
    """The anchors of a batch, which are the last rows of each window, beside each other.

    is_anchor: [windows, most anchors] bool; else it is padding. rows: [windows, most anchors] int64
    of the windows, in padding the last one.
    """

    def __init__(self, batch: Batch) -> None:
        counts = batch.anchors.sum(axis=1, keepdims=True)
        places = np.arange(counts.max())
        last = batch.anchors.shape[1] - 1
        self.rows = torch.as_tensor(
            np.minimum(batch.anchors.argmax(axis=1)[:, None] + places, last)
        )
        self.is_anchor = torch.as_tensor(places < counts)

    def of(self, made: Tensor) -> Tensor:
        """[windows, most anchors, size] of [windows, rows, size]."""
        return made.gather(1, self.rows[:, :, None].expand(-1, -1, made.shape[2]))


class _Attention:
    """Attends within one batch: anchors see what the first position made of all rows up to
    theirs, and what the positions between made of their own row. read: of all rows in the first
    position."""

    def __init__(
        self, batch: Batch, block: _AnchorBlock, layers: DecoderLayers, read: Tensor
    ) -> None:
        self._layers = layers
        self._rows = block.rows
        rows = torch.arange(read.shape[1]).expand(len(read), -1)
        self._keys, self._values = (self._heads(read, name, rows) for name in "kv")
        is_before = rows[:, None, :] <= block.rows[:, :, None]
        self._sees = (is_before & torch.as_tensor(batch.is_row)[:, None, :])[:, None]
        self._later: list[tuple[Tensor, Tensor]] = []  # keys and values, by further position

    def mixed(self, read: Tensor, position: int) -> Tensor:
        """[windows, most anchors, query heads * head_dim]. read: of the anchors."""
        at = self._rows + position
        queries = self._heads(read, "q", at)
        if position:
            self._later.append((self._heads(read, "k", at), self._heads(read, "v", at)))
        scores = (queries @ self._keys.transpose(-1, -2)).float()
        scores = scores.masked_fill(~self._sees, -torch.inf)
        own = [(queries * each).sum(-1, keepdim=True).float() for each, _ in self._later]
        scaled = torch.cat([scores, *own], dim=-1) * queries.shape[-1] ** -0.5
        weights = torch.softmax(scaled, dim=-1).to(queries.dtype)
        width = self._keys.shape[2]
        mixed = weights[..., :width] @ self._values
        for beside, (_, each) in enumerate(self._later):
            mixed = mixed + weights[..., width + beside, None] * each
        return mixed.transpose(1, 2).flatten(start_dim=2)

    def _heads(self, read: Tensor, name: str, positions: Tensor) -> Tensor:
        """positions: [windows, rows]."""
        return self._layers.heads(read, _LAYER, name, positions[:, None])


def _beginning(
    teacher: Teacher, source: TensorRows, random: np.random.Generator
) -> dict[str, Tensor]:
    config, hidden = teacher.config, teacher.config.hidden_size
    late = f"model.layers.{config.num_layers - 1}."
    small = random.standard_normal((hidden, _FEATURES * hidden)) * _SPREAD * hidden**-0.5
    small[:, 2 * hidden :] += np.eye(hidden)
    made = {
        "fc": small,
        "midlayer.input_layernorm": np.ones(hidden),
        "midlayer.hidden_norm": source.float32(late + "input_layernorm.weight"),
        "norm": source.float32("model.norm.weight"),
        "lm_head": teacher.output,
        **{f"fc_norm.{at}": np.ones(hidden) for at in range(_FEATURES)},
    }
    for name in ("post_attention_layernorm", "self_attn.o_proj", *_MLP):
        made["midlayer." + name] = source.float32(f"{late}{name}.weight")
    for name in "qkv":
        matrix = source.float32(f"{late}self_attn.{name}_proj.weight")
        beside = random.standard_normal(matrix.shape) * _SPREAD
        made[f"midlayer.self_attn.{name}_proj"] = np.concatenate([beside, matrix], axis=1)
    return {name + ".weight": parameter(each) for name, each in made.items()}


_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
