"""Memory that is made to run out: the error has to be ours, one line, and the session usable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from edge_spec.core.model import Model, Session
from edge_spec.core.session_errors import translate_errors
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, failed, judged, not_measured
from edge_spec.errors import DeviceMemoryError
from edge_spec.fitting.memory import Sizing, format_bytes, free_bytes, total_bytes

_STATM = Path("/proc/self/statm")
_NAME = "too little memory"
# Of address space beyond what is in use, on a processor, and of what the cache of a whole context
# takes, which cannot be had then. Libraries need some for their own, and may end at once without.
_LEAST_ROOM_BYTES, _MOST_ROOM_BYTES = 64 * 2**20, 200 * 2**20
_ROOM_SHARE = 2 / 3
_CHUNK_TOKENS = 4096
_MOST_CACHES = 256  # of a device, before it is given up to fill it
_KEPT_FREE = 0.15  # of main memory: a device that takes it must not take all


def check_out_of_memory(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    """In a process of its own, whose address space is limited, or on whose device caches are
    opened until no more fit."""
    with request.opened() as model:
        session = model.open_session()
        session.prefill([0] * min(4, model.config.context_length // 2))
        before = _scores(session)
        try:
            if request.is_cpu:
                tried = _fill_process(request, session, model.config.context_length)
            else:
                tried = _fill_device(model, deadline)
        except DeviceMemoryError as error:
            usable = bool(np.array_equal(_scores(session), before))
            found = f"told in one line: {error.shown}"
            if not usable:
                found = f"the session that was open scores otherwise afterwards; {found}"
            yield judged(_NAME, usable, found, message=error.shown)
        except Exception as error:
            yield failed(_NAME, f"not told as what it is, but as {type(error).__name__}: {error}")
        else:
            yield not_measured(_NAME, tried)


def _scores(session: Session) -> np.ndarray:
    return session.forward(TokenTree.chain(0)).logits.copy()


def _fill_process(request: AcceptRequest, session: Session, limit: int) -> str:
    """Reads text whose cache does not fit the process. Returns why nothing ran out."""
    if sys.platform != "linux" or not _STATM.exists():
        return "the system cannot limit the address space of a process"
    needed = _cache_bytes(request)
    room = min(_MOST_ROOM_BYTES, int(_ROOM_SHARE * (needed or 0)))
    if needed is None or room < _LEAST_ROOM_BYTES:
        told = "is not told" if needed is None else f"takes {format_bytes(needed)}"
        return f"the cache of a whole context {told}: too little to run out of memory by it"
    import resource

    page = resource.getpagesize()
    used = int(_STATM.read_text(encoding="ascii").split()[0]) * page
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


def _cache_bytes(request: AcceptRequest) -> int | None:
    """Of a whole context, as it is forecast."""
    options = request.options()
    resolved = request.resolved(options)
    if not isinstance(resolved.runtime, Sizing):
        return None
    return resolved.runtime.memory(resolved.source, options.runtime_options).cache


def _fill_device(model: Model, deadline: Deadline) -> str:
    """Opens caches until no more fit. Returns why nothing ran out."""
    limit, total = model.config.context_length, total_bytes()
    with ExitStack() as opened:
        for count in range(_MOST_CACHES):
            free = free_bytes()
            if free is not None and total is not None and free < _KEPT_FREE * total:
                return f"{count} caches took main memory, which is left to others"
            if deadline.left_s <= 0:
                return f"{count} caches of {limit} tokens fit, and there was no time for more"
            with translate_errors:
                session = model.open_session()
                opened.callback(session.close)
                session.prefill([0] * min(_CHUNK_TOKENS, limit - 1))
    return f"{_MOST_CACHES} caches of {limit} tokens fit"
