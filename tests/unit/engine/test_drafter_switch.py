"""Drafters that change in the middle of an answer: the text goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.testing import ScriptedModel

PROMPT = list(b"abcabcabcabc")


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=1.0, seed=3)])
@pytest.mark.parametrize("at", range(1, 30, 4))
@pytest.mark.parametrize("names", ["none", "suffix", "lookahead", "suffix,recycling"])
def test_the_text_is_that_of_one_drafter(
    make_engine: Any, remembers_all: Any, sampling: SamplingParams, at: int, names: str
) -> None:
    expected = make_engine(remembers_all()).generate(PROMPT, max_tokens=32, sampling=sampling)
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    running = engine.generate(PROMPT, max_tokens=32, sampling=sampling, stream=True)
    while len(running.result.tokens) < at and next(running, None) is not None:
        pass
    engine.set_drafter(names)
    assert engine.drafter == names
    assert running.finish().text == expected.text
    assert [token.id for token in running.result.tokens] == [token.id for token in expected.tokens]
    follows = engine.generate(PROMPT, max_tokens=32, sampling=sampling)
    assert follows.text == expected.text
    assert follows.stats.cached_n == len(PROMPT) - 1


def test_another_thread_may_choose(make_engine: Any, remembers_all: Any) -> None:
    expected = make_engine(remembers_all()).generate(PROMPT, max_tokens=200).text
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    running = engine.generate(PROMPT, max_tokens=200, stream=True)
    next(running)

    def choose() -> None:
        for turn in range(60):
            engine.set_drafter(("none", "suffix", "lookahead")[turn % 3])

    chooser = Thread(target=choose)
    chooser.start()
    text = running.finish().text
    chooser.join()
    assert text == expected
    assert engine.generate(PROMPT, max_tokens=200).text == expected
    assert engine.drafter == "lookahead"


def noisy_engine(make_engine: Any, model: ScriptedModel) -> Any:
    """Where it drafts, the width of a pass may change any choice. It does not draft yet."""
    engine = make_engine(model)
    noisy = replace(engine.parts.speculation_factory, lossless=Losslessness(tie_margin=100.0))
    engine._drafting._parts = replace(engine.parts, speculation_factory=noisy)
    return engine


def test_what_drafting_wrote_is_read_anew_after_a_plain_end(
    make_engine: Any, remembers_all: Any
) -> None:
    """An answer that ends without a drafter leaves the cache that one has written before."""
    engine = noisy_engine(make_engine, remembers_all())
    engine.set_drafter("suffix")
    running = engine.generate(PROMPT, max_tokens=10, stream=True)
    next(running)
    engine.set_drafter("none")
    running.finish()
    assert engine.generate(PROMPT, max_tokens=2).stats.cached_n == 0
    assert engine.generate(PROMPT, max_tokens=2).stats.cached_n == len(PROMPT) - 1
