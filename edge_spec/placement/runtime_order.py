"""Orders the runtimes that `auto` asks for a model, and says why.

Those that have nothing to convert come first, in the usual order; one that is known to be clearly
faster here goes before them. Nothing is measured for it: what is known are profiles of the model
and what passes of models of its shapes cost. No conversion is made to be faster: one line names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import EdgeSpecError, MissingDependencyError, UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.models.bundle import read_manifest
from edge_spec.models.resolve import Resolution, RuntimeCandidates, joined_types
from edge_spec.models.source import Source
from edge_spec.scheduler.cost import RowCosts, costs_of, forecast_speedup
from edge_spec.scheduler.profile import TYPICAL_TOKENS, kept_profiles
from edge_spec.scheduler.row_findings import SECONDS, RowsKey, holds, shapes_of

_MARGIN = 1.05  # of the faster one's time: less may be what else the machine did
_CONVERTED = 1.1  # against one that reads the very file, whose texts a conversion changes
# Times as long as another one on the processor, beyond which the machine was busy when it was
# measured: no two runtimes are so far apart there.
_IMPLAUSIBLE = 3.0
_READS_FILES = "llamacpp"
_ACCEPTANCE = 0.3  # of draft tokens that are looked up in texts of all kinds
_DRAFT_TOKENS = range(8)


@dataclass(frozen=True)
class RuntimeOrder:
    """candidates: the first to be asked first. seconds: that a token takes, by runtime, of those
    that are known. reason: why that one, "" where nothing was to be chosen. better: what would be
    faster, and how to have it; "" where nothing is known to be."""

    candidates: RuntimeCandidates
    seconds: Mapping[str, float]
    reason: str = ""
    better: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return self.candidates.names


def runtime_order(candidates: RuntimeCandidates, asked: RuntimeOptions) -> RuntimeOrder:
    """asked: how the model is opened; what was measured otherwise says nothing. Raises as
    `Source.path` does, and ModelFileError, UnsupportedModelError for a header that cannot be
    read."""
    if candidates.is_bound:
        return RuntimeOrder(candidates, {})
    missing = missing_reader(candidates.source)
    if len(candidates.names) == 1:
        return RuntimeOrder(candidates, {}, better=missing)
    usual = candidates.names
    if not _is_there(candidates, usual[0]):
        usual = tuple(sorted(usual, key=lambda name: not _is_there(candidates, name)))
    seconds = _known_seconds(candidates, usual, asked)
    first, would_be = usual[0], ""
    for other in usual[1:]:
        if not _beats(candidates, other, first, seconds):
            continue
        if _is_there(candidates, first) and not _is_there(candidates, other):
            would_be = _conversion(other, first, seconds)
        else:
            first = other
    names = (first, *(name for name in usual if name != first))
    order = replace(candidates, names=names)
    known = {name: seconds[name] for name in names if name in seconds}
    return RuntimeOrder(order, known, _reason(order, known), would_be or missing)


def _is_there(candidates: RuntimeCandidates, name: str) -> bool:
    """Says whether nothing has to be converted for it; False where its library cannot be loaded,
    which it is asked about in its turn."""
    with suppress(MissingDependencyError):
        return candidates.resolution(name).stored.is_there
    return False


def _reads_own(candidates: RuntimeCandidates, name: str) -> bool:
    with suppress(MissingDependencyError):
        return candidates.resolution(name).stored.own is not None
    return False


def _beats(
    candidates: RuntimeCandidates, other: str, than: str, seconds: Mapping[str, float]
) -> bool:
    """Says whether one is known to be so much faster that it is worth a change, and not so much
    that it cannot be."""
    if other not in seconds or than not in seconds:
        return False
    if seconds[than] > _IMPLAUSIBLE * seconds[other] and runtimes.runs_on_processor(other):
        return False
    changes = _reads_own(candidates, than) and not _reads_own(candidates, other)
    return seconds[other] * (_CONVERTED if changes else _MARGIN) < seconds[than]


def _reason(order: RuntimeCandidates, seconds: Mapping[str, float]) -> str:
    first = order.names[0]
    others = [name for name in seconds if name != first]
    why = []
    if _reads_own(order, first):
        why.append("reads the file as it is")
    elif _is_there(order, first):
        why.append("has its conversion")
    if first in seconds and others:
        steps = ", ".join(f"{name} {seconds[name] * 1e3:.1f} ms" for name in others)
        why.append(f"takes {seconds[first] * 1e3:.1f} ms a token here ({steps})")
    return f"{first} {' and '.join(why) or 'is asked first, and converts it'}"


def _conversion(other: str, first: str, seconds: Mapping[str, float]) -> str:
    """Says what a conversion would win, and what it would change."""
    share = seconds[first] / seconds[other] - 1
    return (
        f"{other} would be {share:.0%} faster here than {first} ({seconds[other] * 1e3:.1f} for "
        f"{seconds[first] * 1e3:.1f} ms a token), with weights that are converted: --runtime "
        f"{other} does that once, and `edge-spec doctor --runtime {other}` tells their KL "
        "divergence then"
    )


def missing_reader(source: Source) -> str:
    """Names the runtime that would read the file as it is, where it is not installed; "" where it
    is, or there is no such file. Raises as `Source.path` does."""
    if _READS_FILES in runtimes.installed_runtimes() or not source.path.is_file():
        return ""
    return (
        f"{_READS_FILES}, which reads the file as it is and is usually faster, is not installed: "
        f'pip install "edge-spec[{_READS_FILES}]"'
    )


def _known_seconds(
    candidates: RuntimeCandidates, names: Sequence[str], asked: RuntimeOptions
) -> dict[str, float]:
    """Returns the time of a token, by runtime: of the model itself, else of one of its shapes.
    Empty unless two are known."""
    source, options = candidates.source, candidates.options
    if (options.quantization, options.block_size) != (None, None):
        return {}
    profiles = [each for each in kept_profiles(source) if holds(each[0], asked)]
    costs = [(each.key, each.value) for each in SECONDS.find() if holds(each.key.how, asked)]
    measured = {key.runtime for key, _ in profiles} | {key.how.runtime for key, _ in costs}
    if len(measured & set(names)) < 2:
        return {}  # not worth the time that it takes to read a header
    config = _config(source)
    if config is None:
        return {}
    seconds = {}
    for name in names:
        weights = _weights(candidates.resolution(name))
        found = [
            _token_s(each.costs(TYPICAL_TOKENS))
            for key, each in profiles
            if (key.runtime, key.weights) == (name, weights)
        ]
        found = found or list(_of_shapes(costs, name, weights, config))
        if found:
            seconds[name] = min(found)
    return seconds


def _token_s(costs: RowCosts) -> float:
    """Returns what a token takes with as many draft tokens a round as pay, none where none does."""
    gains = [forecast_speedup([_ACCEPTANCE] * num, costs, 0.0) for num in _DRAFT_TOKENS]
    return costs.at(1) / max(gains)


def _of_shapes(
    costs: Iterable[tuple[RowsKey, Mapping[int, float]]],
    runtime: str,
    weights: str | None,
    config: ModelConfig,
) -> Iterator[float]:
    """Gives what models of these shapes take; before a conversion for the runtime, of weights in
    whatever form it ran."""
    for key, seconds in costs:
        is_same = (key.how.runtime, key.shapes) == (runtime, shapes_of(config))
        if is_same and weights in (None, key.how.weights):
            yield _token_s(costs_of(config, seconds))


def _config(source: Source) -> ModelConfig | None:
    """Returns None for a checkpoint that no exporter of ours knows."""
    if source.path.is_file():
        return source.header.config
    with suppress(UnsupportedModelError):
        return runtimes.open_checkpoint(source.path).config
    return None


def _weights(resolution: Resolution) -> str | None:
    """Names weights as `stored_weights` does; None for a model that has to be converted."""
    stored = resolution.stored
    if not stored.is_there:
        return None
    if resolution.runtime.reads == "gguf":
        is_own = stored.own is not None
        info = resolution.source.header if is_own else runtimes.open_model_info(stored.kept)
        return joined_types(info.weight_types)
    with suppress(EdgeSpecError):
        return read_manifest(stored.own or stored.kept).quantization
    return None
