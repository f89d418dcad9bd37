"""The description of a decoder, which exporters read from a model's files. It covers all
differences between families of models, so no other code checks a family's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from edge_spec.core.model_parts import (
    Encoder,
    Experts,
    HeadSizes,
    LayerEmbeddings,
    LayerKind,
    RelativePositions,
    Rotation,
)
from edge_spec.core.rope import Rope, RopeScaling

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")  # of an MLP's gate, or of an MLP without a gate
# Where a sublayer norms: its input, both input and output, its output, or the residual stream
# itself, which continues normed.
NORM_PLACES = ("before", "around", "after", "stream")


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions and features of one model. Counts are in elements, lengths in tokens."""

    architecture: str
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
    output_bias: bool = False  # of the attention output
    num_experts: int = 0  # in each layer; 0: one dense MLP
    experts_used: int = 0  # by each token
    _: KW_ONLY  # `to_dict` leaves out the following at their defaults
    layer_kinds: tuple[LayerKind, ...] = ()  # (): full attention with `rope_theta` in all layers
    kind_of_layer: tuple[int, ...] = ()  # by index of the layer; (): all have the first kind
    rotary_dim: int | None = None  # rotated elements of a head; None: all
    norm_places: str = "before"  # one of NORM_PLACES
    qk_norm_whole: bool = False  # over all heads together
    qk_norm_after_rope: bool = False
    activation: str = "silu"  # one of ACTIVATIONS
    embedding_scale: float = 1.0  # factor of embeddings,
    residual_scale: float = 1.0  # of each sublayer's output,
    logit_scale: float = 1.0  # and of logits
    attention_scale: float | None = None  # factor of query-key products; None: head_dim ** -0.5
    attention_softcap: float | None = None  # c in c * tanh(scores / c)
    logit_softcap: float | None = None
    experts: Experts | None = None  # details of `num_experts`; None: unknown
    attention_sinks: bool = False  # one extra attention logit a head (Xiao et al. 2023)
    gated_mlp: bool = True  # the activated gate times up; else up is activated
    relative_positions: RelativePositions | None = None
    encoder: Encoder | None = None  # of an encoder-decoder; all other fields describe the decoder
    layer_norm: bool = False  # norms subtract the mean and have biases (Ba et al. 2016)
    mlp_bias: bool = False
    logit_bias: bool = False
    position_table: bool = False  # of an encoder-decoder: learned absolute positions
    embedding_norm: bool = True  # with norm_places "stream": norm before the first sublayer
    value_norm: bool = False  # values are normed, without a weight
    layer_scale: bool = False  # each layer multiplies its output stream by a learned number
    # By layer, the one whose keys and values it attends to; (): its own.
    kv_sources: tuple[int, ...] = ()
    # By layer, the MLP's width; (): intermediate_size, or with experts dense_size, as
    # intermediate_size is then one expert's.
    intermediate_sizes: tuple[int, ...] = ()
    layer_embeddings: LayerEmbeddings | None = None
    input_norm: bool = False  # embeddings, with positions, are normed before the first layer

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Invert `to_dict`. Raises TypeError or AttributeError for wrong keys or types."""
        found: ModelConfig = _from_plain(cls, values)
        return found

    def to_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = _to_plain(self)
        return values

    def features(self) -> dict[str, Any]:
        """Return the keyword-only fields that differ from their defaults."""
        return {
            each.name: value
            for each in fields(self)
            if each.kw_only and (value := getattr(self, each.name)) != each.default
        }

    @property
    def attending(self) -> tuple[int, ...]:
        return tuple(n for n in range(self.num_layers) if self.kind(n).convolution is None)

    @property
    def caching(self) -> tuple[int, ...]:
        """Return the layers that attend to keys and values of their own."""
        return tuple(n for n in self.attending if self.kv_source(n) == n)

    @property
    def cache_blocks(self) -> dict[str, tuple[int, ...]]:
        """Return the caching layers by the shape of their keys and values, under the names in a
        session's state."""
        blocks: dict[tuple[int, ...], list[int]] = {}
        for layer in self.caching:
            blocks.setdefault(self.heads(layer)[1:], []).append(layer)
        names = (f"kv.{number}" if number else "kv" for number in range(len(blocks)))
        return {name: tuple(layers) for name, layers in zip(names, blocks.values(), strict=True)}

    @property
    def convolving(self) -> tuple[int, ...]:
        """Return the layers with a convolution, which cache its input, [hidden] a token."""
        return tuple(n for n in range(self.num_layers) if self.kind(n).convolution is not None)

    @property
    def num_preceding(self) -> int:
        """Return the most preceding rows that a convolution reads."""
        return max((kind.convolution or 1 for kind in self.kinds), default=1) - 1

    @property
    def cached_elements(self) -> int:
        """Count the elements cached for a token."""
        return 2 * self.cached_keys + len(self.convolving) * self.hidden_size

    @property
    def cached_keys(self) -> int:
        """Count the elements of a token's keys in all layers."""
        return sum(self.heads(layer).kv_size for layer in self.caching)

    @property
    def unlike_layers(self) -> str | None:
        """Describe how layers differ, apart from windows and rotations; None: they do not."""
        if self.kv_sources:
            return "layers with the keys and values of others"
        if self.layer_embeddings is not None:
            return "embeddings of its layers"
        return "layers with heads of several sizes" if len(self.cache_blocks) > 1 else None

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Count the parameters of matrices, experts included; norms and biases are few."""
        hidden, matrices = self.hidden_size, 3 if self.gated_mlp else 2
        inner = matrices * hidden
        layers = len(self.convolving) * 4 * hidden * hidden
        for layer in range(self.num_layers):
            layers += inner * self.inner_total(layer)
        layers += sum(hidden * self._attention_rows(layer) for layer in self.attending)
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        if self.layer_embeddings is not None:
            all_layers = self.num_layers * self.layer_embeddings.size
            embeddings += all_layers * (self.vocab_size + 3 * hidden)
        if self.encoder is not None:
            attention = 2 * hidden * (self.query_size + self.kv_size)
            mlp = inner * self.intermediate_size
            layers += self.encoder.num_layers * (attention + mlp) + self.num_layers * attention
        return layers + embeddings

    def _attention_rows(self, layer: int) -> int:
        """Count the rows of a layer's q, k and v matrices and the columns of its output matrix."""
        sizes, kind = self.heads(layer), self.kind(layer)
        own = 0 if self.kv_source(layer) != layer else 1 if kind.keys_as_values else 2
        return 2 * sizes.query_size + own * sizes.kv_size

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return self.layer_kinds or (LayerKind(Rope(self.rope_theta, self.rope_scaling)),)

    def mixes(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    def has_mlp(self, layer: int) -> bool:
        """Return whether a layer has a dense MLP, with or without experts."""
        return not self.mixes(layer) or (self.experts is not None and self.experts.beside_mlp)

    def mlp_size(self, layer: int) -> int:
        if self.intermediate_sizes:
            return self.intermediate_sizes[layer]
        return self.intermediate_size if self.experts is None else self.experts.dense_size

    def inner_total(self, layer: int) -> int:
        """Return the widths of a layer's MLP and all its experts, summed."""
        experts = self.num_experts * self.intermediate_size if self.mixes(layer) else 0
        return experts + (self.mlp_size(layer) if self.has_mlp(layer) else 0)

    def inner_largest(self, layer: int) -> int:
        """Return the wider of a layer's MLP and one expert."""
        expert = self.intermediate_size if self.mixes(layer) else 0
        return max(expert, self.mlp_size(layer) if self.has_mlp(layer) else 0)

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[self.kind_of_layer[layer] if self.kind_of_layer else 0]

    def heads(self, layer: int) -> HeadSizes:
        return self.heads_of(self.kind(layer))

    def heads_of(self, kind: LayerKind) -> HeadSizes:
        kv_heads, head_dim = kind.num_kv_heads, kind.head_dim
        return HeadSizes(
            self.num_heads,
            self.num_kv_heads if kv_heads is None else kv_heads,
            self.head_dim if head_dim is None else head_dim,
        )

    def kv_source(self, layer: int) -> int:
        return self.kv_sources[layer] if self.kv_sources else layer

    def rotation(self, kind: LayerKind) -> Rotation | None:
        """Return how heads are rotated; None: not at all."""
        if kind.rope is None:
            return None
        head_dim = self.heads_of(kind).head_dim
        return Rotation(kind.rope, head_dim if self.rotary_dim is None else self.rotary_dim)

    @property
    def rotations(self) -> tuple[Rotation, ...]:
        """Return the distinct rotations, in the order of `kinds`."""
        found = map(self.rotation, self.kinds)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(kind.window for kind in self.kinds if kind.window is not None))

    @property
    def rotated(self) -> int:
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def qk_norm_sizes(self, layer: int) -> tuple[int, int]:
        """Return the widths of a layer's query norm and key norm."""
        heads = self.heads(layer)
        whole = (heads.query_size, heads.kv_size)
        return whole if self.qk_norm_whole else (heads.head_dim, heads.head_dim)


