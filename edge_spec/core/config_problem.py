"""Refuses what no model can have before anything of a model's size is made."""

from __future__ import annotations

from collections.abc import Iterator

from edge_spec.core.config import ACTIVATIONS, NORM_PLACES, ModelConfig
from edge_spec.core.model_parts import Experts, Rotation

_LARGEST_SCALE = 1e9
_LARGEST_DIVISOR = 2.0**128  # of a frequency; some files have 1e30 for one that is not rotated
_LARGEST_SIZE = 1 << 24  # of an MLP, or of an embedding
_LARGEST_DISTANCE = 1 << 16
_MOST_LAYERS = 10_000


def config_problem(config: ModelConfig) -> str | None:
    """Returns why no model can have the features of this description."""
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
    """Returns why no model has such layers beside each other."""
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
    """Says whether a layer's source is itself or one before it, of its kind, with its own keys."""
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
