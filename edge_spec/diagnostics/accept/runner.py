"""Runs the checks one after the other, each in a process of its own, and goes on past failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.diagnostics.accept.checks import CHECKS, Check, run_check
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import (
    CheckRow,
    Mark,
    failed,
    not_measured,
    out_of_time,
    passed,
)
from edge_spec.errors import EdgeSpecError
from edge_spec.fitting.devices import Device
from edge_spec.fitting.memory import format_bytes
from edge_spec.models import runtimes
from edge_spec.models.resolve import resolve_model
from edge_spec.models.source import Source

_LEAST_S = 1.0  # of a check
_LEAST_SHARE = 0.3  # of its time, however long the model takes to load
_MOST_LAST = 0.5  # of all time, for the last one: what others leave is not used up
# A check ends by itself when its time is over; a process that then still runs hangs. It may be in
# the middle of a long pass, and has to import and to load before its time begins to count.
_GRACE_S, _GRACE_SHARE = 30.0, 2.0
_FIRST_OPENING_S = 300.0  # drivers compile their kernels once


class Isolate(Protocol):
    """`edge_spec.core.isolated.isolated`, or what stands in for it."""

    def __call__(self, work: Callable[..., Any], *arguments: str, timeout_s: float) -> Any: ...


@dataclass
class AcceptRun:
    """rows: what was found until now. on_rows: is called after each check, so that what is there
    can be written before the next one takes the machine down."""

    request: AcceptRequest
    seconds: float
    progress: Progress
    on_rows: Callable[[], None]
    isolate: Isolate = isolated
    clock: Callable[[], float] = time.monotonic
    checks: Sequence[Check] = CHECKS
    rows: list[CheckRow] = field(default_factory=list)
    interrupted: bool = False
    _load_s: float = 0.0
    _step_s: float = 0.0  # of the target, one row

    def run(self, devices: Sequence[Device]) -> None:
        """devices: as `edge-spec devices` lists them. An interrupt ends it with what there is."""
        end = self.clock() + self.seconds
        try:
            self._add(list(check_devices(self.request, devices)))
            for check in self.checks:
                self.progress(check.title, 0.0)
                self._add(self._checked(check, end - self.clock()))
                self.progress(check.title, 1.0)
        except KeyboardInterrupt:
            self.interrupted = True
            done = {row.check for row in self.rows}
            left = [check.name for check in self.checks if check.name not in done]
            self._add([not_measured("interrupted", "it was not reached").of(each) for each in left])

    def _add(self, rows: Sequence[CheckRow]) -> None:
        self.rows += rows
        self.on_rows()

    def _checked(self, check: Check, left_s: float) -> list[CheckRow]:
        refusal = self._refusal(check) or self._out_of_time(check, left_s)
        if refusal is not None:
            return [refusal.of(check.name)]
        began = self.clock()
        rows = self._isolated(check, self._budget_s(check, left_s))
        taken_s = self.clock() - began
        if check.name == "target" and rows[0].mark is Mark.PASSED:
            self._load_s = taken_s
            self._step_s = rows[0].numbers.get("step_ms", 0.0) / 1e3
        return [row.of(check.name, taken_s) for row in rows]

    def _refusal(self, check: Check) -> CheckRow | None:
        if check.of_pair and self.request.draft is None:
            return not_measured("not tried", "no --draft was given")
        for needed in check.needs:
            if needed not in self._opened:
                return not_measured("not tried", f"the {needed} did not open")
        return None

    def _out_of_time(self, check: Check, left_s: float) -> CheckRow | None:
        if check.needs and left_s < _LEAST_S + self._load_s:
            return out_of_time("not tried", "no time was left for it")
        least_s = check.steps * self._step_s
        if least_s > self._budget_s(check, left_s) * _GRACE_SHARE:
            found = f"it would take {least_s:.0f} s or more: give more --minutes"
            return out_of_time("not tried", found)
        return None

    @property
    def _opened(self) -> set[str]:
        return {row.check for row in self.rows if row.mark is Mark.PASSED}

    def _budget_s(self, check: Check, left_s: float) -> float:
        """What is left of a check's share once the model is loaded."""
        share = check.share * self.seconds
        if check is self.checks[-1]:
            share = min(left_s, _MOST_LAST * self.seconds)
        return max(_LEAST_S, _LEAST_SHARE * share, share - self._load_s)

    def _isolated(self, check: Check, budget_s: float) -> list[CheckRow]:
        least_s = budget_s + self._load_s + check.steps * self._step_s
        timeout_s = _GRACE_S + _GRACE_SHARE * least_s
        if not check.needs:
            timeout_s = max(timeout_s, _FIRST_OPENING_S)
        request = self.request
        if not check.of_pair and "draft" not in self._opened:
            request = replace(request, draft=None)
        arguments = (check.name, request.to_json(), f"{budget_s:.3f}")
        try:
            found = self.isolate(run_check, *arguments, timeout_s=round(timeout_s))
        except IsolatedError as error:
            return [failed("process", str(error))]
        return [CheckRow.from_dict(row) for row in found]


