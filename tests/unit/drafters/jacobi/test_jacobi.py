"""Jacobi blocks against a plain reimplementation, and that no text changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.drafters.jacobi.jacobi import DEFAULT_BLOCK, JacobiDrafter
from edge_spec.drafters.jacobi.jacobi_init import Filler, JacobiInit
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import NextLogits, ScriptedModel, random_logits

AMPLE = Budget(num_draft_tokens=50, num_rows=50)
OUT = Forward(np.zeros((1, 10), np.float32))


class Round(NamedTuple):
    text: list[int]  # before it; ends with the pending token
    tree: TokenTree
    out: Forward
    verdict: Verdict


def rounds(
    drafter: JacobiDrafter, model: ScriptedModel, prompt: Sequence[int], budgets: Sequence[Budget]
) -> Iterator[Round]:
    """One round a budget."""
    session = model.open_session()
    session.prefill(prompt[:-1])
    text = list(prompt)
    drafter.begin(prompt)
    for budget in budgets:
        tree = drafter.propose(text[-1], budget)
        out = session.forward(tree)
        verdict = verify(tree, out, Sampler(SamplingParams(), prompt))
        session.commit(verdict.kept)
        drafter.observe(tree, out, verdict)
        yield Round(list(text), tree, out, verdict)
        text += verdict.tokens


models = st.builds(
    lambda vocab, order, seed, scale: ScriptedModel(
        # Another function of the tokens for each seed.
        lambda tokens: random_logits(vocab, order, scale)(tuple(t + 10 * seed for t in tokens)),
        vocab,
    ),
    vocab=st.integers(3, 8),
    order=st.integers(1, 4),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.5, 2.0, 5.0]),
)
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8)
budgets = st.builds(
    Budget,
    num_draft_tokens=st.integers(0, 6),
    num_rows=st.integers(1, 7),
    branches=st.booleans(),
)


@given(
    model=models,
    prompt=prompts,
    block=st.integers(1, 6),
    fill=st.sampled_from(JacobiInit),
    limits=st.lists(budgets, min_size=10, max_size=10),
)
def test_draft_tokens_are_the_argmax_of_the_round_before(
    model: ScriptedModel, prompt: list[int], block: int, fill: JacobiInit, limits: list[Budget]
) -> None:
    """Every draft token by its position in the text: refined where the row before it was scored."""
    filler = Filler(fill, seed=3)
    filler.begin(prompt)
    known: dict[int, int] = {}
    made = rounds(JacobiDrafter(fill, block, seed=3), model, prompt, limits)
    for budget, (text, tree, _, verdict) in zip(limits, made, strict=True):
        count = max(0, min(block, budget.num_draft_tokens, budget.num_rows - 1))
        places = range(len(text), len(text) + count)
        missing = [place for place in places if place not in known]
        ahead = [known[place] for place in sorted(known)]
        known |= zip(missing, filler.fill(ahead, len(missing)), strict=True)
        assert tree.is_chain and tree.tokens.tolist() == [text[-1], *(known[p] for p in places)]
        refined = {}
        for place in places:
            path = (*text, *(known[p] for p in places if p <= place))
            refined[place + 1] = int(model.next_logits(path).argmax())
        known |= refined
        known = {p: known[p] for p in known if p >= len(text) + len(verdict.tokens)}
        filler.extend(verdict.tokens)


@given(model=models, prompt=prompts, block=st.integers(0, 8), budget=budgets)
def test_the_block_keeps_the_budget_and_all_of_it_is_scored(
    model: ScriptedModel, prompt: list[int], block: int, budget: Budget
) -> None:
    for each in rounds(JacobiDrafter(block=block), model, prompt, [budget] * 6):
        tree = each.tree
        assert len(tree) == 1 + max(0, min(block, budget.num_draft_tokens, budget.num_rows - 1))
        assert len(tree) == 1 or (tree.required == (True,) * len(tree))
        assert tree.proposed_by == ("", *["jacobi"] * (len(tree) - 1))
        assert tree.likeliest(64, 0.99) is tree
        assert ((tree.confidence > 0) & (tree.confidence <= 1)).all()


def test_the_default_block() -> None:
    drafter = JacobiDrafter()
    drafter.begin([1, 2])
    assert len(drafter.propose(2, AMPLE)) == 1 + DEFAULT_BLOCK


def written(position_logits: NextLogits, count: int, **options: Any) -> list[int]:
    """Tokens accepted in each round."""
    drafter = JacobiDrafter(**options)
    made = rounds(drafter, ScriptedModel(position_logits, 64), [40, 41, 42], [AMPLE] * count)
    return [each.verdict.num_accepted for each in made]


def by_place(tokens: tuple[int, ...]) -> np.ndarray:
    """A text that depends on the position alone, with a period of 12."""
    logits = np.zeros(64, np.float32)
    logits[len(tokens) % 12] = 5.0
    return logits


def constant(tokens: tuple[int, ...]) -> np.ndarray:
    logits = np.zeros(64, np.float32)
    logits[7] = 5.0
    return logits


@pytest.mark.parametrize("fill", JacobiInit)
def test_a_block_converges_at_once_where_its_draft_tokens_do_not_matter(fill: JacobiInit) -> None:
    """All wrong, then the whole block right, since every row wrote its position's token."""
    accepted = written(by_place, 2, fill=fill, block=6)
    assert accepted == [0, 6]


