"""Measures installed runtimes for a model while its engine has nothing to do, so that the next
start knows which of them is the fastest and what its passes take.

Each runtime is measured in a process of its own, which gives way to all others, ends as soon as an
answer begins, and begins again once it is quiet. Nothing is converted, nothing is opened where
memory is short, and a machine that is busy or runs on its battery is left alone.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from edge_spec.core.isolated import IsolatedError, Lifeline, isolated
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import EdgeSpecError
from edge_spec.fitting.devices import processor
from edge_spec.fitting.memory import free_bytes
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.models.resolution import resolution_on
from edge_spec.models.source import Source
from edge_spec.placement.candidates import candidate_of, description
from edge_spec.placement.idle_process import QUIET_S, IdleProcess, give_way, is_idle
from edge_spec.placement.pinning import is_open
from edge_spec.placement.place_work import measure_place
from edge_spec.placement.profile import kept_profiles
from edge_spec.placement.row_findings import holds

SWITCH = "EDGE_SPEC_IDLE_PLAN"  # an environment variable; "0" turns it off
_MOST_S = 600.0  # that it may take in all
_PASSES_S = 15.0  # that the passes of one runtime may take
_ROOM = 3  # times a model's files, that has to be free for other runtimes' copies of it
_NICE = 5

_log = logging.getLogger(__name__)


def measure_when_idle(
    source: Source,
    options: LoadOptions,
    runtime: str,
    may_begin: Callable[[], bool] = is_idle,
    quiet_s: float = QUIET_S,
) -> IdleProcess | None:
    """Starts measuring; returns None where all is known, or a second copy of the model would not
    fit. runtime: that the engine has, the only one to measure where it was asked for."""
    if os.environ.get(SWITCH) == "0" or (options.quantization, options.block_size) != (None, None):
        return None
    free = free_bytes()
    if free is not None and free < _ROOM * source.num_bytes:
        return None
    names = unmeasured(source, options, runtime)
    if not names:
        return None
    work = partial(_measure_each, source.model, names, options.runtime_options)
    process = IdleProcess(work, may_begin, quiet_s, _MOST_S)
    process.start()
    return process


def unmeasured(source: Source, options: LoadOptions, runtime: str) -> list[str]:
    """Names the runtimes that read the model as it is stored here, and have no profile of it."""
    names = runtimes.installed_runtimes() if is_open(options) else []
    known = {key.runtime for key, _ in kept_profiles(source) if holds(key, options.runtime_options)}
    found = []
    for name in dict.fromkeys((runtime, *names)):
        with suppress(EdgeSpecError):
            if name not in known and resolution_on(source, name, options).stored.is_there:
                found.append(name)
    return found


def _measure_each(
    model: str, names: Sequence[str], options: RuntimeOptions, lifeline: Lifeline
) -> None:
    """Raises IsolatedError where an answer has begun; a runtime that fails is passed over."""
    for name in names:
        place = json.dumps(description(model, processor(name), options))
        try:
            isolated(measure_described, place, timeout_s=_MOST_S, lifeline=lifeline)
        except IsolatedError as error:
            if lifeline.has_ended:
                raise
            _log.info("%s was not measured with %s while idle: %s", model, name, error)


def measure_described(place: str) -> None:
    """Measures in the other process, and keeps what it finds. Raises an EdgeSpecError, OSError."""
    give_way(_NICE)
    measure_place(candidate_of(json.loads(place)), _PASSES_S, lambda fraction: None)
