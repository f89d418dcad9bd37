"""`edge-spec doctor --run`: check a model on a device with the public session tests, against the
same runtime's CPU and its own plain texts. Each check has its own process, since drivers may crash
or hang."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edge_spec.core.isolated import IsolatedError, isolated
from edge_spec.core.model import Model, Progress
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.doctor.report import Finding, Severity, fault, note, ok
from edge_spec.diagnostics.lossless_check import Extent
from edge_spec.diagnostics.lossless_check.prove import checks, prove
from edge_spec.diagnostics.report_files import describe_error
from edge_spec.errors import EdgeSpecError
from edge_spec.loader import load_asked
from edge_spec.models.asked_options import AskedOptions, declared_options
from edge_spec.models.source import Source
from edge_spec.scheduler.engine_plan import choose_plan, plans_for
from edge_spec.testing import check_session
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

CONTEXT_TOKENS = 512  # for session checks, which fill the whole context once
PROMPTS = (12, 300)  # tokens; attention kernels change within the first hundreds
# As a share of the logits' standard deviation. Other kernels and float16 differ by a few
# hundredths, passes of another width by up to a tenth, a wrong mask or position by about one.
TOLERANCE = 0.25
ELSEWHERE = "Use another device or runtime, and report it."
_MOST_CONTEXT = 4096  # largest unshortenable context to fill
_CHAIN = (-1, 0, 1, 2, 3, 4, 5, 6)
_BRANCHES = (-1, 0, 1, 1, 0, 4, 4, 6)
_STEPS = 4
_EXTENT = Extent(count=4, max_tokens=32, draws=0)
# A check takes minutes at most; a longer one hangs. Slow models get _MOST_STEPS of their steps.
_TIMEOUT_S, _MOST_STEPS = 600.0, 5000
_OPENING, _SESSIONS = "opens", "sessions"
_OF_TARGET = (  # options of a target without drafts
    *("runtime", "device", "threads", "context_length"),
    *("gpu_layers", "kv_type", "mmap", "flash_attention", "rpc"),
)


def _silent(what: str, fraction: float) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class DeviceCheck:
    """A model and its options; the runtime is named."""

    model: str
    asked: AskedOptions

    @property
    def is_cpu(self) -> bool:
        return (self.asked.device or "cpu").strip().lower() == "cpu"

    def prepare(self, progress: Progress) -> None:
        """Convert the model while progress can be shown; the check that opens it reports errors."""
        with suppress(EdgeSpecError):
            plan, _ = choose_plan(plans_for(Source(self.model, progress), self.asked))
            for each in (plan.target, *plan.drafts):
                each.prepare(progress)

    @contextmanager
    def opened(self, **changes: Any) -> Iterator[Model]:
        """Open the target alone. Raises an EdgeSpecError, and what libraries raise."""
        asked = {name: getattr(self.asked, name) for name in _OF_TARGET} | changes
        alone = AskedOptions(**asked, draft="none", drafter="none")
        plan, _ = choose_plan(plans_for(Source(self.model, _silent), alone))
        with closing(plan.target.prepare(_silent).open()) as model:
            yield model

    def to_json(self) -> str:
        changed = {
            name: getattr(self.asked, name)
            for name, option in declared_options(AskedOptions).items()
            if getattr(self.asked, name) != option.default
        }
        return json.dumps({"model": self.model, "asked": changed}, default=str)

    @classmethod
    def from_json(cls, text: str) -> DeviceCheck:
        given = json.loads(text)
        return cls(given["model"], AskedOptions(**given["asked"]))


def _judge(check: str, is_right: bool, found: str, remedy: str, **numbers: Any) -> Finding:
    return ok(check, found, **numbers) if is_right else fault(check, found, remedy, **numbers)


def check_opening(request: DeviceCheck) -> Iterator[Finding]:
    """Time loading and the first steps. Raises a library's own errors."""
    began = time.perf_counter()
    with request.opened() as model:
        load_s = time.perf_counter() - began
        seconds = []
        with closing(model.open_session()) as session:
            session.prefill([0] * 4)
            for _ in range(1 + _STEPS):
                began = time.perf_counter()
                session.forward(TokenTree.chain(0)).logits.copy()
                session.commit([0])
                seconds.append(time.perf_counter() - began)
        first_ms, step_ms = 1e3 * seconds[0], 1e3 * min(seconds[1:])
        can = model.capabilities
        yield ok(
            _OPENING,
            f"loaded in {load_s:.1f} s, first pass {first_ms:,.1f} ms, then {step_ms:,.1f} ms; "
            f"takes {'trees' if can.trees else 'chains only'}, {can.max_rows} rows a pass",
            load_s=load_s,
            first_pass_ms=first_ms,
            step_ms=step_ms,
        )


def check_sessions(request: DeviceCheck) -> Iterator[Finding]:
    with request.opened(context_length=CONTEXT_TOKENS) as model:
        yield _check_promises(model)
        yield from _compare(request, model)


