"""What the target takes, against its forecast, and how its cache grows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing

from edge_spec.core.model import Model
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline, OutOfTimeError, TimedModel
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, judged, not_measured, passed
from edge_spec.fitting.memory import Memory, Sizing, format_bytes, resident_bytes

_TOKENS = 2048  # of text that the cache is filled with, as far as context and time allow
_CHUNK_TOKENS = 128
_WIDE_ROWS = 16
# What is really taken may exceed the forecast by a quarter and an allocator's arenas; a forecast
# that is too low by half does not pass for anything larger than those.
_MOST_OVER, _SLACK_BYTES = 1.25, 32_000_000


def check_memory(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """In a process of its own: what was open before would be counted otherwise."""
    options = request.options()
    resolved = request.resolved(options)
    devices, before = request.device_memory(), resident_bytes()
    model = resolved.open(options.runtime_options)
    with closing(model):
        tokens, opened, devices_opened = _fill(request, model, deadline)
        after, devices_after = resident_bytes(), request.device_memory()
    runtime = resolved.runtime
    told = runtime.memory if isinstance(runtime, Sizing) else None
    full = None if told is None else told(resolved.source, options.runtime_options, tokens)
    least = None if told is None else told(resolved.source, options.runtime_options, 1)
    yield judge_resident(before, after, full, tokens)
    yield judge_growth(opened, after, full, least, tokens)
    yield from judge_devices(devices, devices_after, full, tokens)
    if devices and devices_opened:
        grown = sum(devices_opened.values()) - sum(devices_after.values())
        found = f"{tokens} tokens took {format_bytes(max(0, grown))} more of the devices' memory"
        yield passed("cache on devices", found, grown_bytes=grown, tokens=tokens)


def _fill(
    request: AcceptRequest, model: Model, deadline: Deadline
) -> tuple[int, int | None, Mapping[str, int]]:
    """Tokens that a session came to hold, and what was resident, and free on devices, once it was
    open with a few of them and all buffers of passes bound."""
    limit = model.config.context_length
    wanted = min(_TOKENS, limit - _WIDE_ROWS) if limit > 2 * _WIDE_ROWS else limit // 2
    rows = min(_WIDE_ROWS, model.capabilities.max_rows, max(1, limit - wanted))
    session = TimedModel(model, deadline).open_session()
    opened: int | None = None
    free: Mapping[str, int] = {}
    try:
        while session.length < wanted:
            session.prefill([0] * min(_CHUNK_TOKENS, wanted - session.length))
            session.forward(TokenTree.chain(0, [0] * (rows - 1)))
            if opened is None:
                opened, free = resident_bytes(), request.device_memory()
    except OutOfTimeError:
        pass  # so many tokens are what there was time for
    return session.length, opened, free


def judge_resident(
    before: int | None, after: int | None, forecast: Memory | None, tokens: int
) -> CheckRow:
    """before, after: resident bytes of the process, without the model and with it."""
    name = "forecast and real"
    if before is None or after is None:
        return not_measured(name, "the system does not say what is resident")
    real = max(0, after - before)
    found = f"{format_bytes(real)} more are resident with {tokens} tokens"
    if forecast is None:
        return not_measured(name, f"{found}; the runtime forecasts nothing", resident_bytes=real)
    return judged(
        name,
        real <= most_bytes(forecast.total),
        f"{found}, the forecast is {format_bytes(forecast.total)}",
        resident_bytes=real,
        forecast_bytes=forecast.total,
        weights_bytes=forecast.weights,
        cache_bytes=forecast.cache,
        work_bytes=forecast.work,
        library_bytes=forecast.library,
        tokens=tokens,
    )


def judge_growth(
    opened: int | None,
    after: int | None,
    full: Memory | None,
    least: Memory | None,
    tokens: int,
) -> CheckRow:
    """opened, after: resident bytes with the first tokens and with the last. full, least: forecasts
    with as many and with one."""
    name = "growth of the cache"
    if opened is None or after is None:
        return not_measured(name, "the system does not say what is resident, or no time was left")
    grown = max(0, after - opened)
    found = f"{format_bytes(grown)} from the first {_CHUNK_TOKENS} tokens to {tokens}"
    if full is None or least is None:
        return not_measured(name, f"{found}; the runtime forecasts nothing", grown_bytes=grown)
    expected = max(0, full.total - least.total)
    return judged(
        name,
        grown <= most_bytes(expected),
        f"{found}, the forecast is {format_bytes(expected)} at most",
        grown_bytes=grown,
        forecast_bytes=expected,
        tokens=tokens,
    )


def judge_devices(
    before: Mapping[str, int], after: Mapping[str, int], forecast: Memory | None, tokens: int
) -> Iterator[CheckRow]:
    """before, after: free bytes by device; empty where they are not told."""
    if not before:
        yield not_measured("device memory", "not told, or the model is in main memory")
    for device, free in before.items():
        name, taken = f"memory of {device}", max(0, free - after.get(device, free))
        found = f"{format_bytes(taken)} taken with {tokens} tokens, {format_bytes(free)} were free"
        told = None if forecast is None else forecast.on_devices.get(device)
        numbers = {"taken_bytes": taken, "free_before_bytes": free, "tokens": tokens}
        if told is None:
            yield not_measured(name, f"{found}; the runtime forecasts nothing for it", **numbers)
            continue
        yield judged(
            name,
            taken <= most_bytes(told),
            f"{found}, the forecast is {format_bytes(told)}",
            forecast_bytes=told,
            **numbers,
        )


def most_bytes(forecast: int) -> float:
    return _MOST_OVER * forecast + _SLACK_BYTES
