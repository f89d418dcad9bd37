"""Assistants: small models that read the keys and values of their target, as a reader describes
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np

from edge_spec.core.config import ModelConfig
from edge_spec.core.model_parts import LayerKind


class AssistantLayer(NamedTuple):
    """Says how a layer of an assistant attends."""

    kind: LayerKind
    source: int  # the target's layer whose keys and values it reads
    head_dim: int


class Centroids(NamedTuple):
    """Say which tokens are scored: those of the clusters whose centroids score highest.

    ordering: [clusters, tokens of each] int64, the tokens of the target.
    """

    weight: np.ndarray  # [clusters, hidden_size] float32
    ordering: np.ndarray
    num_active: int


@dataclass(frozen=True, eq=False)
class AssistantHead:
    """A small model without keys and values of its own: its layers read those that the target has
    of the text (Google 2026, the assistants of Gemma 4). Every draft token is made at the position
    of the pending token, of the token before it and of the state that came with that.

    tensors: float32, which may be read again whenever they are asked for; matrices [out, in]:

        pre.weight             joins the target's embedding of a token and a state of its width
        post.weight            makes the next such state
        norm                   of the last layer
        layers.L.(q|o|gate|up|down).weight
        layers.L.(input_norm|q_norm|attended_norm|mlp_norm|added_norm)
        layers.L.scale         of what the layer gives on
    """

    drafted_by: ClassVar = "assistant"  # the drafter's name

    path: Path
    config: ModelConfig  # of its layers; vocab_size and context_length are the target's
    target_size: int  # the target's hidden_size
    embedding_scale: float  # of the target's embedding
    layers: tuple[AssistantLayer, ...]
    tensors: Mapping[str, np.ndarray]
    # Rows of its output matrix [vocab, hidden_size] float32.
    output_rows: Callable[[np.ndarray], np.ndarray] | None = None
    centroids: Centroids | None = None
    token_ids: np.ndarray | None = None  # [scored tokens] int64 of the target; None: all of them

    def __str__(self) -> str:
        sources = ", ".join(map(str, dict.fromkeys(layer.source for layer in self.layers)))
        told = f"assistant of {len(self.layers)} layers, reads keys and values of layers {sources}"
        return f"{told}, scores {self.num_scored} of {self.config.vocab_size} tokens"

    @property
    def num_scored(self) -> int:
        """Counts the tokens of a row that are scored."""
        if self.centroids is not None:
            return self.centroids.num_active * int(self.centroids.ordering.shape[1])
        return self.config.vocab_size if self.token_ids is None else len(self.token_ids)

    def scoring(self, token_ids: np.ndarray) -> AssistantHead:
        """Returns one that scores these tokens alone: [tokens] int64."""
        return replace(self, token_ids=token_ids)