def _check_promises(model: Model) -> Finding:
    if model.config.context_length > _MOST_CONTEXT:
        found = f"a context of {model.config.context_length} tokens is not filled"
        return note(_SESSIONS, found)
    tolerance = TOLERANCE * float(_score(model, 1).std())
    if not np.isfinite(tolerance):
        return fault(_SESSIONS, "its scores are not numbers", ELSEWHERE)
    try:
        largest = check_session(model, tolerance).max_difference
    except AssertionError as error:
        return fault(_SESSIONS, f"a promise of sessions is broken: {error}", ELSEWHERE)
    found = f"sessions keep their promises; a row scored in two ways differs by {largest:.4f}"
    return ok(_SESSIONS, found, max_logit=largest, tolerance_logit=tolerance)


def _compare(request: DeviceCheck, model: Model) -> Iterator[Finding]:
    """Compare logits after a short and a long prompt with the CPU's: a consistently wrong device
    passes tests against itself."""
    room = model.config.context_length - len(_BRANCHES)
    found = {length: _score(model, length) for length in {min(t, room) for t in PROMPTS}}
    wrong = sorted(length for length in found if not np.isfinite(found[length]).all())
    if wrong:
        yield fault(_SESSIONS, f"after {wrong[0]} tokens its scores are not numbers", ELSEWHERE)
        return
    if request.is_cpu:
        return
    with request.opened(device="cpu", context_length=CONTEXT_TOKENS) as other:
        for length in sorted(found):
            expected = _score(other, length, model.capabilities.trees)
            deviation = expected.std(axis=1).clip(min=1e-9)
            far = float(((found[length] - expected).std(axis=1) / deviation).max())
            yield _judge(
                _SESSIONS,
                far <= TOLERANCE,
                f"after {length} tokens, against {request.asked.runtime} on the CPU: scores "
                f"differ by {far:.3f} of their deviation (up to {TOLERANCE} is rounding)",
                ELSEWHERE,
                of_deviation=far,
            )


def _score(model: Model, prompt_tokens: int, trees: bool = True) -> np.ndarray:
    """Score random tokens, the same on every device: [rows, vocab] float32."""
    parents = _BRANCHES if trees and model.capabilities.trees else _CHAIN
    rows = len(parents)
    drawn = np.random.RandomState(0).randint(0, model.config.vocab_size, prompt_tokens + rows)
    with closing(model.open_session()) as session:
        session.prefill(drawn[:prompt_tokens].tolist())
        tokens = drawn[prompt_tokens:].astype(np.int32)
        tree = TokenTree(tokens, np.array(parents, np.int32), np.ones(rows, np.float32))
        return session.forward(tree).logits.copy()


def check_lossless(request: DeviceCheck) -> Iterator[Finding]:
    """Run a short `edge-spec verify`."""
    prompts = sorted(read_prompts(OWN_PROMPTS), key=lambda each: len(each.text))
    with load_asked(request.model, request.asked, _silent, keeps_answers=False) as engine:
        proof = prove(engine, prompts, _EXTENT, _silent)
    for name, mark, figures in checks(proof):
        found = f"{name}: {figures} (promised: {proof.lossless.promise})"
        if mark == "inconclusive":
            yield note("lossless", found, "Run edge-spec verify, which tries more.")
        else:
            yield _judge("lossless", mark != "fail", found, "Run edge-spec verify, and report it.")


CHECKS: dict[str, tuple[str, Callable[[DeviceCheck], Iterator[Finding]]]] = {
    _OPENING: ("Opening the model", check_opening),
    _SESSIONS: ("Scoring chains and trees", check_sessions),
    "lossless": ("Drafting against plain texts", check_lossless),
}


def run_check(name: str, request: str) -> list[dict[str, Any]]:
    """Run in another process; return findings as JSON, also those before an error."""
    found: list[Finding] = []
    try:
        found.extend(CHECKS[name][1](DeviceCheck.from_json(request)))
    except EdgeSpecError as error:
        found.append(fault(name, error.shown, error.remedy))
    except Exception as error:  # libraries may fail in any way on unknown devices
        found.append(fault(name, describe_error(error), ELSEWHERE))
    return [asdict(each) for each in found]


def run_checks(
    request: DeviceCheck, progress: Progress, isolate: Callable[..., Any] = isolated
) -> Iterator[Finding]:
    """Run all checks, also after failures; crashes and hangs are findings."""
    step_s = 0.0
    for name, (title, _) in CHECKS.items():
        progress(title, 0.0)
        timeout_s = _TIMEOUT_S + _MOST_STEPS * step_s
        try:
            rows = isolate(run_check, name, request.to_json(), timeout_s=timeout_s)
            found = [Finding(**{**row, "level": Severity(row["level"])}) for row in rows]
        except IsolatedError as error:
            found = [fault(name, str(error), ELSEWHERE)]
        progress(title, 1.0)
        yield from found
        if name == _OPENING:
            if any(each.level is Severity.FAULT and each.check == _OPENING for each in found):
                yield note("run", "nothing else was tried: it does not open")
                return
            step_s = found[0].numbers["step_ms"] / 1e3
