"""Threads on one model: conversations at once, and drafting while the target verifies.

Both on real runtimes, whose calls leave Python's lock: what is shared and should not be shows here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from edge_spec.core.modes import DraftOverlap
from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.draft import synced_session
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.placement.layer_selection import ChosenPart
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.axes import pairwise

RUNTIMES: dict[str, dict[str, Any]] = {
    "reference": {},
    "ort": {"quantization": "fp32"},
    "llamacpp": {"quantization": "F32", "kv_type": "f32", "flash_attention": False},
}
NUM_THREADS, NUM_TOKENS = 4, 16
SEEDED = SamplingParams(temperature=0.8, seed=11)
Open = Callable[..., Engine]
Text = list[int]


class Always(SpeculationFactory):
    """Asks every drafter, whether or not it pays."""

    def choose(self, names: str) -> Speculation:
        policy = FixedPolicy(4, min_confidence=0.1, branches=False)
        return replace(super().choose(names), policy=policy)


@pytest.fixture(params=RUNTIMES)
def open_engine(
    request: pytest.FixtureRequest,
    hf: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Open]:
    """open_engine(draft, **options): with a draft of that variant on the same runtime."""
    folder = tmp_path_factory.getbasetemp() / f"parallel-{request.param}"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    opened: list[Engine] = []

    def load(draft: str, **options: Any) -> Engine:
        load_options = LoadOptions(
            runtime=request.param,
            draft=(str(hf(draft)),),
            draft_runtime=request.param,
            threads=1,
            parallel_rows=12,
            **RUNTIMES[request.param],
            **options,
        )
        engine = load_engine(str(hf()), load_options, lambda what, fraction: None)
        opened.append(engine)
        speculation_factory = Always(**vars(engine.parts.speculation_factory))
        engine.parts = engine._drafting._parts = replace(
            engine.parts, speculation_factory=speculation_factory
        )
        return engine

    yield load
    for engine in opened:
        engine.close()


def prompts(count: int) -> list[Text]:
    """Random tokens, some of them repeated so that there is something to copy."""
    rng = np.random.default_rng(7)
    parts = [rng.integers(3, 262, rng.integers(2, 12)).tolist() for _ in range(count)]
    return [part * (1 + index % 3) for index, part in enumerate(parts)]


def answer(engine: Engine, prompt: Text | str, **options: Any) -> tuple[Text, str]:
    """Its tokens and its text: tokenizers are shared, too."""
    result = engine.generate(prompt, max_tokens=NUM_TOKENS, **options)
    return [token.id for token in result.tokens], result.text


def faults(engine: Engine) -> list[str]:
    drafters = [
        each for each in engine._drafting.speculation.drafters if isinstance(each, GuardedDrafter)
    ]
    return [each.fault for each in drafters if each.fault is not None]


def test_conversations_at_once_write_what_each_writes_alone(open_engine: Open) -> None:
    engine = open_engine("llama")
    ways = ["none", "cascade", "recycling,answers", "suffix"]
    if engine.parts.runtime == "ort":
        ways.append("early-exit")
        parts: Any = engine.parts.speculation_factory.setting.parts
        parts["early-exit"] = ChosenPart(1)
    asked = [*prompts(5), "the cat sat on the mat, the cat sat", "Über 7 Brücken 😀"]
    engine.set_drafter("none")
    alone = [answer(engine, prompt) for prompt in asked]
    start = Barrier(NUM_THREADS, timeout=60)

    def converse(thread: int) -> list[tuple[Text, str]]:
        with engine.fork() as fork:
            start.wait()
            texts = []
            for number, prompt in enumerate(asked):
                fork.set_drafter(ways[(thread + number) % len(ways)])
                texts.append(answer(fork, prompt))
            assert not faults(fork)
        return texts

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        for texts in threads.map(converse, range(NUM_THREADS)):
            assert texts == alone
    assert [answer(engine, prompt) for prompt in asked] == alone


@pytest.mark.parametrize(
    ("patient", "draft", "drafter"),
    pairwise([False, True], ["llama", "qwen3"], ["draft-model", "cascade"]),
)
def test_drafting_meanwhile_changes_no_text(
    patient: bool,
    draft: str,
    drafter: str,
    open_engine: Open,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """With a draft that is always right, and with one that hardly ever is; stopped as soon as the
    target has scored, or when it has read what it wanted to."""
    if patient:  # however slow the draft is
        request.getfixturevalue("fixed_policy")
        monkeypatch.setattr(synced_session, "_LEAST_CHANCE", 0.15)
        anticipate = DraftModelDrafter.anticipate
        monkeypatch.setattr(
            DraftModelDrafter,
            "anticipate",
            lambda drafter, stopped: anticipate(drafter, lambda: False),
        )
    engine = open_engine(draft, draft_overlap=DraftOverlap.ON)
    texts: dict[str, list[tuple[Text, str]]] = {"none": [], drafter: []}
    ready = 0
    for way, written in texts.items():
        engine.set_drafter(way)
        for prompt in prompts(4):
            for sampling in (SamplingParams(), SEEDED):
                written.append(answer(engine, prompt, sampling=sampling))
                assert engine.last is not None
                ready += engine.last.stats.anticipated_n
    assert texts["none"] == texts[drafter]
    assert not faults(engine)
    if patient and draft == "llama":  # of the other it is soon learnt that nothing is right
        assert ready > 0


def test_a_model_knows_all_caches_that_threads_opened(
    gguf: Callable[..., Path], open_llama: Callable[..., Any]
) -> None:
    """It frees them before its weights: one that it forgot would read freed memory."""
    pytest.importorskip("llama_cpp")
    model = open_llama("llamacpp", gguf(), context_length=64)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            opened = list(threads.map(lambda _: model.open_session(), range(160)))
    finally:
        sys.setswitchinterval(before)
    homes = {session._sequence.home for session in opened}
    assert homes and all(home.free.alive for home in homes)
    model.close()
    assert not any(home.free.alive for home in homes)
