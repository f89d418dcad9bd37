"""Orders the runtimes that `auto` asks for a model: the fastest first, where that was measured.

What is known of a model here is its profiles, of models of its shapes what passes cost. Nothing is
measured for it, and without figures of two runtimes for the model as each would run it, or where
the usual one is about as fast, the usual order stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from edge_spec.core.config import ModelConfig
from edge_spec.errors import EdgeSpecError
from edge_spec.models.bundle import is_bundle, read_manifest
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import joined_types
from edge_spec.models.runtime_choice import Resolution, RuntimeCandidates
from edge_spec.placement.profile import TYPICAL_TOKENS, kept_profiles
from edge_spec.placement.row_findings import RowsKey, holds, kept_costs, shapes_of

_REQUANTIZED_WELL = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0"})  # or carried over
_MARGIN = 1.1  # of the usual one's time: less may be what else the machine did


@dataclass(frozen=True)
class RuntimeOrder:
    """candidates: the first to be asked first. seconds: of a plain step, by runtime, of those that
    are known; none if the order is not one of speed."""

    candidates: RuntimeCandidates
    seconds: Mapping[str, float]

    @property
    def names(self) -> tuple[str, ...]:
        return self.candidates.names

    def __str__(self) -> str:
        steps = ", ".join(f"{name} {self.seconds[name] * 1e3:.1f} ms" for name in self.seconds)
        return f"Asking {self.names[0]} first, which was faster here (a step: {steps})"


def runtime_order(candidates: RuntimeCandidates, options: LoadOptions) -> RuntimeOrder:
    """Raises as `Source.path` does, and ModelFileError, UnsupportedModelError for a header that
    cannot be read."""
    is_left = options.quantization is None and options.block_size is None
    is_open = not candidates.is_bound and is_left and len(candidates.names) > 1
    if not is_open or not candidates.source.path.is_file():
        return RuntimeOrder(candidates, {})
    usual = _without_loss_first(candidates)
    seconds = _known_seconds(candidates, usual, options)
    known = [name for name in usual if name in seconds]
    by_speed = sorted(known, key=seconds.__getitem__)
    if len(known) < 2 or seconds[known[0]] <= _MARGIN * seconds[by_speed[0]]:
        return RuntimeOrder(replace(candidates, names=usual), {})
    faster = iter(by_speed)  # in the places of those that are known
    names = tuple(next(faster) if name in seconds else name for name in usual)
    order = replace(candidates, names=names)
    return RuntimeOrder(order, {name: seconds[name] for name in by_speed})


def _without_loss_first(candidates: RuntimeCandidates) -> tuple[str, ...]:
    """A file in K-quants of a family that is not plain Llama's first goes to who reads it as it is:
    Gemma 3 270M loses a fifth of its perplexity where its K-quants become blocks of int4."""
    usual = candidates.names
    if candidates.resolution(usual[0]).stored.is_there:
        return usual
    header = candidates.source.header
    if not header.config.features() or header.weight_types <= _REQUANTIZED_WELL:
        return usual
    return tuple(
        sorted(usual, key=lambda name: candidates.resolution(name).runtime.reads != "gguf")
    )


def _known_seconds(
    candidates: RuntimeCandidates, usual: Sequence[str], options: LoadOptions
) -> dict[str, float]:
    """Returns the time of a plain step, by runtime: of the model itself, else of one of its
    shapes."""
    source, asked = candidates.source, options.runtime_options
    profiles = [each for each in kept_profiles(source) if holds(each[0], asked)]
    costs = [each for each in kept_costs() if holds(each[0], asked)]
    measured = {key.runtime for key, _ in profiles} | {key.runtime for key, _ in costs}
    if len(measured & set(usual)) < 2:
        return {}  # not worth the time that it takes to read a header
    seconds = {}
    for name in usual:
        weights = _weights(candidates.resolution(name))
        own = (name, weights)
        found = [
            min(each.seconds(TYPICAL_TOKENS).values())
            for key, each in profiles
            if (key.runtime, key.weights) == own
        ]
        found = found or list(_of_shapes(costs, name, weights, source.header.config))
        if found:
            seconds[name] = min(found)
    return seconds


def _of_shapes(
    costs: list[tuple[RowsKey, Mapping[int, float]]],
    runtime: str,
    weights: str | None,
    config: ModelConfig,
) -> Iterator[float]:
    """Gives what models of these shapes take; before a conversion for the runtime, of weights in
    whatever form it ran."""
    for key, seconds in costs:
        is_same = (key.runtime, key.shapes) == (runtime, shapes_of(config))
        if is_same and weights in (None, key.weights):
            yield min(seconds.values())  # a wider pass bounds what a step takes


def _weights(resolution: Resolution) -> str | None:
    """Names weights as `stored_weights` does; None for a model that has to be converted."""
    if resolution.runtime.reads == "gguf":
        return joined_types(resolution.source.header.weight_types)
    bundle = resolution.stored.kept
    with suppress(EdgeSpecError):
        return read_manifest(bundle).quantization if is_bundle(bundle) else None
    return None
