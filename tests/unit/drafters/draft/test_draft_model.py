"""A smaller model that drafts: the text stays as it is, and no token is read twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from edge_spec.control.policy import FixedPolicy
from edge_spec.core.model import Capabilities, Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.draft import Draft
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.draft.synced_session import MAX_CATCH_UP
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB = 40
PROMPT = [3, 1, 4, 1, 5]
OUT = Forward(np.zeros((1, 1), np.float32))

NextLogits = Callable[[tuple[int, ...]], np.ndarray]


class CountingSession(ScriptedSession):
    """Records what it is asked for: +n tokens scored in one pass, -n prefilled."""

    def __init__(self, model: ScriptedModel) -> None:
        super().__init__(model)
        self.calls: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        self.calls.append(-len(tokens))
        super().prefill(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        assert len(tree) <= self._model.capabilities.max_rows
        self.calls.append(len(tree))
        return super().forward(tree)

    def taken(self) -> list[int]:
        taken, self.calls = self.calls, []
        return taken


def sharp(seed: int = 0, vocab_size: int = VOCAB, order: int = 2) -> NextLogits:
    """So far apart that the likeliest token has nearly all of the probability."""
    logits = random_logits(vocab_size, order=order + 1, scale=20.0)
    return lambda tokens: logits((seed, *tokens[-order:]))


def drafter_of(
    next_logits: NextLogits, vocab_size: int = VOCAB, target_vocab: int = VOCAB, **options: Any
) -> tuple[DraftModelDrafter, CountingSession]:
    model = ScriptedModel(next_logits, vocab_size, options.get("context_length", 512))
    max_rows = options.get("max_rows", 64)
    model.capabilities = Capabilities(max_rows, trees=False, rollback=True, hidden_states=False)
    session = CountingSession(model)
    return DraftModelDrafter(model, session, target_vocab), session


def budget(count: int, min_reach: float = 0.0) -> Budget:
    return Budget(count, 64, branches=False, min_reach=min_reach)


def observe(drafter: DraftModelDrafter, tree: TokenTree, written: Sequence[int]) -> None:
    draft_tokens = tree.tokens[1:].tolist()
    right = 0
    while (
        right < len(draft_tokens) and right < len(written) and draft_tokens[right] == written[right]
    ):
        right += 1
    drafter.observe(tree, OUT, Verdict(tuple(written), tuple(range(1, right + 1)), False))


def half_right(tokens: tuple[int, ...]) -> np.ndarray:
    """The target's own choice after every other token."""
    return sharp(0 if sum(tokens[-3:]) % 2 else 1)(tokens)


DRAFTS = {"perfect": sharp(0), "half right": half_right, "useless": sharp(7)}


@pytest.mark.parametrize("quality", DRAFTS)
@pytest.mark.parametrize("max_rows", [1, 3, 64])
def test_any_draft_gives_the_plain_greedy_text(
    quality: str, max_rows: int, decode: Any, greedy: Any
) -> None:
    model = ScriptedModel(sharp(0), VOCAB)
    drafter, _ = drafter_of(DRAFTS[quality], max_rows=max_rows)
    policy = FixedPolicy(branches=False)
    run = decode(model, PROMPT, [drafter], max_tokens=60, policy=policy)
    assert run.tokens == greedy(model, PROMPT, 60)
    accepted = sum(round.num_accepted for round in run.rounds)
    proposed = sum(round.num_draft_tokens for round in run.rounds)
    assert {"perfect": accepted == proposed, "half right": 0 < accepted < proposed}.get(
        quality, accepted < proposed / 4
    )
    assert len(run.rounds) <= 60 - accepted


@pytest.mark.parametrize("quality", DRAFTS)
def test_what_the_draft_holds_is_what_it_read(quality: str, decode: Any) -> None:
    """Its draft tokens are those of a draft that reads the whole text again each time."""
    drafter, session = drafter_of(DRAFTS[quality])
    fresh: list[list[int]] = []
    kept = drafter.propose

    def propose(pending: int, budget: Budget) -> TokenTree:
        tree = kept(pending, budget)
        anew, _ = drafter_of(DRAFTS[quality])
        anew._acceptance = drafter._acceptance
        anew.begin(drafter._text._tokens)
        fresh.append(anew.propose(pending, budget).tokens.tolist())
        assert tree.tokens.tolist() == fresh[-1]
        assert session.committed == drafter._text._held
        return tree

    drafter.propose = propose  # type: ignore[method-assign]
    decode(ScriptedModel(sharp(0), VOCAB), PROMPT, [drafter], max_tokens=40)
    assert len(fresh) > 2


