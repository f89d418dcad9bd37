"""Token recycling: which tokens it keeps, what it makes of them, and that no text changes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.control.policy import FixedPolicy
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.drafters.lookup.recycling import (
    MAX_TABLE_TOKENS,
    TOP_TOKENS,
    RecyclingDrafter,
    top_tokens,
)
from edge_spec.drafters.protocol import Budget
from edge_spec.testing import NextLogits, ScriptedModel, random_logits
from fixtures.axes import each

CHILDREN = Budget(num_draft_tokens=1, num_rows=64)
BUDGET = Budget(num_draft_tokens=6, num_rows=16)
EAGER = FixedPolicy(min_confidence=0.05)

# Below, at and above the size from which blocks are used (64 * 9), and no multiples of 64.
VOCAB_SIZES = [1, 3, 8, 63, 64, 65, 511, 513, 575, 576, 577, 639, 640, 641, 1000, 4097, 49_157]


@pytest.mark.parametrize(("rows", "count"), each([1, 2, 17], [3, TOP_TOKENS, 1]))
def test_the_largest_logits_are_found(rows: int, count: int) -> None:
    for vocab_size in VOCAB_SIZES:
        rng = np.random.default_rng([vocab_size, rows])
        logits = rng.permuted(np.arange(rows * vocab_size, dtype=np.float32)).reshape(rows, -1)
        before, most = logits.copy(), min(count, vocab_size)
        expected = np.argsort(-logits, axis=1)[:, :most]
        assert top_tokens(logits, most).tolist() == expected.tolist(), vocab_size
        assert np.array_equal(logits, before)


def test_the_largest_logits_are_found_wherever_they_lie() -> None:
    for vocab_size in VOCAB_SIZES:
        rising = np.arange(vocab_size, dtype=np.float32)
        # All of them among the tokens that are looked at together, or in the last, incomplete
        # block.
        together = np.isin(rising, np.arange(64) * (vocab_size // 64)) * 1e6 + rising
        last = (rising >= vocab_size // 64 * 64) * 1e6 - rising
        logits = np.stack([rising, -rising, together, last]).astype(np.float32)
        count = min(TOP_TOKENS, vocab_size)
        expected = np.argsort(-logits, axis=1)[:, :count]
        assert top_tokens(logits, count).tolist() == expected.tolist(), vocab_size


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_only_equal_logits_may_change_places(levels: int) -> None:
    for vocab_size in VOCAB_SIZES:
        logits = np.random.default_rng(vocab_size).integers(0, levels, (5, vocab_size))
        logits = logits.astype(np.float32)
        count = min(TOP_TOKENS, vocab_size)
        found = top_tokens(logits, count)
        expected = -np.sort(-logits, axis=1)[:, :count]
        assert np.take_along_axis(logits, found, axis=1).tolist() == expected.tolist(), vocab_size
        assert all(len(set(row)) == count for row in found.tolist()), vocab_size


def score(model: ScriptedModel, text: Sequence[int], tree: TokenTree) -> tuple[Forward, Verdict]:
    """One round after `text`, which ends with the pending token."""
    session = model.open_session()
    session.prefill(text[:-1])
    out = session.forward(tree)
    return out, verify(tree, out, Sampler(SamplingParams(), text))


def draft_tokens(drafter: RecyclingDrafter, token: int) -> set[int]:
    """All that may follow a token."""
    return set(drafter.propose(token, CHILDREN).tokens[1:].tolist())


def best(next_logits: NextLogits, *text: int) -> set[int]:
    return set(np.argsort(-next_logits(text))[:TOP_TOKENS].tolist())


def test_every_row_is_kept_the_rejected_ones_too(make_tree: Any) -> None:
    model = ScriptedModel(random_logits(40, order=2), 40)
    drafter = RecyclingDrafter()
    drafter.begin([5, 6])
    assert not draft_tokens(drafter, 6)
    tree = make_tree(6, [1, 2, 3, 4], [0, 0, 1, 2])
    out, verdict = score(model, [5, 6], tree)
    assert len(verdict.kept) < 5
    drafter.observe(tree, out, verdict)
    assert draft_tokens(drafter, 6) == best(model.next_logits, 5, 6)
    assert draft_tokens(drafter, 1) == best(model.next_logits, 6, 1)
    assert draft_tokens(drafter, 2) == best(model.next_logits, 6, 2)
    assert draft_tokens(drafter, 3) == best(model.next_logits, 1, 3)
    assert draft_tokens(drafter, 4) == best(model.next_logits, 2, 4)
    assert not draft_tokens(drafter, 5)  # never scored


def test_a_vocabulary_smaller_than_the_table_is_wide() -> None:
    drafter = RecyclingDrafter()
    drafter.begin([1])
    for vocab_size in (1, 2, 5):
        out = Forward(np.random.default_rng(0).normal(size=(1, vocab_size)).astype(np.float32))
        drafter.observe(TokenTree.chain(1), out, Verdict((0,), (), False))
        assert draft_tokens(drafter, 1) == set(range(vocab_size))


def test_padding_is_not_kept() -> None:
    model = ScriptedModel(random_logits(40), 40)
    drafter = RecyclingDrafter()
    drafter.begin([5])
    tree = TokenTree.chain(5, [7])
    out, verdict = score(model, [5], tree.padded(4))
    drafter.observe(tree, out, verdict)
    assert draft_tokens(drafter, 7) and not draft_tokens(drafter, 0)


@pytest.mark.parametrize("accepted_first", [True, False])
def test_of_rows_with_the_same_token_the_one_in_the_text_counts(
    make_tree: Any, accepted_first: bool
) -> None:
    model = ScriptedModel(random_logits(40, order=2), 40)
    right = int(model.next_logits((5, 6)).argmax())
    wrong = right + 1
    tokens = [right, wrong, right] if accepted_first else [wrong, right, right]
    parents = [0, 0, 2] if accepted_first else [0, 1, 0]
    tree = make_tree(6, tokens, parents)
    out, verdict = score(model, [5, 6], tree)
    assert verdict.accepted_rows == ((1,) if accepted_first else (3,))
    assert best(model.next_logits, 6, right) != best(model.next_logits, wrong, right)
    drafter = RecyclingDrafter()
    drafter.begin([5, 6])
    drafter.observe(tree, out, verdict)
    assert draft_tokens(drafter, right) == best(model.next_logits, 6, right)


def test_a_later_round_counts_more_than_an_earlier_one() -> None:
    model = ScriptedModel(random_logits(40, order=2), 40)
    drafter = RecyclingDrafter()
    drafter.begin([5, 6])
    for text in ([5, 6], [9, 6]):
        tree = TokenTree.chain(6)
        drafter.observe(tree, *score(model, text, tree))
    assert draft_tokens(drafter, 6) == best(model.next_logits, 9, 6)


def score_tokens(drafter: RecyclingDrafter, tokens: Sequence[int]) -> None:
    """As rows of one round, in this order, all rejected but the first."""
    logits = np.random.default_rng(tokens[0]).normal(size=(len(tokens), 1000)).astype(np.float32)
    tree = TokenTree.chain(tokens[0], tokens[1:])
    drafter.observe(tree, Forward(logits), Verdict((0,), (), False))


def size_in_bytes(held: Any) -> int:
    size = sys.getsizeof(held)
    if isinstance(held, dict):
        return size + sum(size_in_bytes(key) + size_in_bytes(held[key]) for key in held)
    if isinstance(held, (tuple, list)):
        return size + sum(map(size_in_bytes, held))
    if isinstance(held, np.ndarray) and held.base is not None:
        return size + size_in_bytes(held.base)
    return size


def test_the_table_is_bounded_and_forgets_what_was_scored_least_lately() -> None:
    drafter = RecyclingDrafter()
    drafter.begin([0])
    for start in range(1000, 1000 + MAX_TABLE_TOKENS, 32):
        score_tokens(drafter, range(start, start + 32))
    assert len(drafter._table) == MAX_TABLE_TOKENS
    score_tokens(drafter, [500, 1003, 1001])  # 500 is new; 1001 and 1003 are the latest now
    assert len(drafter._table) == MAX_TABLE_TOKENS
    assert not draft_tokens(drafter, 1002) and draft_tokens(drafter, 1004)
    score_tokens(drafter, [501, 502, 503])
    assert not any(draft_tokens(drafter, token) for token in (1004, 1005, 1006))
    # Row 0 of a round, 1000, is a row of the text and comes after its rejected ones.
    kept = (500, 501, 502, 503, 1000, 1001, 1003, 1007)
    assert all(draft_tokens(drafter, token) for token in kept)
    assert 0 < size_in_bytes(drafter._table) < 2_000_000


def test_a_restored_table_is_no_larger() -> None:
    drafter, fresh = RecyclingDrafter(), RecyclingDrafter()
    drafter.begin([0])
    for start in range(0, MAX_TABLE_TOKENS, 64):
        score_tokens(drafter, range(start, start + 64))
    fresh.restore(drafter.snapshot())
    assert size_in_bytes(fresh._table) < 2_000_000
    score_tokens(fresh, [MAX_TABLE_TOKENS])
    assert draft_tokens(fresh, MAX_TABLE_TOKENS)
    # The order of the table is part of the snapshot. Token 0 is the row of the text, the latest.
    assert draft_tokens(fresh, 0) and not draft_tokens(fresh, 1)


def table_of(next_logits: NextLogits, vocab_size: int) -> RecyclingDrafter:
    """A drafter that has seen every token scored once, after token 0."""
    drafter = RecyclingDrafter()
    drafter.begin([0])
    model = ScriptedModel(next_logits, vocab_size)
    for token in range(vocab_size):
        tree = TokenTree.chain(token)
        drafter.observe(tree, *score(model, [0, token], tree))
    return drafter


@given(seed=st.integers(0, 39), num_rows=st.integers(1, 30), depth=st.integers(1, 6))
def test_rows_come_in_falling_reach_within_the_budget(seed: int, num_rows: int, depth: int) -> None:
    drafter = table_of(random_logits(40, order=1), 40)
    tree = drafter.propose(seed, Budget(depth, num_rows))
    assert tree.tokens[0] == seed
    assert len(tree) == (min(num_rows, 1 + TOP_TOKENS) if depth == 1 else num_rows)
    assert (np.diff(tree.reach) <= 1e-6).all() and tree.depths.max() <= depth
    for row in range(len(tree)):
        tokens = tree.tokens[tree.children(row)].tolist()
        assert len(set(tokens)) == len(tokens) <= TOP_TOKENS
        assert set(tokens) <= best(random_logits(40, order=1), int(tree.tokens[row]))
    assert set(tree.proposed_by[1:]) <= {"recycling"} and not tree.required


def test_without_branches_the_best_tokens_follow_each_other() -> None:
    next_logits = random_logits(40, order=1)
    drafter = table_of(next_logits, 40)
    tree = drafter.propose(3, Budget(5, 16, branches=False))
    assert tree.is_chain and len(tree) == 6
    expected = [3]
    for _ in range(5):
        expected.append(int(next_logits((expected[-1],)).argmax()))
    assert tree.tokens.tolist() == expected


def fixed(rows: dict[int, Sequence[float]]) -> NextLogits:
    """The logits after each token."""
    return lambda tokens: np.array(rows[tokens[-1]], np.float32)


def confidence(drafter: RecyclingDrafter, token: int) -> dict[int, float]:
    tree = drafter.propose(token, CHILDREN)
    return dict(zip(tree.tokens.tolist()[1:], tree.confidence.tolist()[1:], strict=True))


def test_a_wider_gap_and_a_better_rank_give_more_confidence() -> None:
    near, wide = [5, 4.9, 4.8, 0], [9, 1, 0.5, 0]
    drafter = table_of(fixed({0: near, 1: wide, 2: near, 3: near}), 4)
    close, sure = confidence(drafter, 0), confidence(drafter, 1)
    assert 0 < close[0] < sure[0] < 1
    assert close[0] > close[1] > close[2] > 0 and close[1] > sure[1]


def test_confidence_is_learnt_for_each_rank_and_gap() -> None:
    near, wide = [5, 4.9, 0, -2], [9, 1, 0.5, 0]
    model = ScriptedModel(fixed({0: near, 1: wide, 2: near, 3: near}), 4)
    drafter = table_of(model.next_logits, 4)
    before = confidence(drafter, 0)
    for _ in range(60):  # after token 1 the text never goes on with the best token
        drafter.propose(1, CHILDREN)
        tree = TokenTree.chain(1)
        out, _ = score(model, [0, 1], tree)
        drafter.observe(tree, out, Verdict((3,), (), False))
    wrong = confidence(drafter, 1)
    assert wrong[0] < 0.2 < 0.7 < wrong[3]  # the fourth, of a wide gap
    # A narrow gap is another kind, and so is another rank.
    after = confidence(drafter, 0)
    assert after[0] == pytest.approx(before[0]) and after[1] == pytest.approx(before[1])


def test_the_second_best_comes_first_where_it_was_right_more_often() -> None:
    near = [5, 4.9, 0, -2]
    model = ScriptedModel(fixed(dict.fromkeys(range(4), near)), 4)
    drafter = table_of(model.next_logits, 4)
    assert drafter.propose(2, CHILDREN).tokens[1] == 0
    for _ in range(40):
        drafter.propose(2, CHILDREN)
        tree = TokenTree.chain(2)
        out, _ = score(model, [0, 2], tree)
        drafter.observe(tree, out, Verdict((1,), (), False))
    assert drafter.propose(2, CHILDREN).tokens[1] == 1
    assert drafter.propose(2, Budget(1, 8, branches=False)).tokens.tolist() == [2, 1]


def test_a_round_without_a_proposal_teaches_nothing() -> None:
    drafter = table_of(random_logits(40, order=1), 40)
    out = Forward(np.zeros((1, 40), np.float32))
    drafter.propose(1, BUDGET)
    drafter.observe(TokenTree.chain(1), out, Verdict((2,), (), False))
    learnt = drafter.snapshot()["acceptance"]
    drafter.observe(TokenTree.chain(2), out, Verdict((3,), (), False))
    # Nor does one that was interrupted before its outcome was known.
    drafter.propose(1, BUDGET)
    drafter.begin([0, 1])
    drafter.observe(TokenTree.chain(1), out, Verdict((2,), (), False))
    assert np.array_equal(drafter.snapshot()["acceptance"], learnt)


SYSTEM = [9, 8, 7, 6]


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ([*SYSTEM, 1, 2, 30, 31, 3], True),  # the next turn
        ([*SYSTEM, 1, 2], True),  # the same question again
        ([*SYSTEM, 1, 4], False),
        ([*SYSTEM, 5, 1, 2], False),
        (SYSTEM, False),
        ([1, 2], False),
    ],
)
def test_the_table_belongs_to_a_conversation(decode: Any, prompt: list[int], kept: bool) -> None:
    model = ScriptedModel(random_logits(40), 40)
    drafter = RecyclingDrafter()
    run = decode(model, [*SYSTEM, 1, 2], [drafter])
    drafter.begin(prompt)
    scored = set(run.session.committed[len(SYSTEM) + 1 :])
    assert 2 in scored
    assert all(bool(draft_tokens(drafter, token)) == kept for token in scored)


def content(tree: TokenTree) -> list[list[float]]:
    return [tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.tolist()]


def test_a_snapshot_carries_the_table_and_what_was_learnt(decode: Any) -> None:
    model = ScriptedModel(random_logits(20, order=1), 20)
    drafter, fresh, other = (RecyclingDrafter() for _ in range(3))
    run = decode(model, [1, 2], [drafter], max_tokens=40, policy=EAGER)
    fresh.restore(drafter.snapshot())
    assert sorted(fresh.snapshot()) == sorted(drafter.snapshot())
    for name, array in drafter.snapshot().items():
        assert np.array_equal(fresh.snapshot()[name], array)
        assert fresh.snapshot()[name].dtype == array.dtype
    prompt = [1, 2, *run.tokens, 3]
    for made in (drafter, fresh, other):
        made.begin(prompt)
    for token in run.tokens[:-1]:
        proposed = drafter.propose(token, BUDGET)
        assert len(proposed) > 1
        assert content(proposed) == content(fresh.propose(token, BUDGET))
        assert len(other.propose(token, BUDGET)) == 1


def test_a_drafter_that_has_seen_nothing_has_a_snapshot_too() -> None:
    used, fresh = table_of(random_logits(40), 40), RecyclingDrafter()
    used.restore(fresh.snapshot())
    assert not draft_tokens(used, 1)
    used.begin([1])
    assert len(used.propose(1, BUDGET)) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("acceptance", np.zeros((2, 3))),
        ("acceptance", np.zeros(0)),
        ("prompt", np.zeros((2, 2), np.int32)),
        ("prompt", np.int32(1)),
        ("prompt", np.zeros(2)),
        ("tokens", np.arange(3, dtype=np.int32)),
        ("tokens", np.zeros((40, 1), np.int32)),
        ("tokens", np.arange(40.0)),
        ("entries", np.zeros((40, 16), np.int32)),
        ("entries", np.zeros((40, 3, 8), np.int32)),
        ("entries", np.zeros((39, 2, 8), np.int32)),
        ("entries", np.zeros((40, 2, 8))),
        ("entries", np.full((40, 2, 8), 24, np.int32)),  # no such kind of draft token
        ("entries", np.full((40, 2, 8), -1, np.int32)),
        ("entries", np.int32(0)),
    ],
)
def test_what_is_no_snapshot_is_refused_and_changes_nothing(name: str, value: Any) -> None:
    drafter = table_of(random_logits(40), 40)
    drafter.observe(
        TokenTree.chain(1), Forward(np.zeros((1, 40), np.float32)), Verdict((2,), (), False)
    )
    valid = RecyclingDrafter().snapshot() | {
        "tokens": np.arange(40, dtype=np.int32),
        "entries": np.zeros((40, 2, 8), np.int32),
    }
    before = drafter.snapshot()
    with pytest.raises(ValueError):
        drafter.restore(valid | {name: np.asarray(value)})
    with pytest.raises(KeyError):
        drafter.restore({other: array for other, array in valid.items() if other != name})
    for key, array in before.items():
        assert np.array_equal(drafter.snapshot()[key], array)
    drafter.restore(valid)


def cycle(period: int) -> NextLogits:
    """Each token is followed by the next of `period` tokens, none of the others likely."""

    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(period, np.float32)
        logits[(tokens[-1] + 1) % period] = 9.0
        return logits

    return next_logits


def test_what_was_scored_before_is_drafted_and_accepted(decode: Any) -> None:
    run = decode(ScriptedModel(cycle(12), 12), [0], [RecyclingDrafter()], max_tokens=60)
    assert run.tokens == [(1 + i) % 12 for i in range(60)]
    # Each token is new in the first period; later several are accepted a round.
    assert [each.num_accepted for each in run.rounds[:12]] == [0] * 12
    assert len(run.rounds[12:]) <= 48 / 2
    assert {token.drafter for token in run.decoded if token.drafter} == {"recycling"}


def test_a_text_ends_at_a_stop_token_inside_an_accepted_run(decode: Any) -> None:
    model = ScriptedModel(cycle(12), 12)
    drafter = RecyclingDrafter()
    first = decode(model, [0], [drafter], max_tokens=24, policy=EAGER)
    run = decode(model, [0, *first.tokens], [drafter], stop_ids=[3], policy=EAGER)
    assert run.tokens == [1, 2, 3]
    assert [each.num_accepted for each in run.rounds] == [3]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 30, 31])
def test_a_text_ends_at_its_maximum(decode: Any, max_tokens: int) -> None:
    model = ScriptedModel(cycle(5), 5)
    run = decode(model, [0], [RecyclingDrafter()], max_tokens=max_tokens, policy=EAGER)
    assert run.tokens == [(1 + i) % 5 for i in range(max_tokens)]


@pytest.mark.parametrize("context_length", [2, 3, 20, 21, 22])
def test_a_text_ends_with_the_context(decode: Any, context_length: int) -> None:
    model = ScriptedModel(cycle(5), 5, context_length)
    run = decode(model, [0], [RecyclingDrafter()], max_tokens=100, policy=EAGER)
    assert run.tokens == [(1 + i) % 5 for i in range(context_length)]