def with_runtime(request: AcceptRequest, devices: Sequence[Device]) -> AcceptRequest:
    """The request with its runtime named: of "auto" the first that has the device and works there,
    else the first that has it, else the usual one; and whether it tells the device's memory."""
    if request.runtime == "auto":
        order = [name for name, _ in runtimes.AUTO_RUNTIMES]
        having = [each for each in devices if each.name == _first_device(request)]
        having.sort(key=lambda each: (each.fault is not None, _rank(order, each.runtime)))
        known = [each for each in having if each.runtime in order] or having
        chosen = known[0].runtime if known else runtimes.auto_runtime(request.source.formats)
        request = replace(request, runtime=chosen)
    told = [each for each in devices if _is_asked(request, each) and each.free_bytes is not None]
    return replace(request, told_memory=bool(told) and not request.is_cpu)


def prepare(request: AcceptRequest, progress: Progress) -> None:
    """Converts the models that no runtime reads as they are: here, where it can be told how far
    that is. What keeps one from it is found, and told, by the check that opens it."""
    with suppress(EdgeSpecError):
        options = request.options(drafts=True)
        source = Source(request.model, progress)
        resolve_model(source, options.runtime, options, progress, options.providers)
        if request.draft is not None:
            source = Source(request.draft, progress)
            resolve_model(source, options.draft_runtime, options, progress, options.draft_providers)


def _rank(order: Sequence[str], runtime: str) -> int:
    return order.index(runtime) if runtime in order else len(order)


def _first_device(request: AcceptRequest) -> str:
    return request.device.split(",")[0].strip().lower()


def _is_asked(request: AcceptRequest, device: Device) -> bool:
    names = {name.strip().lower() for name in request.device.split(",")}
    return device.runtime == request.runtime and device.name in names


def check_devices(request: AcceptRequest, devices: Sequence[Device]) -> Iterator[CheckRow]:
    """What the runtimes say of the devices that were asked for. A name that is not listed may be
    one all the same, such as "gpu"; opening will tell."""
    asked = [(request.runtime, name.strip().lower()) for name in request.device.split(",")]
    if request.draft_device is not None:
        names = request.draft_device.split(",")
        asked += [(request.draft_runtime, name.strip().lower()) for name in names]
    for runtime, name in dict.fromkeys(asked):
        found = [
            each for each in devices if each.name == name and runtime in (each.runtime, "auto")
        ]
        working = next((each for each in found if each.fault is None), None)
        row = f"{runtime} {name}"
        if working is not None:
            yield passed(row, _described(working)).of("devices")
        elif found:
            yield failed(row, f"{found[0].description}: {found[0].fault}").of("devices")
        else:
            yield not_measured(row, _unlisted(runtime, devices)).of("devices")


def _described(device: Device) -> str:
    if device.free_bytes is None or device.total_bytes is None:
        return f"{device.description}, its memory is not told"
    free, total = map(format_bytes, (device.free_bytes, device.total_bytes))
    return f"{device.description}, {free} free of {total}"


def _unlisted(runtime: str, devices: Sequence[Device]) -> str:
    of_runtime = [each for each in devices if each.runtime == runtime]
    broken = next((each.fault for each in of_runtime if each.name is None and each.fault), None)
    names = ", ".join(each.name for each in of_runtime if each.name) or "none"
    return f"not listed by {runtime}: {broken or f'it lists {names}'}"
