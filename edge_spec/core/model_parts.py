"""Parts of a model's description: kinds of layers, experts, encoder, positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import numpy as np

from edge_spec.core.rope import Rope

_LARGEST_COUNT = 1 << 12  # of heads, or of their elements: several times any model's
_LONGEST_WINDOW = 1 << 24
_LONGEST_CONVOLUTION = 64


class HeadSizes(NamedTuple):
    """Sizes of a layer's attention."""

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
    """How heads are rotated: frequencies, and number of elements."""

    rope: Rope
    size: int

    def tables(self, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """Return cos and sin, each [num_positions, size / 2] float32."""
        return self.rope.tables(num_positions, self.size)


@dataclass(frozen=True)
class LayerKind:
    """The attention of some layers, or the convolution in its place."""

    rope: Rope | None  # None: no rotation (NoPE)
    # last positions that a row sees, its own included; None: all
    window: int | None = None
    _: KW_ONLY
    # Rows that a short convolution reads, its own included (Liquid AI 2025, LFM2); None: attention.
    convolution: int | None = None
    head_dim: int | None = None  # None: the model's
    num_kv_heads: int | None = None
    keys_as_values: bool = False  # values are the keys before norm and rotation

    def problem(self, sizes: HeadSizes, rotation: Rotation | None) -> str | None:
        """Return why no model can have such layers; None: one can."""
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
    """Each layer adds an embedding of the token from its own table, plus a projection of the
    token's main embedding (Google 2025, Gemma 3n)."""

    size: int  # elements for one layer
    scale: float  # factor of the table's rows,
    projected_scale: float  # of the projection,
    sum_scale: float  # and of their sum


@dataclass(frozen=True)
class Encoder:
    """An encoder whose output every decoder layer attends to. Sizes of heads, MLPs and embeddings
    are the decoder's."""

    num_layers: int
    start_id: int  # begins every answer, and ends the source at its first occurrence
    ends_source: bool = False  # it also ends the source: the answer begins with the second one
    forced_id: int | None = None  # the answer's second token, whatever the logits

    def answer_start(self, tokens: Sequence[int]) -> int | None:
        """Return where the answer begins; None while the source has not ended."""
        found = None
        for _ in range(2 if self.ends_source else 1):
            try:
                found = tokens.index(self.start_id, 0 if found is None else found + 1)
            except ValueError:
                return None
        return found

    @property
    def beginning(self) -> tuple[int, ...]:
        """Fixed tokens at the beginning of every answer."""
        return (self.start_id,) if self.forced_id is None else (self.start_id, self.forced_id)


SWISH_SLOPE = 1.702  # of clamped experts (OpenAI 2025, gpt-oss)
LEAST_SUM = 1e-6  # added to a sum of sigmoids that normalizes them


@dataclass(frozen=True)
class Experts:
    """How experts are weighted and built."""

    normalized: bool = True  # the weights of a token's experts sum to 1
    biases: bool = False  # on the router and all matrices
    # Bound of gate and up; then the gate's swish uses SWISH_SLOPE, and 1 is added to up.
    clamp: float | None = None
    _: KW_ONLY
    # Weights are sigmoids of router scores, else a softmax. choice_bias: a bias of each expert,
    # only for choosing (DeepSeek-AI 2024).
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0  # factor of the weights
    dense_layers: int = 0  # first layers with an MLP instead of experts,
    dense_size: int = 0  # of this width
    # Each layer also has an MLP of `dense_size`; the outputs are summed. MLP, experts and router
    # have their own norms; the router reads the stream itself (Google 2026, Gemma 4).
    beside_mlp: bool = False
    score_scale: float = 1.0  # factor of router scores
    expert_scales: bool = False  # each expert's weight has a factor of its own


@dataclass(frozen=True)
class RelativePositions:
    """Biases by distance. Distances share buckets that widen with distance (Raffel et al. 2020, T5,
    section 2.1); each head has a bias for each bucket."""

    num_buckets: int
    max_distance: int  # tokens; farther ones share the last bucket

    def buckets(self, both_ways: bool) -> np.ndarray:
        """Return [2 * max_distance + 1] int64: buckets of key minus query, -max_distance ...
        max_distance. both_ways: for an encoder, where later keys use half of the buckets; a decoder
        does not see them."""
        after = np.arange(-self.max_distance, self.max_distance + 1)
        if not both_ways:
            return self._near_to_far(np.maximum(-after, 0), self.num_buckets)
        half = self.num_buckets // 2
        found: np.ndarray = (after > 0) * half + self._near_to_far(np.abs(after), half)
        return found

    def _near_to_far(self, distances: np.ndarray, num_buckets: int) -> np.ndarray:
        """Exact buckets for the first half, then logarithmic ones. Float32 rounding as in training:
        some distances are on an edge."""
        exact = num_buckets // 2
        ratios = np.maximum(distances, 1).astype(np.float32) / np.float32(exact)
        steps = np.log(ratios) / np.float32(math.log(self.max_distance / exact))
        far = exact + (steps * np.float32(num_buckets - exact)).astype(np.int64)
        found: np.ndarray = np.where(distances < exact, distances, np.minimum(far, num_buckets - 1))
        return found

    def bias(
        self, weight: np.ndarray, rows: np.ndarray, keys: np.ndarray, both_ways: bool = False
    ) -> np.ndarray:
        """Return [heads, rows, keys] float32. weight: [num_buckets, heads]; rows, keys: positions,
        int64."""
        after = np.clip(keys - rows[:, None], -self.max_distance, self.max_distance)
        found: np.ndarray = weight[self.buckets(both_ways)[after + self.max_distance]]
        return np.moveaxis(found, -1, 0)