@pytest.mark.parametrize("fill", [JacobiInit.NGRAM, JacobiInit.REPEAT_LAST])
def test_a_constant_text_is_accepted_whole_from_the_second_round_on(fill: JacobiInit) -> None:
    assert written(constant, 6, fill=fill, block=5) == [0, 5, 5, 5, 5, 5]


def test_acceptance_rises_on_a_periodic_text() -> None:
    accepted = written(by_place, 40, block=4)
    assert sum(accepted[:8]) < sum(accepted[-8:]) == 8 * 4


def test_a_text_that_depends_on_its_last_token_converges_one_token_a_round() -> None:
    """Each position is right once the one before it is: a step of the iteration a token."""

    def chain(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(64, np.float32)
        logits[tokens[-1] * 5 % 64] = 5.0
        return logits

    drafter = JacobiDrafter(JacobiInit.RANDOM, block=3)
    made = list(rounds(drafter, ScriptedModel(chain, 64), [33, 11, 3], [AMPLE] * 6))
    for before, after in pairwise(made):
        if len(before.verdict.tokens) > 1:
            continue
        # The draft tokens are those of the round before, moved on by one step of the recurrence.
        previous = before.tree.tokens[1:].tolist()
        assert after.tree.tokens[1:].tolist() == [token * 5 % 64 for token in previous]
    assert any(len(each.verdict.tokens) == 1 for each in made[:-1])


@pytest.mark.parametrize(
    ("fill", "expected"),
    [
        (JacobiInit.REPEAT_LAST, [1, 1, 1, 1]),
        (JacobiInit.NGRAM, [2, 3, 4, 1]),
        (JacobiInit.RANDOM, None),
    ],
)
def test_first_draft_tokens_by_fill(fill: JacobiInit, expected: list[int] | None) -> None:
    drafter, prompt = JacobiDrafter(fill, block=4), [1, 2, 3, 4, 1]
    drafter.begin(prompt)
    found = drafter.propose(1, AMPLE).tokens[1:].tolist()
    assert found == expected if expected else set(found) <= set(prompt)


def test_the_seed_decides_random_draft_tokens() -> None:
    model, prompt = ScriptedModel(random_logits(50), 50), list(range(50))

    def proposed(seed: int) -> list[list[int]]:
        made = rounds(JacobiDrafter(JacobiInit.RANDOM, 4, seed), model, prompt, [AMPLE] * 8)
        return [each.tree.tokens.tolist() for each in made]

    assert proposed(1) == proposed(1) != proposed(2)


def test_draft_tokens_that_were_not_scored_are_kept() -> None:
    drafter = JacobiDrafter(JacobiInit.RANDOM, block=5)
    drafter.begin(list(range(10)))
    draft_tokens = drafter.propose(9, AMPLE).tokens[1:].tolist()
    drafter.observe(TokenTree.chain(9), OUT, Verdict((0,), (), False))
    assert drafter.propose(0, AMPLE).tokens[1:5].tolist() == draft_tokens[1:]
    drafter.observe(TokenTree.chain(0, [77]), OUT, Verdict((0, 0), (), False))
    assert drafter.propose(0, AMPLE).tokens[1:3].tolist() == draft_tokens[3:]


def test_only_the_rows_that_were_scored_refine_draft_tokens() -> None:
    drafter = JacobiDrafter(JacobiInit.RANDOM, block=5)
    drafter.begin(list(range(10)))
    tree = drafter.propose(9, AMPLE)
    logits = np.zeros((3, 20), np.float32)
    logits[[0, 1, 2], [10, 11, 12]] = 1
    drafter.observe(tree.first_rows(3), Forward(logits), Verdict((10,), (), False))
    expected = [11, 12, *tree.tokens[4:].tolist()]
    assert drafter.propose(10, AMPLE).tokens[1:5].tolist() == expected


def test_the_rows_may_lie_anywhere_in_a_tree_of_several_drafters(make_tree: Any) -> None:
    drafter = JacobiDrafter(JacobiInit.REPEAT_LAST, block=2)
    drafter.begin([1])
    assert drafter.propose(1, AMPLE).tokens.tolist() == [1, 1, 1]
    tree = make_tree(1, [5, 1, 6, 1], [0, 0, 1, 2])
    logits = np.zeros((5, 20), np.float32)
    logits[range(5), [10, 11, 12, 13, 14]] = 1
    drafter.observe(tree, Forward(logits), Verdict((10,), (), False))
    assert drafter.propose(10, AMPLE).tokens.tolist() == [10, 12, 14]


def test_beginning_again_forgets_draft_tokens_and_interrupted_rounds() -> None:
    used, fresh = JacobiDrafter(), JacobiDrafter()
    used.begin([1, 2, 3, 1])
    used.propose(1, AMPLE)  # interrupted here
    used.begin([4, 5, 4])
    used.begin([4, 5, 4])
    fresh.begin([4, 5, 4])
    expected = fresh.state_dict()["acceptance"]
    used.observe(TokenTree.chain(4), OUT, Verdict((2,), (), False))
    assert np.array_equal(used.state_dict()["acceptance"], expected)
    used.begin([4, 5, 4])
    assert used.propose(4, AMPLE).tokens.tolist() == fresh.propose(4, AMPLE).tokens.tolist()


def test_confidence_is_learnt_by_how_a_draft_token_came_about() -> None:
    drafter = JacobiDrafter(JacobiInit.REPEAT_LAST, block=4)
    made = list(rounds(drafter, ScriptedModel(constant, 64), [1, 2], [AMPLE] * 3))
    stable = made[1].tree.confidence
    # The first round refined every draft token to 7, the second found them as they were.
    assert made[1].tree.tokens.tolist() == [7, 7, 7, 7, 7]
    assert made[2].tree.confidence[1] > stable[1]  # by now one such draft token was right
    before = JacobiDrafter(JacobiInit.REPEAT_LAST).state_dict()["acceptance"]
    (seen, right) = (drafter.state_dict()["acceptance"] - before)[:2]
    # Filled wrong once and right in the third round; refined right in the second.
    np.testing.assert_allclose(seen, [2, 3, 1, 3, 0, 0], atol=1e-9)
    np.testing.assert_allclose(right, [1, 3, 1, 3, 0, 0], atol=1e-9)


def test_a_round_without_a_proposal_teaches_nothing() -> None:
    drafter = JacobiDrafter(JacobiInit.REPEAT_LAST)
    drafter.begin([1])
    drafter.observe(drafter.propose(1, AMPLE), Forward(np.zeros((4, 10))), Verdict((2,), (), False))
    learnt = drafter.state_dict()["acceptance"]
    drafter.observe(TokenTree.chain(2), OUT, Verdict((3,), (), False))
    drafter.propose(3, Budget(0, 1))
    drafter.observe(TokenTree.chain(3), OUT, Verdict((3,), (), False))
    assert np.array_equal(drafter.state_dict()["acceptance"], learnt)


def test_a_snapshot_carries_what_was_learnt() -> None:
    drafter, fresh = JacobiDrafter(), JacobiDrafter()
    list(rounds(drafter, ScriptedModel(constant, 64), [1, 2], [AMPLE] * 5))
    fresh.load_state_dict(drafter.state_dict())
    assert np.array_equal(fresh.state_dict()["acceptance"], drafter.state_dict()["acceptance"])
    for each in (drafter, fresh):
        each.begin([1, 2, 3, 1])
    one, other = drafter.propose(1, AMPLE), fresh.propose(1, AMPLE)
    assert one.confidence.tolist() == other.confidence.tolist()
    with pytest.raises(ValueError, match="shape"):
        fresh.load_state_dict({"acceptance": np.zeros((2, 7))})
    with pytest.raises(KeyError):
        fresh.load_state_dict({})
    assert np.array_equal(fresh.state_dict()["acceptance"], drafter.state_dict()["acceptance"])


CYCLE = [1, 2, 3, 4, 5, 6]


def cycle(tokens: tuple[int, ...]) -> np.ndarray:
    logits = np.zeros(8, np.float32)
    logits[tokens[-1] % 6 + 1] = 5.0
    return logits


def test_a_text_ends_at_a_stop_token_inside_an_accepted_run(decode: Any) -> None:
    drafter = JacobiDrafter(block=6)
    run = decode(ScriptedModel(cycle, 8), [*CYCLE, *CYCLE, 1], [drafter], stop_ids=[4])
    assert run.tokens == [2, 3, 4]
    assert [each.num_accepted for each in run.rounds] == [3]
    assert {token.drafter for token in run.decoded} == {"jacobi"}


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 8, 9, 10])
def test_a_text_ends_at_its_maximum(decode: Any, max_tokens: int) -> None:
    drafter = JacobiDrafter(block=6)
    run = decode(ScriptedModel(cycle, 8), [*CYCLE, *CYCLE], [drafter], max_tokens=max_tokens)
    assert run.tokens == (CYCLE * 2)[:max_tokens]


@pytest.mark.parametrize("context_length", [12, 13, 14, 20, 21])
def test_a_text_ends_with_the_context(decode: Any, context_length: int) -> None:
    model = ScriptedModel(cycle, 8, context_length)
    run = decode(model, [*CYCLE, *CYCLE], [JacobiDrafter(block=6)], max_tokens=100)
    assert run.tokens == (CYCLE * 3)[: context_length - 11]