def _to_plain(value: Any) -> Any:
    """Convert to JSON's types, without keyword-only defaults."""
    if is_dataclass(value):
        return {
            each.name: _to_plain(getattr(value, each.name))
            for each in fields(value)
            if not each.kw_only or getattr(value, each.name) != each.default
        }
    return tuple(map(_to_plain, value)) if isinstance(value, tuple) else value


def _from_plain(kind: Any, value: Any) -> Any:
    make: Any = kind
    if is_dataclass(kind):
        hints = _hints(make)
        return make(**{name: _from_plain(hints.get(name), each) for name, each in value.items()})
    if get_origin(kind) is tuple:
        return tuple(_from_plain(get_args(kind)[0], each) for each in value)
    if value is None or NoneType not in get_args(kind):
        return value
    return _from_plain(get_args(kind)[0], value)


_hints = cache(get_type_hints)
_LARGEST_SCALE = 1e9
_LARGEST_DIVISOR = 2.0**128  # of a frequency; some files have 1e30 for one that is not rotated
_LARGEST_SIZE = 1 << 24  # of an MLP, or of an embedding
_LARGEST_DISTANCE = 1 << 16
_MOST_LAYERS = 10_000


def config_problem(config: ModelConfig) -> str | None:
    """Return why no model can match this description; None: one can."""
    scales = [config.embedding_scale, config.residual_scale, config.logit_scale, *_optional(config)]
    if not all(0 < scale <= _LARGEST_SCALE for scale in scales):
        return "it scales or caps by what is no positive number"
    if config.activation not in ACTIVATIONS or config.norm_places not in NORM_PLACES:
        return f"it has the activation {config.activation!r} and norms {config.norm_places!r}"
    if (problem := _experts_problem(config)) is not None:
        return problem
    if not 2 <= config.rotated <= config.head_dim or config.rotated % 2:
        return f"it rotates {config.rotated} of the {config.head_dim} elements of a head"
    problems = (kind.problem(config.heads_of(kind), config.rotation(kind)) for kind in config.kinds)
    if (problem := next(filter(None, problems), None) or _encoder_problem(config)) is not None:
        return problem
    indices = config.kind_of_layer
    are_known = all(0 <= index < len(config.kinds) for index in indices)
    if indices and (len(indices) != config.num_layers or not are_known):
        return "its layers are of kinds that it does not have"
    if not config.attending:
        return "none of its layers attends to the text"
    if (problem := _layers_problem(config)) is not None:
        return problem
    return next(filter(None, map(_rotation_problem, config.rotations)), None)


