"""All checks in the order in which they are made, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Progress
from edge_spec.diagnostics.device_check.memory import check_memory, check_out_of_memory
from edge_spec.diagnostics.device_check.request import DeviceCheckRequest
from edge_spec.diagnostics.device_check.sessions import (
    ELSEWHERE,
    check_branches,
    check_chains,
    check_opening,
    check_passes,
)
from edge_spec.diagnostics.device_check.soak import check_soak
from edge_spec.diagnostics.doctor.finding import Finding, Severity, fault, judged, note, of_error
from edge_spec.diagnostics.lossless_check.lossless_report import checks, document
from edge_spec.diagnostics.lossless_check.prove import Extent, prove
from edge_spec.errors import EdgeSpecError
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_EXTENT = Extent(num_prompts=4, max_tokens=32, num_draws=0, num_runs=2)
# A check takes minutes at most; a process that then still runs hangs. A slow model may take as
# long as _MOST_STEPS of its steps.
_TIMEOUT_S, _MOST_STEPS = 600.0, 5000
OPENING = "opens"


def check_lossless(request: DeviceCheckRequest, extent: Extent = _EXTENT) -> Iterator[Finding]:
    """Runs a short `edge-spec verify`."""
    prompts = sorted(read_prompts(OWN_PROMPTS), key=lambda each: len(each.text))
    with request.engine() as engine:
        proof = prove(engine, prompts, extent, lambda what, fraction: None)
    report = document(proof, ",".join(sorted(request.devices)))
    for name, mark, figures in checks(report):
        found = f"{name}: {figures} (promised: {report['promise']})"
        if mark == "open":
            yield note("lossless", found)
        else:
            yield judged("lossless", mark != "fault", found, "Run edge-spec verify, and report it.")


Check = Callable[[DeviceCheckRequest], Iterator[Finding]]
CHECKS: dict[str, tuple[str, Check]] = {
    OPENING: ("Opening the model", check_opening),
    "chains": ("Scoring chains", check_chains),
    "trees": ("Scoring trees", check_branches),
    "lossless": ("Drafting against plain texts", check_lossless),
    "passes": ("Timing passes", check_passes),
    "memory": ("Memory against its forecast", check_memory),
    "out of memory": ("Provoking too little memory", check_out_of_memory),
    "soak": ("Soak", check_soak),
}


def run_check(name: str, request: str) -> list[dict[str, Any]]:
    """Runs in another process, with arguments as a command line has them; returns findings as JSON.

    What the check found before it failed stays.
    """
    found: list[Finding] = []
    try:
        # As it goes: those that were found before it raises are in the list.
        found.extend(CHECKS[name][1](DeviceCheckRequest.from_json(request)))
    except EdgeSpecError as error:
        found.append(fault(name, error.shown, error.remedy))
    except Exception as error:  # a library may fail in any way on a device that is new to it
        found.append(fault(name, of_error(error), ELSEWHERE))
    return [asdict(each) for each in found]


def run_checks(
    request: DeviceCheckRequest,
    progress: Progress,
    on_findings: Callable[[Sequence[Finding]], None],
    isolate: Callable[..., Any] = isolated,
) -> None:
    """Goes on past failures: a driver that crashes or hangs is a finding. on_findings: is given
    what each check found before the next one may take the machine down. An interrupt passes."""
    step_s = 0.0
    for name, (title, _) in CHECKS.items():
        progress(title, 0.0)
        timeout_s = _TIMEOUT_S + request.soak_s + _MOST_STEPS * step_s
        try:
            rows = isolate(run_check, name, request.to_json(), timeout_s=timeout_s)
            found = [Finding(**{**row, "level": Severity(row["level"])}) for row in rows]
        except IsolatedError as error:
            found = [fault(name, str(error), ELSEWHERE)]
        progress(title, 1.0)
        on_findings([each.of("run") for each in found])
        if name == OPENING:
            if any(each.level is Severity.FAULT and each.check == OPENING for each in found):
                on_findings([note("run", "nothing else was tried: it does not open").of("run")])
                return
            step_s = found[0].numbers["step_ms"] / 1e3
