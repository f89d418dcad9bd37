"""Drafting across tokenizers: the text stays as it is, and draft tokens are what the target's
tokenizer makes of the draft's text."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.cross_tokenizer import CrossTokenizerDrafter
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import ScriptedModel, random_logits
from fixtures import languages as spoken
from fixtures import trained_tokenizers

Languages = dict[str, Any]  # name -> its Language


@pytest.fixture(scope="session")
def languages(byte_tokenizer_json: str) -> Languages:
    made: Languages = spoken.train(trained_tokenizers, byte_tokenizer_json)
    return made


def drafting(target: Any, draft: Any, model: ScriptedModel) -> CrossTokenizerDrafter:
    inner = DraftModelDrafter(model, model.open_session(), draft.size)
    return CrossTokenizerDrafter(inner, target.codec, draft.codec)


def prompt_of(target: Any, num_tokens: int = 8) -> list[int]:
    ids: list[int] = target.codec.encode(spoken.STORY)
    return ids[:num_tokens]


@pytest.mark.parametrize("name", spoken.DRAFTS)
@pytest.mark.parametrize("num_prompt", [1, 8])
def test_any_draft_tokenizer_gives_the_plain_greedy_text(
    num_prompt: int, name: str, languages: Languages, decode: Any, greedy: Any
) -> None:
    target, draft = languages["target"], languages[name]
    model, prompt = target.writer(spoken.STORY), prompt_of(target, num_prompt)
    count = len(target.codec.encode(spoken.STORY)) - len(prompt)
    drafter = drafting(target, draft, draft.writer(spoken.STORY))
    run = decode(model, prompt, [drafter], max_tokens=count)
    assert run.tokens == greedy(model, prompt, count)
    assert sum(round.num_accepted for round in run.rounds) > count / 2
    # The draft is right, but a draft token may end inside a word or a character.
    assert all(round.num_accepted >= round.num_draft_tokens - 2 for round in run.rounds)


@pytest.mark.parametrize("name", spoken.DRAFTS)
def test_a_useless_draft_changes_nothing(
    name: str, languages: Languages, decode: Any, greedy: Any
) -> None:
    target, draft = languages["target"], languages[name]
    model, prompt = target.writer(spoken.STORY), prompt_of(target)
    other = ScriptedModel(random_logits(draft.size, scale=30.0), draft.size)
    drafter = drafting(target, draft, other)
    assert decode(model, prompt, [drafter], max_tokens=50).tokens == greedy(model, prompt, 50)


@pytest.mark.parametrize(
    "name",
    [
        *("small", "sentencepiece first"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("permuted", "bytes", "sentencepiece every", "sentencepiece none")
        ),
    ],
)
def test_a_draft_token_to_the_end_is_all_of_the_targets_own_tokens(
    name: str, languages: Languages
) -> None:
    """Whatever token the text has come to, those inside a word or a character included."""
    target, draft = languages["target"], languages[name]
    model, ids = draft.writer(spoken.SHORT), target.codec.encode(spoken.SHORT)
    drafter = drafting(target, draft, model)
    for count in range(1, len(ids)):
        drafter.begin(ids[:count])
        tree = drafter.propose(ids[count - 1], Budget(500, 501))
        assert tree.tokens.tolist() == ids[count - 1 :], count
        rows = tuple(range(1, len(tree)))
        drafter.observe(tree, spoken.OUT, Verdict(tuple(ids[count:]), rows, True))


def test_a_draft_token_ends_before_the_drafts_special_tokens(languages: Languages) -> None:
    target, draft = languages["target"], languages["small"]
    inner, prompt = spoken.Recording(), target.codec.encode("They said")
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    for before, after in ((" nothing at all", " and more"), ("", " and more")):
        candidate = draft.codec.encode(before)
        inner.draft_tokens = [*candidate, draft.eos, *draft.codec.encode(after)]
        inner.confidence = [0.5] * len(inner.draft_tokens)
        drafter.begin(prompt)
        tree = drafter.propose(prompt[-1], Budget(40, 41))
        assert tree.tokens[1:].tolist() == target.codec.encode(before)
        # Nothing can join the last token: all of the draft's confidence is left.
        np.testing.assert_allclose(prod(tree.confidence.tolist()), 0.5 ** len(candidate), rtol=1e-5)


@pytest.mark.parametrize("name", ["small", "large", "bytes", "permuted"])
def test_confidence_is_that_of_the_drafts_tokens_that_begin_in_a_token(
    name: str, languages: Languages
) -> None:
    target, draft = languages["target"], languages[name]
    inner, prompt = spoken.Recording(), target.codec.encode("They said")
    candidate = " caf\u00e9s \U0001f680 everywhere, nothing else"
    inner.draft_tokens = [*draft.codec.encode(candidate), draft.eos]
    chances = np.random.default_rng(1).uniform(0.5, 1, len(inner.draft_tokens))
    inner.confidence = chances.tolist()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    drafter.begin(prompt)
    tree = drafter.propose(prompt[-1], Budget(99, 100))
    stream, starts = draft.codec.stream(), [0]
    starts += accumulate(len(stream.push(id)) for id in inner.draft_tokens[:-2])
    stream, begin = target.codec.stream(), 0
    together: list[float] = []  # of the tokens of one character: all of its chance first
    for token, confidence in zip(tree.tokens[1:].tolist(), tree.confidence[1:], strict=True):
        piece = stream.push(token)
        together.append(float(confidence))
        if piece:
            within = [at for at, start in enumerate(starts) if begin <= start < begin + len(piece)]
            expected = [prod(chances[within]), *[1.0] * (len(together) - 1)]
            np.testing.assert_allclose(together, expected, rtol=1e-5)
            begin, together = begin + len(piece), []
    assert begin == len(candidate)


@pytest.mark.parametrize("longest", [1, 2, 3])
@pytest.mark.parametrize("name", ["small", "permuted", "sentencepiece first"])
def test_a_text_in_other_tokens_than_the_tokenizers_is_drafted_for(
    longest: int, name: str, languages: Languages, decode: Any, greedy: Any
) -> None:
    """The target writes in short tokens; the draft tokens are canonical again after each."""
    target, draft = languages["target"], languages[name]
    model, prompt = target.writer(spoken.STORY, longest), prompt_of(target)
    drafter = drafting(target, draft, draft.writer(spoken.STORY))
    run = decode(model, prompt, [drafter], max_tokens=150)
    assert run.tokens == greedy(model, prompt, 150)
    assert any(round.num_accepted for round in run.rounds)


@settings(max_examples=300)
@given(data=st.data())
def test_any_tokens_and_draft_tokens_give_a_chain_below_the_pending_token(
    data: Any, languages: Languages
) -> None:
    target = languages[data.draw(st.sampled_from(["target", "bytes", "sentencepiece first"]))]
    draft = languages[data.draw(st.sampled_from(spoken.DRAFTS))]
    tokens = st.one_of(
        st.lists(st.integers(0, target.size - 1), min_size=1, max_size=30),
        st.text(st.sampled_from("ab \n\u00e9\U0001f680'1"), min_size=1, max_size=90).map(
            target.codec.encode
        ),
    )
    draft_tokens = st.lists(st.integers(0, draft.size - 1), max_size=8)
    inner = spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    text: list[int] = []
    tree = TokenTree.chain(0)
    for begins in (True, False, False, True, False):
        new = data.draw(tokens)
        if begins:
            text = [*text[: data.draw(st.integers(0, 40))], *new]
            drafter.begin(text)
        else:
            verdict = spoken.outcome(tree, new)
            drafter.observe(tree, spoken.OUT, verdict)
            text += verdict.tokens
        inner.draft_tokens = data.draw(draft_tokens)
        inner.confidence = [0.5] * len(inner.draft_tokens)
        budget = Budget(data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9)))
        tree = drafter.propose(text[-1], budget)
        assert tree.is_chain and tree.tokens[0] == text[-1]
        assert len(tree) <= min(budget.num_rows, budget.num_draft_tokens + 1)
        assert ((tree.tokens >= 0) & (tree.tokens < target.size)).all()
        assert ((tree.confidence >= 0) & (tree.confidence <= 1)).all()


def test_a_snapshot_carries_what_was_learnt_and_what_the_draft_has_read(
    languages: Languages, decode: Any
) -> None:
    target, draft = languages["target"], languages[spoken.DRAFTS[0]]
    made = [drafting(target, draft, draft.writer(spoken.STORY)) for _ in range(2)]
    decode(target.writer(spoken.STORY), prompt_of(target), made[:1], max_tokens=20)
    state = made[0].state()
    fresh = made[1].state()
    assert not np.array_equal(state["inner/acceptance"], fresh["inner/acceptance"])
    made[1].load(state)
    restored = made[1].state()
    assert restored.keys() == state.keys() >= {"open_ends", "inner/text/session/committed"}
    for name, array in state.items():
        assert np.array_equal(restored[name], array), name
    for wrong in (np.zeros(2), np.ones(3), np.array([1.0, np.inf]), np.array([1.0, -1.0])):
        with pytest.raises(ValueError, match="open ends"):
            made[1].load(state | {"open_ends": wrong})
