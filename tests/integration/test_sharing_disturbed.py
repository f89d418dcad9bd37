"""Conversations that share passes while rows are dealt out, devices fail and contexts fill: each
writes what it writes alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.spaced_retries import SpacedRetries
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine import batch, speculation
from edge_spec.engine.batch import Batch
from edge_spec.engine.engine import Engine
from edge_spec.errors import ContextFullError, SessionError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.dealing import Wish
from edge_spec.scheduler.policy import FixedPolicy, RoundPlan

MODULES = {"ort": "onnxruntime", "llamacpp": "llama_cpp"}
QUESTIONS = [
    "one two three one two three one two",
    "a b a b a b a",
    "the cat the cat the cat",
    "xx",
]
SAMPLED = {"sampling": SamplingParams(temperature=0.9, seed=5)}
Open = Callable[..., Engine]


class Divisible(FixedPolicy):
    """Drafts whatever it costs, and leaves open how much of it is scored."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(min_confidence=0.0, branches=False, probes=False)

    def choose(self, drafters: Sequence[Drafter], pending: int, budget: Budget) -> RoundPlan:
        plan = super().choose(drafters, pending, budget)
        whole = plan.num_verified in (None, len(plan.tree)) and plan.tree.is_chain
        return plan._replace(values=tuple(plan.tree.reach.tolist())) if whole else plan


@pytest.fixture(params=MODULES)
def opened(
    request: pytest.FixtureRequest, hf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """An engine whose forks share passes."""
    pytest.importorskip(MODULES[request.param])
    monkeypatch.setattr(speculation, "AdaptivePolicy", Divisible)
    monkeypatch.setattr(Batch, "_worth_waiting_s", until_another_comes)
    engines: list[Engine] = []

    def load(**options: Any) -> Engine:
        asked = LoadOptions(runtime=request.param, threads=1, drafter="suffix", **options)
        engines.append(load_engine(str(hf()), asked, lambda what, fraction: None))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


def until_another_comes(each: Batch) -> float:
    """However busy the machine is: passes are shared as long as two answer."""
    return 0.2 if len(each._queue) < 2 and each.active > 1 else 0.0


def texts(engines: Sequence[Engine], **options: Any) -> list[str]:
    """Of one conversation each, at the same time."""

    start = Barrier(len(engines), timeout=60)

    def answer(engine: Engine, question: str) -> str:
        start.wait()
        return engine.generate(question, max_tokens=24, **options).text

    with ThreadPoolExecutor(len(engines)) as threads:
        return list(threads.map(answer, engines, QUESTIONS))


def forks(engine: Engine) -> list[Engine]:
    passes = engine.parts.batch
    passes.prepare_for(len(QUESTIONS))
    passes.settle()
    if passes.most < 2:
        pytest.skip("shared passes would change bits on this machine")
    return [engine, *(engine.fork() for _ in QUESTIONS[1:])]


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_no_text_depends_on_how_rows_are_dealt_out(
    opened: Open, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by chance, as any other conversations could have it."""
    engine = opened()
    alone = [engine.generate(each, max_tokens=24, **sampling).text for each in QUESTIONS]
    drawn, cut = np.random.default_rng(0), []

    def by_chance(wishes: Sequence[Wish], room: int, seconds: object) -> list[int]:
        dealt = [int(drawn.integers(w.least, max(w.least, len(w.values)) + 1)) for w in wishes]
        while sum(dealt) > room:
            dealt = [max(wish.least, rows - 1) for wish, rows in zip(wishes, dealt, strict=True)]
        cut.extend(rows < len(w.values) for w, rows in zip(wishes, dealt, strict=True))
        return dealt

    monkeypatch.setattr(batch, "deal_rows", by_chance)
    engines = forks(engine)
    reasons: set[str] = set()
    for _ in range(3):
        assert texts(engines, **sampling) == alone
        for each in engines:
            assert each.last is not None
            reasons |= set(each.last.stats.plain_reasons)
    assert any(cut)
    assert PlainReason.SHARED in reasons
    for each in engines[1:]:
        each.close()


def test_a_device_that_fails_within_a_shared_pass_is_nobodys_failure(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second one fails: the rows of all are scored again."""
    engine = opened()
    alone = [engine.generate(each, max_tokens=24).text for each in QUESTIONS]
    engines = forks(engine)
    model: Any = engine.parts.model
    count, together = itertools.count(1), model.forward_together
    failed: list[int] = []

    def failing(parts: Sequence[Any], num_rows: int) -> list[Forward]:
        if next(count) % 2:
            failed.append(len(parts))
            raise SessionError("the device is gone", remedy="Restart.")
        found: list[Forward] = together(parts, num_rows)
        return found

    monkeypatch.setattr(model, "forward_together", failing)
    monkeypatch.setattr(SpacedRetries, "rest", lambda rests: None)
    assert texts(engines) == alone
    assert failed
    for each in engines[1:]:
        each.close()


def test_a_context_that_fills_in_one_conversation_ends_that_one_alone(opened: Open) -> None:
    engine = opened(context_length=64)
    others = [engine.generate(each, max_tokens=24).text for each in QUESTIONS[1:]]
    full = engine.generate("abc", max_tokens=500)
    engines = forks(engine)
    too_long = "word " * 100

    def fill() -> str:
        with pytest.raises(ContextFullError):
            engines[0].generate(too_long, max_tokens=500)
        return engines[0].generate("abc", max_tokens=500).text

    with ThreadPoolExecutor(len(engines)) as threads:
        filling = threads.submit(fill)
        asked = [
            threads.submit(each.generate, question, max_tokens=24)
            for each, question in zip(engines[1:], QUESTIONS[1:], strict=True)
        ]
        assert [each.result().text for each in asked] == others
        assert filling.result() == full.text
    for each in engines[1:]:
        each.close()
