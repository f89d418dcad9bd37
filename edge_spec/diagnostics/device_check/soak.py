"""The same requests again and again: answers repeat bit for bit, memory stays, nothing fails."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from edge_spec.core.model import Model
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.device_check.request import DeviceCheckRequest
from edge_spec.diagnostics.device_check.sessions import ELSEWHERE
from edge_spec.diagnostics.doctor.finding import Finding, judged, note, of_error
from edge_spec.engine.engine import Engine
from edge_spec.engine.request import GREEDY
from edge_spec.errors import EdgeSpecError
from edge_spec.exactness.lossless import Promise
from edge_spec.fitting.memory import format_bytes, resident_bytes
from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

_NUM_PROMPTS, _PROMPT_TOKENS, _MAX_TOKENS = 3, 64, 16
_PROBE_ROWS = 4
_LEAST_ROUNDS = 5
_WARM_SHARE = 0.5  # of the samples, in which caches and arenas come to their size
_WINDOW_SHARE = 0.2  # of the rest, at its begin and at its end
_LEAST_SAMPLES = 10
_MOST_GROWTH, _SLACK_BYTES = 0.02, 4_000_000  # allocators never give all back
_MOST_ERRORS = 20  # after which it is not tried any longer
_SEEDED = SamplingParams(temperature=0.8, seed=7)
_Key = tuple[str, int, int | None]  # what was asked, of which prompt, with which seed


@dataclass
class Tally:
    """Counts what came of the requests. first: what each gave the first time; differing: by
    "plain", "drafting" and "scores"; resident: bytes in use."""

    requests: int = 0
    first: dict[_Key, str] = field(default_factory=dict)
    differing: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    def take(self, key: _Key, work: Callable[[], str], resident: Callable[[], int | None]) -> None:
        self.requests += 1
        try:
            answer = work()
            self.differing[key[0]] += self.first.setdefault(key, answer) != answer
        except EdgeSpecError as error:
            self.errors.append(error.shown)
        except Exception as error:  # of a library
            self.errors.append(of_error(error))
        found = resident()
        self.resident += [] if found is None else [found]


def check_soak(
    request: DeviceCheckRequest, resident: Callable[[], int | None] = resident_bytes
) -> Iterator[Finding]:
    with request.engine() as engine:
        may_differ = engine.parts.speculation_factory.lossless.promise is Promise.TIES
        tally = _soaked(engine, request.soak_s, resident)
    yield from judge_soak(tally, may_differ)


def _soaked(engine: Engine, seconds: float, resident: Callable[[], int | None]) -> Tally:
    """Asks until the time is over; everything _LEAST_ROUNDS times at the least."""
    tally, end_s, rounds = Tally(), time.monotonic() + seconds, 0
    texts = read_prompts(OWN_PROMPTS, per_category=1)[:_NUM_PROMPTS]
    room = min(_PROMPT_TOKENS, engine.parts.model.config.context_length - _MAX_TOKENS)
    prompts = [engine.parts.text.prompt_of(each.text)[: max(1, room)] for each in texts]
    while rounds < _LEAST_ROUNDS or time.monotonic() < end_s:
        for number, prompt in enumerate(prompts):
            for sampling in (GREEDY, _SEEDED):
                for kind in ("plain", "drafting"):
                    answer = partial(_answer, engine, kind, prompt, sampling)
                    tally.take((kind, number, sampling.seed), answer, resident)
            digest = partial(_digest, engine.parts.model, prompt)
            tally.take(("scores", number, None), digest, resident)
        if len(tally.errors) >= _MOST_ERRORS:
            break
        rounds += 1
    return tally


def _answer(engine: Engine, kind: str, prompt: list[int], sampling: SamplingParams) -> str:
    """Answers in another conversation, whose cache is opened and closed, too."""
    with ExitStack() as opened:
        other = opened.enter_context(engine.fork())
        if kind == "plain":
            opened.enter_context(other.without_drafting())
        result = other.generate(prompt, max_tokens=_MAX_TOKENS, sampling=sampling)
    return " ".join(str(token.id) for token in result.tokens)


def _digest(model: Model, prompt: list[int]) -> str:
    """Hashes every bit of the scores of a chain after the prompt."""
    with closing(model.open_session()) as session:
        session.prefill(prompt)
        chain = TokenTree.chain(prompt[0], [prompt[-1]] * (_PROBE_ROWS - 1))
        logits = np.ascontiguousarray(session.forward(chain).logits)
        return hashlib.sha256(logits.tobytes()).hexdigest()


def judge_soak(tally: Tally, may_differ: bool) -> Iterator[Finding]:
    """may_differ: whether texts with drafting may part at near ties here."""
    first = f"; the first: {tally.errors[0]}" if tally.errors else ""
    found = f"{len(tally.errors)} errors in {tally.requests} requests{first}"
    yield judged("soak", not tally.errors, found, ELSEWHERE, requests=tally.requests)
    differing = tally.differing.total() - may_differ * tally.differing["drafting"]
    counts = ", ".join(f"{count} of {kind}" for kind, count in tally.differing.items() if count)
    found = f"answers that differ from the first to the same request: {counts or 'none'}"
    yield judged("soak", not differing and bool(tally.first), found, ELSEWHERE)
    yield judge_growth(tally.resident)


def judge_growth(samples: list[int]) -> Finding:
    """samples: bytes in use, in the order of time."""
    warm = samples[int(_WARM_SHARE * len(samples)) :]
    if len(warm) < _LEAST_SAMPLES:
        return note("soak", f"memory: {len(samples)} samples are too few to tell")
    window = max(1, int(_WINDOW_SHARE * len(warm)))
    start, end = median(warm[:window]), median(warm[-window:])
    most, grown = _MOST_GROWTH * start + _SLACK_BYTES, end - start
    found = (
        f"memory: {'+' if grown >= 0 else '-'}{format_bytes(int(abs(grown)))} in the second half"
    )
    return judged("soak", grown <= most, found, "It leaks. Report it.", grown_bytes=grown)
