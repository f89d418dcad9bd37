"""The parts of a model's description: layers that are not alike, experts, encoder, positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from edge_spec.core.rope import Rope

_LARGEST_COUNT = 1 << 12  # of heads, or of their elements: several times what any model has
_LONGEST_WINDOW = 1 << 24
_LONGEST_CONVOLUTION = 64


class HeadSizes(NamedTuple):
    """Gives the sizes of a layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


class Rotation(NamedTuple):
    """Says how the heads of some layers are rotated: by which frequencies, how many elements."""

    rope: Rope
    size: int

    def tables(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, each [num_positions, size / 2] float32."""
        return self.rope.tables(num_positions, self.size)


@dataclass(frozen=True)
class LayerKind:
    """Says what the attention of some layers has for itself, or what these have in its place."""

    rope: Rope | None  # None: nothing is rotated (NoPE)
    window: int | None = None  # the last positions that a row sees, itself one; None: all
    _: KW_ONLY
    # Rows that a short convolution takes in, itself one (Liquid AI 2025, LFM2); None: attention.
    convolution: int | None = None
    head_dim: int | None = None  # None: the model's
    num_kv_heads: int | None = None
    keys_as_values: bool = False  # values are what keys are before they are normed and rotated

    def problem(self, sizes: HeadSizes, rotation: Rotation | None) -> str | None:
        """Return why no model has such layers, with heads of these sizes, rotated so."""
        if self.window is not None and not 1 <= self.window <= _LONGEST_WINDOW:
            return "it has a window that no model has"
        taken = self.convolution
        if taken is not None and not 2 <= taken <= _LONGEST_CONVOLUTION:
            return f"its convolutions take in {taken} rows"
        if self.head_dim is None and self.num_kv_heads is None:
            return None
        if not all(1 <= count <= _LARGEST_COUNT for count in sizes):
            return f"it has layers with {sizes.num_kv_heads} heads of {sizes.head_dim} elements"
        if sizes.head_dim % 2 or sizes.num_heads % sizes.num_kv_heads:
            return (
                f"{sizes.num_heads} attention heads of {sizes.head_dim} do not share "
                f"{sizes.num_kv_heads} of keys and values"
            )
        if rotation is not None and rotation.size > sizes.head_dim:
            return f"it rotates {rotation.size} of the {sizes.head_dim} elements of a head"
        return None


@dataclass(frozen=True)
class LayerEmbeddings:
    """Says what each layer adds of the token itself: of a table with an embedding for each layer,
    and of what one matrix makes of the token's own embedding (Google 2025, Gemma 3n)."""

    size: int  # of the embedding of one layer
    scale: float  # of what the table has,
    projected_scale: float  # of what the matrix makes,
    sum_scale: float  # and of both together


@dataclass(frozen=True)
class Encoder:
    """Says what an encoder-decoder has beside its decoder: layers that read the source, which every
    layer of the decoder attends to. Heads, MLPs and embeddings are of the decoder's sizes."""

    num_layers: int
    start_id: int  # the token that every answer begins with: the source ends before the first one
    ends_source: bool = False  # it also ends the source: the answer begins with the second one
    forced_id: int | None = None  # the answer's second token, whatever the scores are

    def answer_start(self, tokens: Sequence[int]) -> int | None:
        """Return where the answer begins, None where the source has not ended."""
        found = None
        for _ in range(2 if self.ends_source else 1):
            try:
                found = tokens.index(self.start_id, 0 if found is None else found + 1)
            except ValueError:
                return None
        return found

    @property
    def beginning(self) -> tuple[int, ...]:
        """Return the tokens of every answer that are not chosen."""
        return (self.start_id,) if self.forced_id is None else (self.start_id, self.forced_id)


SWISH_SLOPE = 1.702  # of experts that are clamped (OpenAI 2025, gpt-oss)
LEAST_SUM = 1e-6  # is added to what normalized sigmoids of experts add up to


@dataclass(frozen=True)
class Experts:
    """Says how a mixture of experts weighs what its experts add, and what these are like."""

    normalized: bool = True  # the weights of those that a token takes add up to 1
    biases: bool = False  # of the router and of all matrices
    # What gate and up are bound to. Then a gate's swish has SWISH_SLOPE, and up has 1 added.
    clamp: float | None = None
    _: KW_ONLY
    # The weights are sigmoids of the router's scores, to which a bias of each expert is added where
    # experts are chosen, and only there (DeepSeek-AI 2024); else a softmax of them.
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0  # what the weights are multiplied with
    dense_layers: int = 0  # the first ones, each with one MLP in the place of experts,
    dense_size: int = 0  # of this size
    # Each layer has one MLP of `dense_size` as well, and what both add is summed. Each has norms of
    # its own of what it reads and adds, and so has the router, which reads the stream itself
    # (Google 2026, Gemma 4).
    beside_mlp: bool = False
    score_scale: float = 1.0  # what the router's scores are multiplied with
    expert_scales: bool = False  # each expert has a number that its weight is multiplied with


@dataclass(frozen=True)
class RelativePositions:
    """Distances share buckets, the wider the farther they are (Raffel et al. 2020, T5, section
    2.1); each head adds a number of its own for each bucket."""

    num_buckets: int
    max_distance: int  # tokens, from which on all share the last bucket

    def buckets(self, both_ways: bool) -> np.ndarray:
        """Return [2 * max_distance + 1] int64: of a key that stands -max_distance ...
        max_distance tokens after its query. both_ways: of an encoder, where later tokens have half
        of the buckets; in a decoder no row sees them."""
        after = np.arange(-self.max_distance, self.max_distance + 1)
        if not both_ways:
            return self._near_to_far(np.maximum(-after, 0), self.num_buckets)
        half = self.num_buckets // 2
        found: np.ndarray = (after > 0) * half + self._near_to_far(np.abs(after), half)
        return found

    def _near_to_far(self, distances: np.ndarray, num_buckets: int) -> np.ndarray:
        """One each for the first half, and logarithmic ones; rounded as float32, as training did
        it: some distances are on an edge."""
        exact = num_buckets // 2
        ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
        steps = np.log(ratios) / np.float32(math.log(self.max_distance / exact))
        far = exact + (steps * np.float32(num_buckets - exact)).astype(np.int64)
        found: np.ndarray = np.where(distances < exact, distances, np.minimum(far, num_buckets - 1))
        return found

    def bias(
        self, weight: np.ndarray, rows: np.ndarray, keys: np.ndarray, both_ways: bool = False
    ) -> np.ndarray:
        """Return [heads, rows, keys] float32. weight: [num_buckets, heads]; rows, keys: the
        positions of queries and keys, int64."""
        after = np.clip(keys - rows[:, None], -self.max_distance, self.max_distance)
        found: np.ndarray = weight[self.buckets(both_ways)[after + self.max_distance]]
        return np.moveaxis(found, -1, 0)
