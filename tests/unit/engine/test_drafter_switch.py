"""Drafters that change in the middle of an answer: the text goes on as if nothing had happened."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.results import FinishReason, Origin
from edge_spec.errors import UsageError
from edge_spec.exactness.lossless import Losslessness
from edge_spec.testing import ScriptedModel

PROMPT = list(b"abcabcabcabc")
EOS = 258


def repeating(tokens: tuple[int, ...]) -> Any:
    """Writes "abc" over and over, which suffix lookup draft tokens."""
    import numpy as np

    logits = np.zeros(260, np.float32)
    logits[b"abc"[len(tokens) % 3]] = 9.0
    return logits


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


def test_it_takes_effect_after_the_round(make_engine: Any) -> None:
    engine = make_engine(ScriptedModel(repeating, 260), [SuffixDrafter()])
    running = engine.generate(PROMPT, max_tokens=60, stream=True)
    origins = [token.origin for token in next(running).tokens]
    engine.set_drafter("none")
    between = [token.origin for token in next(running).tokens]
    engine.set_drafter("suffix")
    after = [token.origin for chunk in running for token in chunk.tokens]
    assert Origin.ACCEPTED in origins and between == [Origin.PLAIN] and Origin.ACCEPTED in after
    assert running.result.text == "".join("abc"[i % 3] for i in range(60))
    assert running.result.finish_reason == FinishReason.LENGTH


def test_the_last_of_several_choices_counts(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    for names in ("none", "lookahead", "recycling"):
        engine.set_drafter(names)
    engine.generate(PROMPT, max_tokens=3)
    assert [each.name for each in engine._drafting.speculation.drafters] == ["recycling"]


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


def test_what_is_chosen_while_the_target_gets_a_new_session_is_attached_to_that(
    make_engine: Any, remembers_all: Any, monkeypatch: Any
) -> None:
    engine = make_engine(remembers_all())
    session = engine.parts.model.open_session()
    mover = Thread(target=engine._drafting.move_to, args=(session,))

    class Attached(SuffixDrafter):
        attached: Any = None

        def attach(self, model: Any, session: Any) -> None:
            if self.attached is None:
                mover.start()
                mover.join(0.1)  # it waits, or else this does for it
            self.attached = session

    drafter = Attached()
    monkeypatch.setattr(
        "edge_spec.drafters.factory.load_drafters", lambda names, setting: [drafter]
    )
    engine.set_drafter("suffix")
    mover.join()
    assert drafter.attached is session


def test_a_wrong_name_leaves_the_answer_alone(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    running = engine.generate(PROMPT, max_tokens=9, stream=True)
    next(running)
    with pytest.raises(UsageError, match="no drafter called"):
        engine.set_drafter("suffixx")
    assert engine.drafter == "auto" and len(running.finish().tokens) == 9


def test_an_answer_that_ends_with_the_round_ends(make_engine: Any, scripted: Any) -> None:
    """The choice comes when the stop token has been written already."""
    engine = make_engine(scripted(len(PROMPT), [7, EOS]))
    running = engine.generate(PROMPT, stream=True)
    next(running)
    next(running)
    engine.set_drafter("suffix")
    assert [token.id for token in running.finish().tokens] == [7, EOS]


def test_within_plain_decoding_a_choice_waits(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()])
    with engine.without_drafting():
        running = engine.generate(PROMPT, max_tokens=20, stream=True)
        next(running)
        engine.set_drafter("suffix")
        assert set(running.finish().stats.plain_reasons) == {"off"}
    assert "off" not in engine.generate(PROMPT, max_tokens=20).stats.plain_reasons


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


def test_near_ties_are_told_from_the_change_on(make_engine: Any, remembers_all: Any) -> None:
    """And the cache, which may hold the noise of drafting, is not used by plain decoding after."""
    engine = noisy_engine(make_engine, remembers_all())
    running = engine.generate(PROMPT, max_tokens=10, stream=True)
    next(running)
    engine.set_drafter("suffix")
    stats = running.finish().stats
    # Every token is within 100 of another one: all but those before the change.
    assert stats.near_ties == 9
    engine.set_drafter("none")
    assert engine.generate(PROMPT, max_tokens=2).stats.cached_n == 0


def test_an_engine_names_the_drafters_that_it_can_have(
    make_engine: Any, remembers_all: Any
) -> None:
    """Each can be chosen; the others need a draft, a corpus or another runtime."""
    engine = make_engine(remembers_all())
    assert {"suffix", "lookahead", "recycling", "jacobi"} <= set(engine.drafters)
    assert not {"draft-model", "cascade", "corpus", "early-exit"} & set(engine.drafters)
    for name in set(engine.drafters) - {"answers"}:  # which needs a file
        engine.set_drafter(name)
        engine.generate(PROMPT, max_tokens=2)


def test_all_draft_tokens_are_verified_for_a_while_and_plain_answers_may_lie_within(
    make_engine: Any, remembers_all: Any
) -> None:
    """The model never writes what suffix lookup drafts, which a policy soon notices."""
    engine = make_engine(remembers_all())
    engine.set_drafter("suffix")
    expected = engine.generate(PROMPT, max_tokens=8)
    with engine.verifying_all_draft_tokens():
        with engine.without_drafting():
            assert engine.generate(PROMPT, max_tokens=8).stats.draft_n == 0
        engine.set_drafter("none")  # from the end of the block on
        always_verify = engine.generate(PROMPT, max_tokens=8)
        assert (
            always_verify.text == expected.text
            and always_verify.stats.draft_n > expected.stats.draft_n
        )
    assert engine.drafter == "none"
    assert engine.generate(PROMPT, max_tokens=8).stats.draft_n == 0
