"""Holds what the target takes against its forecast, and makes memory run out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.model import Model, Session
from edge_spec.core.session_errors import translate_errors
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.device_check.request import DeviceCheckRequest
from edge_spec.diagnostics.device_check.sessions import ELSEWHERE
from edge_spec.diagnostics.doctor.finding import Finding, fault, judged, note, of_error
from edge_spec.errors import DeviceMemoryError
from edge_spec.fitting.memory import (
    Memory,
    Sizing,
    format_bytes,
    free_bytes,
    resident_bytes,
    total_bytes,
)
from edge_spec.models.resolve import ResolvedModel

TEXT_TOKENS = 2048  # that the cache is filled with, where the context has room
_CHUNK_TOKENS, _WIDE_ROWS = 128, 16
# What is really taken may exceed the forecast by a quarter and an allocator's arenas; a forecast
# that is too low by half does not pass for anything larger than those.
_MOST_OVER, _SLACK_BYTES = 1.25, 32_000_000

_STATM = Path("/proc/self/statm")
# Of address space beyond what is in use, on a processor, and of what the cache of a whole context
# takes, which cannot be had then. Libraries need some for their own, and may end at once without.
_LEAST_ROOM_BYTES, _MOST_ROOM_BYTES = 64 * 2**20, 200 * 2**20
_ROOM_SHARE = 2 / 3
_MOST_CACHES = 64  # of a device, before it is given up to fill it
_LONG_TOKENS = 4096  # of each of them, at most
_KEPT_FREE = 0.15  # of main memory: a device that takes it must not take all


def check_memory(request: DeviceCheckRequest) -> Iterator[Finding]:
    """Measures in a process of its own: what was open before would be counted otherwise."""
    options = request.options()
    resolved = request.resolved(options)
    devices, before = request.free_on_devices(), resident_bytes()
    with closing(resolved.open(options.runtime_options)) as model:
        tokens = _fill(model)
        after, devices_after = resident_bytes(), request.free_on_devices()
    forecast = _forecast(resolved, options.runtime_options, tokens)
    resident = None if before is None or after is None else max(0, after - before)
    total = None if forecast is None else forecast.total
    yield judge_taken("main memory", resident, total, tokens)
    for device, free in devices.items():
        expected = None if forecast is None else forecast.on_devices.get(device)
        taken = max(0, free - devices_after.get(device, free))
        yield judge_taken(f"memory of {device}", taken, expected, tokens)


def _forecast(resolved: ResolvedModel, options: object, tokens: int | None) -> Memory | None:
    """Returns what the runtime forecasts. tokens: of the text; None: a whole context."""
    runtime = resolved.runtime
    if not isinstance(runtime, Sizing):
        return None
    return runtime.memory(resolved.source, options, tokens)  # type: ignore[arg-type]


def _fill(model: Model) -> int:
    """Returns the tokens that a session came to hold."""
    limit = model.config.context_length
    wanted = min(TEXT_TOKENS, limit - _WIDE_ROWS) if limit > 2 * _WIDE_ROWS else limit // 2
    rows = min(_WIDE_ROWS, model.capabilities.max_rows, max(1, limit - wanted))
    with closing(model.open_session()) as session:
        while session.length < wanted:
            session.prefill([0] * min(_CHUNK_TOKENS, wanted - session.length))
            session.forward(TokenTree.chain(0, [0] * (rows - 1)))
        return session.length


def judge_taken(what: str, taken: int | None, forecast: int | None, tokens: int) -> Finding:
    """taken, forecast: bytes; None where they are not known."""
    if taken is None:
        return note("memory", f"{what}: the system does not say what is taken")
    found = f"{what}: {format_bytes(taken)} taken with {tokens} tokens"
    numbers: dict[str, Any] = {"taken_bytes": taken, "tokens": tokens}
    if forecast is None:
        return note("memory", f"{found}; the runtime forecasts nothing", "", **numbers)
    return judged(
        "memory",
        taken <= _MOST_OVER * forecast + _SLACK_BYTES,
        f"{found}, the forecast is {format_bytes(forecast)}",
        "The forecast is too low: what it says to fit may not. Report it.",
        forecast_bytes=forecast,
        **numbers,
    )


def check_out_of_memory(request: DeviceCheckRequest) -> Iterator[Finding]:
    """Runs in a process of its own, whose address space is limited, or on whose device caches are
    opened until no more fit: the error has to be ours, and the session that is open usable."""
    check = "out of memory"
    with request.opened() as model, closing(model.open_session()) as session:
        session.prefill([0] * min(4, model.config.context_length // 2))
        before = _scores(session)
        try:
            if request.is_cpu:
                tried = _fill_process(request, session, model.config.context_length)
            else:
                tried = _fill_device(model)
        except DeviceMemoryError as error:
            usable = bool(np.array_equal(_scores(session), before))
            state = "" if usable else "the session that was open scores otherwise afterwards; "
            yield judged(check, usable, f"{state}told in one line: {error.shown}", ELSEWHERE)
        except Exception as error:  # whatever a library raises in the place of ours
            found = f"not told as what it is, but as {of_error(error)}"
            yield fault(check, found, ELSEWHERE)
        else:
            yield note(check, tried)


def _scores(session: Session) -> np.ndarray:
    return session.forward(TokenTree.chain(0)).logits.copy()


def _fill_process(request: DeviceCheckRequest, session: Session, limit: int) -> str:
    """Reads text whose cache does not fit the process. Returns why nothing ran out."""
    if sys.platform != "linux" or not _STATM.exists():
        return "the system cannot limit the address space of a process"
    options = request.options()
    forecast = _forecast(request.resolved(options), options.runtime_options, None)
    needed = 0 if forecast is None else forecast.cache
    room = min(_MOST_ROOM_BYTES, int(_ROOM_SHARE * needed))
    if room < _LEAST_ROOM_BYTES:
        return "the cache of a whole context is too small, or not told, to run out of memory by it"
    import resource

    used = int(_STATM.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room, hard))
    start = session.length
    try:
        with translate_errors:  # as the engine does
            session.prefill([0] * (limit - start))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        session.rollback(start)
    return f"{format_bytes(room)} held the cache of {limit} tokens"


def _fill_device(model: Model) -> str:
    """Opens caches until no more fit. Returns why nothing ran out."""
    limit, total = model.config.context_length, total_bytes()
    with ExitStack() as opened:
        for count in range(_MOST_CACHES):
            free = free_bytes()
            if free is not None and total is not None and free < _KEPT_FREE * total:
                return f"{count} caches took main memory, which is left to others"
            with translate_errors:
                session = model.open_session()
                opened.callback(session.close)
                session.prefill([0] * min(_LONG_TOKENS, limit - 1))
    return f"{_MOST_CACHES} caches of {limit} tokens fit"
