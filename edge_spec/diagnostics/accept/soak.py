"""Minutes of the same requests: answers repeat bit for bit, memory stays, nothing fails."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.accept.deadline import Deadline
from edge_spec.diagnostics.accept.request import AcceptRequest
from edge_spec.diagnostics.accept.row import CheckRow, judged, not_measured
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import GREEDY
from edge_spec.errors import EdgeSpecError
from edge_spec.exactness.lossless import Promise
from edge_spec.fitting.memory import format_bytes, resident_bytes
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_NUM_PROMPTS, _PROMPT_TOKENS = 3, 256
_MAX_TOKENS = 24
_PROBE_ROWS = 4
_LEAST_ROUNDS = 2
_FORK_EVERY = 8  # rounds: another conversation opens its cache, answers, and closes it
_WARM_SHARE = 0.5  # of the samples, in which caches and arenas come to their size
_WINDOW_SHARE = 0.2  # of the rest, at its begin and at its end
_LEAST_SAMPLES = 10
_MOST_GROWTH, _SLACK_BYTES = 0.02, 4_000_000  # allocators never give all back
_MOST_ERRORS = 20  # after which it is not tried any longer
_SEEDED = SamplingParams(temperature=0.8, seed=7)


@dataclass
class Tally:
    """What came of the requests so far. first: what each gave the first time."""

    requests: int = 0
    first: dict[str, str] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)  # by what was asked
    errors: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    used_on_devices: list[int] = field(default_factory=list)  # bytes, up to a constant

    def take(self, kind: str, key: str, answer: str) -> None:
        """kind: "plain", "drafting" or "scores"."""
        if self.first.setdefault(f"{kind} {key}", answer) != answer:
            self.differing[kind] = self.differing.get(kind, 0) + 1


def check_soak(request: AcceptRequest, deadline: Deadline) -> Iterator[CheckRow]:
    with request.engine() as engine:
        ties = engine.parts.speculation_factory.lossless.promise is Promise.TIES
        soak = Soak(engine, lambda: sum(request.device_memory().values()))
        soak.run(deadline)
    yield from judge_soak(soak.tally, deadline.seconds, ties)


class Soak:
    """Asks one engine the same again and again. free_on_devices: bytes; 0 where it is not told."""

    def __init__(self, engine: Engine, free_on_devices: Callable[[], int] = lambda: 0) -> None:
        self.tally = Tally()
        self._engine = engine
        self._free_on_devices = free_on_devices

    def run(self, deadline: Deadline) -> None:
        """Until the time is over; one prompt twice at the least."""
        prompts, rounds = self._prompts(), 0
        while len(self.tally.errors) < _MOST_ERRORS:
            asked = prompts if rounds >= _LEAST_ROUNDS else prompts[:1]
            for i, prompt in enumerate(asked):
                if deadline.left_s <= 0 and rounds >= _LEAST_ROUNDS:
                    return
                self._ask(str(i), prompt)
            if rounds % _FORK_EVERY == 0:
                self._try("plain", f"0 {GREEDY.seed}", partial(_forked, self._engine, prompts[0]))
            rounds += 1

    def _prompts(self) -> list[list[int]]:
        parts = self._engine.parts
        room = min(_PROMPT_TOKENS, parts.model.config.context_length - _MAX_TOKENS)
        prompts = read_prompts(OWN_PROMPTS, per_category=1)[:_NUM_PROMPTS]
        return [parts.text.prompt_of(prompt.text)[: max(1, room)] for prompt in prompts]

    def _ask(self, name: str, prompt: list[int]) -> None:
        for sampling in (GREEDY, _SEEDED):
            key = f"{name} {sampling.seed}"
            answer = partial(_answer, self._engine, prompt, sampling)
            with self._engine.without_drafting():
                self._try("plain", key, answer)
            self._try("drafting", key, answer)
        self._try("scores", name, partial(_digest, self._engine.parts.model, prompt))

    def _try(self, kind: str, key: str, work: Callable[[], str]) -> None:
        tally = self.tally
        tally.requests += 1
        try:
            tally.take(kind, key, work())
        except EdgeSpecError as error:
            tally.errors.append(error.shown)
        except Exception as error:  # of a library
            tally.errors.append(f"{type(error).__name__}: {error}")
        resident, free = resident_bytes(), self._free_on_devices()
        tally.resident += [] if resident is None else [resident]
        tally.used_on_devices += [-free] if free else []


def _answer(engine: Engine, prompt: list[int], sampling: SamplingParams) -> str:
    result = engine.generate(prompt, max_tokens=_MAX_TOKENS, sampling=sampling)
    return " ".join(str(token.id) for token in result.tokens)


def _forked(engine: Engine, prompt: list[int]) -> str:
    with engine.fork() as other, other.without_drafting():
        return _answer(other, prompt, GREEDY)


def _digest(model: Model, prompt: list[int]) -> str:
    """Of the scores of a chain after the prompt, every bit of them, in a session of its own."""
    with closing(model.open_session()) as session:
        session.prefill(prompt)
        chain = TokenTree.chain(prompt[0], [prompt[-1]] * (_PROBE_ROWS - 1))
        logits = np.ascontiguousarray(session.forward(chain).logits)
        return hashlib.sha256(logits.tobytes()).hexdigest()


def judge_soak(tally: Tally, seconds: float, ties: bool) -> Iterator[CheckRow]:
    """ties: whether texts with drafting may part at near ties here."""
    yield judged(
        "errors",
        not tally.errors,
        f"{len(tally.errors)} in {tally.requests} requests, {seconds:.0f} s"
        + (f"; the first: {tally.errors[0]}" if tally.errors else ""),
        requests=tally.requests,
        errors=len(tally.errors),
        seconds=seconds,
    )
    counted = tally.differing if not ties else _without(tally.differing, "drafting")
    told = ", ".join(f"{count} of {kind}" for kind, count in tally.differing.items())
    yield judged(
        "repeated answers",
        not counted and bool(tally.first),
        f"differ from the first: {told or 'none'}; {len(tally.first)} different requests"
        + (" (with drafting near ties may differ here)" if ties else ""),
        differing=dict(tally.differing),
        compared=len(tally.first),
    )
    yield judge_memory("resident memory", tally.resident)
    if tally.used_on_devices:
        yield judge_memory("device memory", tally.used_on_devices)


def _without(counts: dict[str, int], kind: str) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name != kind}


def judge_memory(name: str, samples: list[int]) -> CheckRow:
    """samples: bytes in use, in the order of time; negative where they are known up to a constant,
    as of a device's free memory."""
    warm = samples[int(_WARM_SHARE * len(samples)) :]
    window = max(1, int(_WINDOW_SHARE * len(warm)))
    if len(warm) < _LEAST_SAMPLES:
        return not_measured(name, f"{len(samples)} samples are too few to tell")
    start, end = median(warm[:window]), median(warm[-window:])
    grown = end - start
    most = _MOST_GROWTH * max(0.0, start) + _SLACK_BYTES
    return judged(
        name,
        grown <= most,
        f"{'+' if grown >= 0 else '-'}{format_bytes(int(abs(grown)))} in the second half "
        f"(up to {format_bytes(int(most))} is an allocator's)",
        grown_bytes=grown,
        samples=len(samples),
    )
