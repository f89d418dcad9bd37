"""Forecasts what the models will take, and says whether that is free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from edge_spec.diagnostics.doctor.chosen import Chosen
from edge_spec.diagnostics.doctor.finding import Finding, fault, note, ok, warning
from edge_spec.fitting.fit import what_fits
from edge_spec.fitting.forecast import ModelMemory, forecast
from edge_spec.fitting.memory import PLANNED_TOKENS, format_bytes

_SMALLER = "a smaller quantization or no --draft"


def check_memory(chosen: Chosen, numbers: dict[str, object]) -> Iterator[Finding]:
    """Checks the memory with a full context; where that does not fit, with PLANNED_TOKENS of
    text."""
    if not chosen.is_converted:
        missing = " and ".join(each.role for each in chosen.openings if each.prepared is None)
        yield note(
            "forecast",
            f"not known: the {missing} is converted for {chosen.openings[0].runtime} first",
            f"Start it once, or run {chosen.plan_command}.",
        )
        return
    target, *drafts = chosen.prepared
    tokens = chosen.context_length
    full = forecast(target, drafts, chosen.options, tokens)
    if full is None:
        yield note("forecast", f"{target.runtime.name} does not tell what its models take")
        return
    numbers["memory"] = {
        "context_tokens": tokens,
        "models": [asdict(each) for each in full.models],
        "total_bytes": full.total,
        "free_bytes": full.free,
        "fits": full.fits,
    }
    for each in full.models:
        yield ok(each.role, _parts(each))
    free = "what is free is not known" if full.free is None else f"{format_bytes(full.free)} free"
    together = f"{format_bytes(full.total)} with {tokens} tokens of text, {free}"
    if full.device_shortage is not None:
        together = f"{together}, {full.device_shortage}"
    few = min(tokens, PLANNED_TOKENS)
    short = forecast(target, drafts, chosen.options, few)
    if full.fits:
        yield ok("together", together)
    elif short is not None and short.fits:
        yield warning(
            "together",
            f"{together}: it fits with {few} tokens, {format_bytes(short.total)}",
            f"Give --context {few}, {_SMALLER}.",
        )
    else:
        remedy = what_fits(target, drafts, chosen.options, few, lambda found: found.fits)
        yield fault("together", f"{together}: it does not fit", f"Free memory. {remedy}")


def _parts(each: ModelMemory) -> str:
    memory = each.memory
    sizes = (memory.weights, memory.cache, memory.work + memory.library)
    weights, cache, rest = map(format_bytes, sizes)
    return f"{each.runtime}: {weights} weights, {cache} cache, {rest} beside"