def _experts_problem(config: ModelConfig) -> str | None:
    experts = config.experts
    if experts is None:
        return None
    if not 1 <= config.experts_used <= config.num_experts:
        return f"its tokens take {config.experts_used} of {config.num_experts} experts"
    if not 0 <= experts.dense_layers <= config.num_layers:
        return f"it has {experts.dense_layers} layers without experts"
    if experts.dense_layers and not experts.dense_size >= 1:
        return f"its layers without experts have a width of {experts.dense_size}"
    if experts.beside_mlp and not (experts.dense_size >= 1 or config.intermediate_sizes):
        return f"its MLPs beside experts have a width of {experts.dense_size}"
    if experts.beside_mlp and config.norm_places not in ("before", "around"):
        return f"it has experts beside its MLPs, and norms {config.norm_places!r}"
    return None


def _layers_problem(config: ModelConfig) -> str | None:
    sources, sizes = config.kv_sources, config.intermediate_sizes
    if sources and (
        len(sources) != config.num_layers
        or not all(_may_attend(config, layer) for layer in config.attending)
    ):
        return "its layers attend to keys and values that other layers do not have"
    are_sizes = all(1 <= size <= _LARGEST_SIZE for size in sizes)
    has_none = config.experts is not None and not config.experts.beside_mlp
    if sizes and (len(sizes) != config.num_layers or not are_sizes or has_none):
        return "the MLPs of its layers have sizes that no model has"
    own = config.layer_embeddings
    if own is not None and not 1 <= own.size <= _LARGEST_SIZE:
        return f"its layers have embeddings of {own.size} elements"
    return None


def _may_attend(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer's source is itself, or an earlier layer of its kind that has keys."""
    source = config.kv_sources[layer]
    return (
        0 <= source <= layer
        and config.kv_sources[source] == source
        and config.kind(source) == config.kind(layer)
    )


def _encoder_problem(config: ModelConfig) -> str | None:
    relative, encoder = config.relative_positions, config.encoder
    if relative is not None:
        sizes = (relative.num_buckets, relative.max_distance)
        if not (4 <= sizes[0] < 2 * sizes[1] and sizes[1] <= _LARGEST_DISTANCE):
            return f"it has {sizes[0]} buckets for distances of up to {sizes[1]} tokens"
    if encoder is None:
        return None
    if not 1 <= encoder.num_layers <= _MOST_LAYERS:
        return f"its encoder has {encoder.num_layers} layers"
    unknown = [each for each in encoder.beginning if not 0 <= each < config.vocab_size]
    if unknown:
        return f"its answers begin with the token {unknown[0]}"
    return None


def _optional(config: ModelConfig) -> Iterator[float]:
    experts = Experts() if config.experts is None else config.experts
    values = [
        *(config.attention_scale, config.attention_softcap, config.logit_softcap),
        *(experts.clamp, experts.scale, experts.score_scale),
    ]
    if (own := config.layer_embeddings) is not None:
        values += [own.scale, own.projected_scale, own.sum_scale]
    return (value for value in values if value is not None)


def _rotation_problem(rotation: Rotation) -> str | None:
    rope, scaling = rotation.rope, rotation.rope.scaling
    factors = scaling.factors if scaling else ()
    if factors and len(factors) != rotation.size // 2:
        return f"it scales {len(factors)} rotary frequencies, expected {rotation.size // 2}"
    divisors = [rope.theta, *factors]
    divisors += [scaling.factor, scaling.magnitude] if scaling else []
    if not all(0 < divisor <= _LARGEST_DIVISOR for divisor in divisors):
        return "its rotary frequencies are not positive numbers"
    return None
