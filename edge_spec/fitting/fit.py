"""Says before weights are read whether models fit this machine, and what of them would."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from typing import Any

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceMemoryError
from edge_spec.fitting.devices import CPU, DeviceListing
from edge_spec.fitting.forecast import Forecast, forecast
from edge_spec.fitting.memory import (
    PLANNED_TOKENS,
    SizingQuantizations,
    format_bytes,
    free_bytes,
    total_bytes,
)
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.option import declared_options
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolve import ResolvedModel

SWITCH = "EDGE_SPEC_MEMORY"  # an environment variable; "ignore" opens what does not fit
_OVERRIDE = f"{SWITCH}=ignore in the environment opens it all the same."
_LEAST_BITS = 4  # of a weight, as exporters write models that have to be converted
_TIGHT = 0.9  # of all memory, from which on a user is warned
_LEAST_TOKENS = 512  # of a context that is worth being offered
_STEP_TOKENS = 256
_KV_TYPES = ("q8_0", "q4_0")

_log = logging.getLogger(__name__)


def require_fit(
    target: ResolvedModel,
    drafts: Sequence[ResolvedModel],
    options: LoadOptions,
    makes_room: bool = False,
) -> None:
    """Compares what the models need with all the memory of this machine or container, not only with
    what is free. A context that was not asked for counts with PLANNED_TOKENS: a cache grows with
    its text. Where that is nearly all, one line warns.

    What they need of a device's own memory is compared with what is free there, since nothing of it
    can be dropped or swapped. makes_room: other models of this process may be closed first; then
    with all that the device has.

    Raises DeviceMemoryError, which names what would fit. Nothing is said where a runtime or the
    system does not tell.
    """
    if _is_ignored():
        return
    limit, num_tokens = total_bytes(), _counted_tokens(target, options)
    found = forecast(target, drafts, options, num_tokens)
    if found is None:
        return
    shortage_of = attrgetter("device_excess" if makes_room else "device_shortage")
    if shortage_of(found) is not None:
        fitting = what_fits(
            target, drafts, options, num_tokens, lambda other: shortage_of(other) is None
        )
        raise DeviceMemoryError(
            f"{_names(found)} with {num_tokens} tokens of context needs {shortage_of(found)}",
            remedy="Choose another --device, or fewer --gpu-layers where the runtime has them. "
            f"{fitting} {_OVERRIDE}",
        )
    is_tight = limit is not None and found.needed > _TIGHT * limit
    if limit is None or not is_tight or not _is_counted(found, target, drafts, options):
        return
    if found.needed > limit:
        fitting = what_fits(
            target, drafts, options, num_tokens, lambda other: other.needed <= limit
        )
        raise DeviceMemoryError(
            f"{_need_of(found, num_tokens)}, and there are {format_bytes(limit)}",
            remedy=f"{fitting} {_OVERRIDE}",
        )
    _log.warning(
        "%s, nearly all of %s: the system may swap, or stop the program",
        _need_of(found, num_tokens),
        format_bytes(limit),
    )


def forecast_here(
    target: ResolvedModel, drafts: Sequence[ResolvedModel], options: LoadOptions
) -> Forecast | None:
    """Returns what models need, as `require_fit` counts it; None where that says nothing."""
    if total_bytes() is None or _is_ignored():
        return None
    found = forecast(target, drafts, options, _counted_tokens(target, options))
    return found if found is not None and _is_counted(found, target, drafts, options) else None


def fit_together(forecasts: Sequence[Forecast]) -> bool:
    """Says whether models that are open at the same time fit all the memory of this machine or
    container. True also where the system does not tell."""
    limit = total_bytes()
    together = Forecast(tuple(chain.from_iterable(each.models for each in forecasts)), None)
    return limit is None or together.needed <= limit


def fits_free_memory(found: Forecast) -> bool:
    """Says whether models fit what is free now, beside all that runs on this machine. True also
    where the system does not tell."""
    return replace(found, free=free_bytes()).fits


def _counted_tokens(target: ResolvedModel, options: LoadOptions) -> int:
    return min(target.config.context_length, options.context_length or PLANNED_TOKENS)


def _need_of(found: Forecast, num_tokens: int) -> str:
    return f"{_names(found)} with {num_tokens} tokens of context needs {format_bytes(found.needed)}"


def _names(found: Forecast) -> str:
    return " and ".join(f"{each.name} on {each.runtime}" for each in found.models)


def _is_counted(
    found: Forecast,
    target: ResolvedModel,
    drafts: Sequence[ResolvedModel],
    options: LoadOptions,
) -> bool:
    """Says whether all weights are in the memory of the processor, but for those that a runtime
    places on devices."""
    how = [options.runtime_options, *(options.draft_runtime_options for _ in drafts)]
    return all(
        bool(each.memory.on_devices) or _on_processor(model, options)
        for each, model, options in zip(found.models, (target, *drafts), how, strict=True)
    )


def _on_processor(model: ResolvedModel, options: RuntimeOptions) -> bool:
    named = {name.lower() for name in options.providers}
    if named or options.gpu_layers == 0 or options.prefers_cpu:
        return named <= {CPU}
    if options.gpu_layers or options.rpc_servers or not isinstance(model.runtime, DeviceListing):
        return not (options.gpu_layers or options.rpc_servers)
    listed = model.runtime.devices(options)
    return all(device.kind == CPU for device in listed if device.fault is None)


def what_fits(
    target: ResolvedModel,
    drafts: Sequence[ResolvedModel],
    options: LoadOptions,
    num_tokens: int,
    fits: Callable[[Forecast], bool],
) -> str:
    """Returns a remedy: what would fit with that context, each as the runtimes forecast it."""
    fitting: list[str] = []

    def of(changed: LoadOptions, tokens: int, used: Sequence[ResolvedModel] = drafts) -> Forecast:
        found = forecast(target, used, changed, tokens)
        assert found is not None  # as it was for these models before
        return found

    context = _longest(
        lambda tokens: fits(of(replace(options, context_length=tokens), tokens)), num_tokens
    )
    if context is not None:
        found = of(replace(options, context_length=context), context)
        fitting.append(f"--context {context} ({_size(found)})")
    if target.runtime.name in declared_options(AskedOptions)["kv_type"].option.runtimes:
        for name in _KV_TYPES:
            found = of(replace(options, kv_type=name), num_tokens)
            if fits(found) and options.kv_type not in _KV_TYPES:
                fitting.append(f"--kv-type {name} ({_size(found)})")
                break
    smaller = None
    if isinstance(target.runtime, SizingQuantizations):
        how = options.runtime_options
        smaller = target.runtime.smaller_memory(target.source, how, num_tokens)
    if smaller is not None:
        found = of(options, num_tokens)
        first = replace(found.models[0], memory=smaller[1])
        found = replace(found, models=(first, *found.models[1:]))
        if fits(found):
            command = f"edge-spec export MODEL OUT --format gguf --quant {smaller[0]}"
            fitting.append(f"the same model by {command} ({_size(found)})")
    if drafts:
        found = of(options, num_tokens, ())
        if fits(found):
            fitting.append(f"--draft none ({_size(found)})")
    return f"What fits: {'; '.join(fitting)}." if fitting else "Use a smaller model."


def _size(found: Forecast) -> str:
    """All that it needs, wherever."""
    return format_bytes(found.needed + sum(found.needs.on_devices.values()))


def require_room_to_convert(model: Any) -> None:
    """Refuses before a conversion what its result could not run from, which has _LEAST_BITS a
    weight. model: as an exporter reads it; the shape of some is not known before.

    Raises DeviceMemoryError.
    """
    limit, config = total_bytes(), getattr(model, "config", None)
    if limit is None or not isinstance(config, ModelConfig) or _is_ignored():
        return
    needed = config.num_parameters * _LEAST_BITS // 8
    if needed > limit:
        raise DeviceMemoryError(
            f"the {config.num_parameters / 1e9:.1f} billion weights of {model.path} need "
            f"{format_bytes(needed)} with {_LEAST_BITS} bits each, and there are "
            f"{format_bytes(limit)}",
            remedy=f"Use a smaller model. {_OVERRIDE}",
        )


def _is_ignored() -> bool:
    return os.environ.get(SWITCH) == "ignore"


def _longest(fits: Callable[[int], bool], most: int) -> int | None:
    """Returns the longest context below `most` that fits, in steps of _STEP_TOKENS; None where not
    even _LEAST_TOKENS do."""
    low, high = _LEAST_TOKENS // _STEP_TOKENS, (most - 1) // _STEP_TOKENS
    if high < low or not fits(low * _STEP_TOKENS):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * _STEP_TOKENS) else (low, middle - 1)
    return low * _STEP_TOKENS