def test_no_pass_is_spent_on_what_is_known() -> None:
    drafter, session = drafter_of(sharp(0))
    drafter.begin(PROMPT)
    tree = drafter.propose(PROMPT[-1], budget(4))
    # The prompt in one pass, then a pass for each draft token but the last, which is not read.
    assert session.taken() == [5, 1, 1, 1]
    draft_tokens = tree.tokens[1:].tolist()
    # All four were right: the last draft token and the target's own token are missing.
    observe(drafter, tree, [*draft_tokens, 9])
    tree = drafter.propose(9, budget(2))
    assert session.taken() == [2, 1]
    # The first was wrong: only the target's own token is missing.
    wrong = (tree.tokens[1] + 1) % VOCAB
    observe(drafter, tree, [int(wrong)])
    drafter.propose(int(wrong), budget(1))
    assert session.taken() == [1]
    assert session.committed == [*PROMPT, *draft_tokens, 9, wrong]


def test_a_long_text_is_prefilled_and_only_its_end_is_scored() -> None:
    longest = MAX_CATCH_UP + 1
    for length, calls in ((longest, [longest]), (longest + 1, [-longest, 1])):
        drafter, session = drafter_of(sharp(0))
        drafter.begin([1] * length)
        drafter.propose(1, budget(1))
        assert session.taken() == calls
    drafter, session = drafter_of(sharp(0), max_rows=1)
    drafter.begin(PROMPT)
    drafter.propose(PROMPT[-1], budget(2))
    assert session.taken() == [-4, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "calls"),
    [
        ([*PROMPT, 8, 8], [2]),  # the conversation goes on
        (PROMPT, [1]),
        (PROMPT[:2], [1]),  # it was shortened
        ([3, 1, 9, 9], [2]),  # it was edited
        ([9], [1]),
        ([9] * 20, [-19, 1]),
    ],
)
def test_another_prompt_reuses_what_it_shares(prompt: list[int], calls: list[int]) -> None:
    drafter, session = drafter_of(sharp(0))
    drafter.begin(PROMPT)
    drafter.propose(PROMPT[-1], budget(1))
    session.taken()
    drafter.begin(prompt)
    tree = drafter.propose(prompt[-1], budget(1))
    assert session.taken() == calls
    assert session.committed == prompt
    assert tree.tokens[1] == sharp(0)(tuple(prompt)).argmax()


def test_a_text_beyond_the_drafts_context_is_not_drafted(decode: Any, greedy: Any) -> None:
    drafter, session = drafter_of(sharp(0), context_length=16)
    model = ScriptedModel(sharp(0), VOCAB)
    run = decode(model, PROMPT, [drafter], max_tokens=40)
    assert run.tokens == greedy(model, PROMPT, 40)
    assert sum(round.num_accepted for round in run.rounds) > 4
    assert len(session.committed) <= 16
    session.taken()
    for length in (17, 18, 300):
        drafter.begin([1] * length)
        assert len(drafter.propose(1, budget(8))) == 1
    assert session.taken() == []
    drafter.begin([1] * 16)  # the last that fits, and one draft token after it
    assert len(drafter.propose(1, budget(8))) == 2


@pytest.mark.parametrize(("draft_vocab", "target_vocab"), [(VOCAB + 9, VOCAB), (VOCAB, VOCAB + 9)])
def test_padded_vocabularies(draft_vocab: int, target_vocab: int, decode: Any, greedy: Any) -> None:
    """The draft likes what the target lacks, and the target writes what the draft lacks."""

    def likes_padding(tokens: tuple[int, ...]) -> np.ndarray:
        assert max(tokens) < draft_vocab
        logits = sharp(0, draft_vocab)(tokens)
        logits[VOCAB:] += 100
        return logits

    drafter, session = drafter_of(likes_padding, draft_vocab, target_vocab)
    model = ScriptedModel(sharp(0, target_vocab), target_vocab)
    prompt = [*PROMPT, target_vocab - 1]
    run = decode(model, prompt, [drafter], max_tokens=80)
    assert run.tokens == greedy(model, prompt, 80)
    assert sum(round.num_draft_tokens for round in run.rounds) > 0
    assert max(session.committed) < VOCAB
    if target_vocab > draft_vocab:
        assert max(run.tokens) >= draft_vocab  # otherwise nothing was tried


