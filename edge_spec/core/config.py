"""The description of a decoder, as exporters read it from a model's files and runtimes need it.

What is stated here is all that tells one family of models from another: whoever computes a model
or writes one reads this, and never asks for a family's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from edge_spec.core.relative_positions import RelativePositions
from edge_spec.core.rope import Rope, RopeScaling

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # of the gate of an MLP, or of its only half
SWISH_SLOPE = 1.702  # of experts that are clamped (OpenAI 2025, gpt-oss)
LEAST_SUM = 1e-6  # is added to what normalized sigmoids of experts add up to
# Of a sublayer's norms: of its input, of its input and what it adds, of what it adds alone, of the
# stream itself, which goes on as the sublayer reads it.
NORM_PLACES = ("before", "around", "after", "stream")


@dataclass(frozen=True)
class LayerKind:
    """What the attention of some layers has for itself, or what these have in its place."""

    rope: Rope | None  # None: nothing is rotated (NoPE)
    window: int | None = None  # the last positions that a row sees, itself one; None: all
    # Rows that a short convolution takes in, itself one (Liquid AI 2025, LFM2); None: attention.
    convolution: int | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LayerKind:
        rope = values["rope"]
        return cls(**{**values, "rope": rope and Rope.from_dict(rope)})


@dataclass(frozen=True)
class Experts:
    """How a mixture of experts weighs what its experts add, and what these have for themselves."""

    normalized: bool = True  # the weights of those that a token takes add up to 1
    biases: bool = False  # of the router and of all matrices
    # What gate and up are bound to. Then a gate's swish has SWISH_SLOPE, and up has 1 added.
    clamp: float | None = None
    # The weights are sigmoids of the router's scores, to which a bias of each expert is added where
    # experts are chosen, and only there (DeepSeek-AI 2024); else a softmax of them.
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0  # what the weights are multiplied with
    dense_layers: int = 0  # the first ones, each with one MLP in the place of experts,
    dense_size: int = 0  # of this size

    def to_dict(self) -> dict[str, Any]:
        """Leaves out from `sigmoid` on what says nothing, as it was before there was that."""
        kept = ("normalized", "biases", "clamp")
        values, usual = asdict(self), asdict(Experts())
        return {name: each for name, each in values.items() if name in kept or each != usual[name]}


@dataclass(frozen=True)
class Encoder:
    """What an encoder-decoder has beside its decoder: layers that read the source, which every
    layer of the decoder attends to. Heads, MLPs and embeddings are of the decoder's sizes."""

    num_layers: int
    start_id: int  # the token that every answer begins with: the source ends before the first one
    ends_source: bool = False  # it also ends the source: the answer begins with the second one
    forced_id: int | None = None  # the answer's second token, whatever the scores are

    def answer_start(self, tokens: Sequence[int]) -> int | None:
        """Returns where the answer begins, None where the source has not ended."""
        found = None
        for _ in range(2 if self.ends_source else 1):
            try:
                found = tokens.index(self.start_id, 0 if found is None else found + 1)
            except ValueError:
                return None
        return found

    @property
    def beginning(self) -> tuple[int, ...]:
        """Returns the tokens of every answer that are not chosen."""
        return (self.start_id,) if self.forced_id is None else (self.start_id, self.forced_id)


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of one model; counts are of elements, lengths of tokens."""

    architecture: str  # as its files name it
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # a bias on the attention's output projection
    num_experts: int = 0  # of each layer; 0: one dense MLP
    experts_used: int = 0  # by each token
    # From here on, `to_dict` leaves out what a model has not.
    layer_kinds: tuple[LayerKind, ...] = ()  # (): all layers see everything, by `rope_theta`
    kind_of_layer: tuple[int, ...] = ()  # of each layer, by index; (): all have the first
    rotary_dim: int | None = None  # elements of a head that are rotated; None: all
    norm_places: str = "before"  # one of NORM_PLACES
    qk_norm_whole: bool = False  # over all heads at once
    qk_norm_after_rope: bool = False
    activation: str = "silu"  # one of ACTIVATIONS
    embedding_scale: float = 1.0  # what embeddings are multiplied with,
    residual_scale: float = 1.0  # what each sublayer adds,
    logit_scale: float = 1.0  # and the scores
    attention_scale: float | None = None  # of queries times keys; None: head_dim ** -0.5
    attention_softcap: float | None = None  # c in c * tanh(scores / c)
    logit_softcap: float | None = None
    experts: Experts | None = None  # of `num_experts`; None: what they are like is not known
    attention_sinks: bool = False  # each head has a score that no position has (Xiao et al. 2023)
    gated_mlp: bool = True  # gate and up are multiplied; else there is only up, which is activated
    relative_positions: RelativePositions | None = None
    encoder: Encoder | None = None  # of an encoder-decoder; all else is of the decoder
    layer_norm: bool = False  # norms take the mean away and have biases (Ba et al. 2016)
    mlp_bias: bool = False
    logit_bias: bool = False  # is added to the scores
    position_table: bool = False  # of an encoder-decoder: a row a position, added to embeddings
    embedding_norm: bool = True  # of a stream that is normed itself: before its first sublayer

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises TypeError for missing or unknown keys."""
        scaling = values.get("rope_scaling")
        kinds = values.get("layer_kinds", ())
        nested = {
            "rope_scaling": scaling and RopeScaling.from_dict(scaling),
            "layer_kinds": tuple(LayerKind.from_dict(kind) for kind in kinds),
            "kind_of_layer": tuple(values.get("kind_of_layer", ())),
            "experts": Experts(**values["experts"]) if values.get("experts") else None,
        }
        for name, kind in (("relative_positions", RelativePositions), ("encoder", Encoder)):
            nested[name] = kind(**values[name]) if values.get(name) else None
        return cls(**{**values, **nested})

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        for name in _ADDED.keys() - self.features().keys():
            del values[name]
        if self.experts is not None:
            values["experts"] = self.experts.to_dict()
        for rope in (values, *values.get("layer_kinds", ())):
            _forget_magnitude(rope)
        for kind in values.get("layer_kinds", ()):
            if kind["convolution"] is None:  # as it was before there was one
                del kind["convolution"]
        return values

    def features(self) -> dict[str, Any]:
        """Returns the fields from `layer_kinds` on that say something, by name."""
        stated = {name: getattr(self, name) for name in _ADDED}
        return {name: value for name, value in stated.items() if value != _ADDED[name]}

    @property
    def attending(self) -> tuple[int, ...]:
        """Returns the layers that attend: they cache keys and values."""
        return tuple(n for n in range(self.num_layers) if self.kind(n).convolution is None)

    @property
    def convolving(self) -> tuple[int, ...]:
        """Returns the layers with a convolution: they cache what it takes in, [hidden] a token."""
        return tuple(n for n in range(self.num_layers) if self.kind(n).convolution is not None)

    @property
    def num_preceding(self) -> int:
        """Returns how many rows before a row its convolutions take in, at most."""
        return max((kind.convolution or 1 for kind in self.kinds), default=1) - 1

    @property
    def cached_elements(self) -> int:
        """Counts the elements that the layers keep of a token."""
        keys_and_values = 2 * len(self.attending) * self.kv_size
        return keys_and_values + len(self.convolving) * self.hidden_size

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Counts the parameters of its matrices, all experts included; norms and biases are few."""
        attention = 2 * self.hidden_size * (self.query_size + self.kv_size)
        convolution = 4 * self.hidden_size * self.hidden_size
        matrices = 3 if self.gated_mlp else 2
        mlp = matrices * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        layers = len(self.attending) * attention + len(self.convolving) * convolution
        dense = 0 if self.experts is None else self.experts.dense_layers
        layers += (self.num_layers - dense) * mlp * max(self.num_experts, 1)
        layers += sum(matrices * self.hidden_size * self.inner_size(n) for n in range(dense))
        if self.encoder is not None:
            layers += self.encoder.num_layers * (attention + mlp) + self.num_layers * attention
        return layers + embeddings

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """Returns the kinds that layers are of: one at least."""
        return self.layer_kinds or (LayerKind(Rope(self.rope_theta, self.rope_scaling)),)

    def mixes(self, layer: int) -> bool:
        """Returns whether a layer has experts in the place of one MLP."""
        return self.experts is not None and layer >= self.experts.dense_layers

    def inner_size(self, layer: int) -> int:
        """Returns the width of a layer's MLP, or of each of its experts."""
        is_dense = self.experts is not None and layer < self.experts.dense_layers
        return self.experts.dense_size if self.experts and is_dense else self.intermediate_size

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[self.kind_of_layer[layer] if self.kind_of_layer else 0]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Returns the different ones of its layers, in the order of their kinds."""
        return tuple(dict.fromkeys(kind.rope for kind in self.kinds if kind.rope is not None))

    @property
    def windows(self) -> tuple[int, ...]:
        """Returns the different ones of its layers, in the order of their kinds."""
        return tuple(dict.fromkeys(kind.window for kind in self.kinds if kind.window is not None))

    @property
    def rotated(self) -> int:
        """Returns how many elements of a head are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Returns how many elements the norms of queries and of keys take."""
        whole = (self.query_size, self.kv_size)
        return whole if self.qk_norm_whole else (self.head_dim, self.head_dim)

    def rope_frequencies(self) -> np.ndarray:
        """[rotated / 2] float64; radians a position for each rotated pair, of `rope_theta`."""
        return Rope(self.rope_theta, self.rope_scaling).frequencies(self.rotated)

    def rope_tables(self, rope: Rope, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin, each [num_positions, rotated / 2] float32."""
        return rope.tables(num_positions, self.rotated)

    def problem(self) -> str | None:
        """Returns why no model can have these features."""
        scales = [self.embedding_scale, self.residual_scale, self.logit_scale, *self._optional()]
        if not all(0 < scale <= _LARGEST_SCALE for scale in scales):
            return "it scales or caps by what is no positive number"
        if self.activation not in ACTIVATIONS or self.norm_places not in NORM_PLACES:
            return f"it has the activation {self.activation!r} and norms {self.norm_places!r}"
        if self.experts and not 1 <= self.experts_used <= self.num_experts:
            return f"its tokens take {self.experts_used} of {self.num_experts} experts"
        if self.experts and not 0 <= self.experts.dense_layers <= self.num_layers:
            return f"it has {self.experts.dense_layers} layers without experts"
        if self.experts and self.experts.dense_layers and not self.experts.dense_size >= 1:
            return f"its layers without experts have a width of {self.experts.dense_size}"
        if not 2 <= self.rotated <= self.head_dim or self.rotated % 2:
            return f"it rotates {self.rotated} of the {self.head_dim} elements of a head"
        if not all(1 <= window <= _LONGEST_WINDOW for window in self.windows):
            return "it has a window that no model has"
        taken = [kind.convolution for kind in self.kinds if kind.convolution is not None]
        if not all(2 <= count <= _LONGEST_CONVOLUTION for count in taken):
            return f"its convolutions take in {taken[0]} rows"
        if (problem := self._encoder_problem()) is not None:
            return problem
        indices = self.kind_of_layer
        if indices and (len(indices) != self.num_layers or not _are_below(indices, self.kinds)):
            return "its layers are of kinds that it does not have"
        if not self.attending:
            return "none of its layers attends to the text"
        return next(filter(None, map(self._rope_problem, self.ropes)), None)

    def _encoder_problem(self) -> str | None:
        relative, encoder = self.relative_positions, self.encoder
        if relative is not None:
            sizes = (relative.num_buckets, relative.max_distance)
            if not (4 <= sizes[0] < 2 * sizes[1] and sizes[1] <= _LARGEST_DISTANCE):
                return f"it has {sizes[0]} buckets for distances of up to {sizes[1]} tokens"
        if encoder is None:
            return None
        if not 1 <= encoder.num_layers <= _MOST_LAYERS:
            return f"its encoder has {encoder.num_layers} layers"
        unknown = [each for each in encoder.beginning if not 0 <= each < self.vocab_size]
        if unknown:
            return f"its answers begin with the token {unknown[0]}"
        return None

    def _optional(self) -> Iterator[float]:
        experts = Experts() if self.experts is None else self.experts
        values = (
            *(self.attention_scale, self.attention_softcap, self.logit_softcap),
            *(experts.clamp, experts.scale),
        )
        return (value for value in values if value is not None)

    def _rope_problem(self, rope: Rope) -> str | None:
        scaling = rope.scaling
        factors = scaling.factors if scaling else ()
        if factors and len(factors) != self.rotated // 2:
            return f"it scales {len(factors)} rotary frequencies, expected {self.rotated // 2}"
        divisors = [rope.theta, *factors]
        divisors += [scaling.factor, scaling.magnitude] if scaling else []
        if not all(0 < divisor <= _LARGEST_DIVISOR for divisor in divisors):
            return "its rotary frequencies are not positive numbers"
        return None


_NAMES = [field.name for field in fields(ModelConfig)]
# The fields that `to_dict` leaves out where they say nothing, and what they are then.
_ADDED: Mapping[str, Any] = {
    field.name: field.default for field in fields(ModelConfig)[_NAMES.index("layer_kinds") :]
}
_LARGEST_SCALE = 1e9
_LARGEST_DIVISOR = 2.0**128  # of a frequency; some files have 1e30 for one that is not rotated
_LONGEST_WINDOW = 1 << 24
_LONGEST_CONVOLUTION = 64
_LARGEST_DISTANCE = 1 << 16
_MOST_LAYERS = 10_000


def _are_below(indices: tuple[int, ...], kinds: tuple[LayerKind, ...]) -> bool:
    return min(indices) >= 0 and max(indices) < len(kinds)


def _forget_magnitude(values: dict[str, Any]) -> None:
    """Drops it from a rope's scaling where it is 1, as it was before there was one."""
    for scaling in (values.get("rope_scaling"), (values.get("rope") or {}).get("scaling")):
        if scaling and scaling["magnitude"] == 1.0:
            del scaling["magnitude"]