def test_confidence_begins_as_the_root_of_the_drafts_own_probability() -> None:
    def logits(tokens: tuple[int, ...]) -> np.ndarray:
        scores = np.zeros(VOCAB, np.float32)
        scores[len(tokens)] = 6.0 if len(tokens) < 7 else 3.0
        scores[-9:] = 50.0  # beyond the target's vocabulary, so without a part in it
        return scores

    drafter, _ = drafter_of(logits, VOCAB, VOCAB - 9)
    drafter.begin(PROMPT)
    tree = drafter.propose(PROMPT[-1], budget(8, min_reach=0.65))
    sure = (np.exp(6) / (np.exp(6) + VOCAB - 10)) ** 0.5
    unsure = (np.exp(3) / (np.exp(3) + VOCAB - 10)) ** 0.5
    # Sure twice, then not: 0.97 * 0.97 * 0.62 is below 0.65, and the drafter stops.
    assert sure**2 > 0.65 > sure**2 * unsure
    assert tree.tokens.tolist() == [PROMPT[-1], 5, 6, 7]
    # Before anything was learnt: the middle of a bucket that is up to 0.1 wide.
    np.testing.assert_allclose(tree.confidence, [1, sure, sure, unsure], atol=0.05)
    assert tree.proposed_by == ("", *["draft-model"] * 3)


def test_logits_of_any_size_give_a_probability() -> None:
    """exp of a float32 beyond 88 is infinite."""
    for scale in (1e4, 1e30, -1e30):
        drafter, _ = drafter_of(lambda tokens, scale=scale: np.full(VOCAB, scale, np.float32))
        drafter.begin(PROMPT)
        tree = drafter.propose(PROMPT[-1], budget(3, min_reach=0.3))
        middle = 0.05  # of the bucket that 1 / VOCAB is in
        np.testing.assert_allclose(tree.confidence, [1, middle**0.5], atol=1e-6)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_no_more_is_drafted_than_the_budget_allows(count: int) -> None:
    drafter, session = drafter_of(sharp(0))
    drafter.begin(PROMPT)
    assert len(drafter.propose(PROMPT[-1], budget(count))) == 1 + count
    assert len(session.taken()) == count


@pytest.mark.parametrize("call", ["forward", "prefill", "commit", "rollback"])
def test_after_an_interrupt_the_draft_draft_tokens_as_before(call: str) -> None:
    """Ctrl-C may come right after anything that the session did."""
    drafter, session = drafter_of(sharp(0))
    drafter.begin(PROMPT)
    observe(drafter, drafter.propose(PROMPT[-1], budget(4)), [1, 2])
    done = getattr(session, call)

    def interrupted(*arguments: Any) -> None:
        done(*arguments)
        raise KeyboardInterrupt

    setattr(session, call, interrupted)
    drafter.begin([*PROMPT[:2], *[7] * 20])
    with pytest.raises(KeyboardInterrupt):
        drafter.propose(7, budget(4))
    setattr(session, call, done)
    for prompt in ([*PROMPT, 1, 2, 6], [*PROMPT[:2], *[7] * 20], PROMPT):
        drafter.begin(prompt)
        drafter.propose(prompt[-1], budget(1))
        assert session.committed == prompt


def test_a_draft_lends_its_session_to_the_newest_drafter() -> None:
    draft = Draft(ScriptedModel(sharp(0), VOCAB), VOCAB)
    first = draft.make_drafter()
    first.begin(PROMPT)
    first.propose(PROMPT[-1], budget(2))
    second = draft.make_drafter()
    second.begin([9, 9])
    assert second.propose(9, budget(1)).tokens[1] == sharp(0)((9, 9)).argmax()
    draft.close()


def test_a_drafter_that_was_made_and_not_used_disturbs_no_other() -> None:
    """As where an engine refuses another choice of drafters and goes on with its own."""
    draft = Draft(ScriptedModel(sharp(0), VOCAB), VOCAB)
    first = draft.make_drafter()
    first.begin(PROMPT)
    tree = first.propose(PROMPT[-1], budget(2))
    draft.make_drafter()
    draft_tokens = tree.tokens[1:].tolist()
    observe(first, tree, [*draft_tokens, 9])
    expected = sharp(0)((*PROMPT, *draft_tokens, 9)).argmax()
    assert first.propose(9, budget(1)).tokens[1] == expected
    draft.close()


def test_the_suffix_drafter_goes_first_and_the_draft_catches_up(decode: Any, greedy: Any) -> None:
    model = ScriptedModel(sharp(0, order=1), VOCAB)  # soon repeats itself
    drafter, _ = drafter_of(sharp(0, order=1))
    run = decode(model, PROMPT, [SuffixDrafter(), drafter], max_tokens=80)
    assert run.tokens == greedy(model, PROMPT, 80)
    assert {token.drafter for token in run.decoded} >= {"suffix", "draft-model"}
