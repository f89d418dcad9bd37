"""What is verified next: reasons of plain rounds, limits, and the widths of exact mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.metrics import PlainReason
from edge_spec.core.tree import Siblings, TokenTree
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.scheduler.lossless import ExactPolicy
from edge_spec.scheduler.policy import FixedPolicy, RoundPlan, cut

BUDGET = Budget(num_draft_tokens=10, num_rows=20)


class Proposes(Drafter):
    """A drafter with one tree, which records the budgets that it got."""

    name = "fixed"

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        self.budgets: list[Budget] = []

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        pass

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self.budgets.append(budget)
        return self.tree

    def observe(self, *outcome: Any) -> None:
        pass


def with_confidence(parents: list[int], confidence: list[float]) -> TokenTree:
    return TokenTree(
        np.arange(len(parents) + 1, dtype=np.int32),
        np.array([-1, *parents], np.int32),
        np.array([1.0, *confidence], np.float32),
    )


@pytest.mark.parametrize(
    ("parents", "confidence", "kept"),
    [
        ([0, 1, 2], [0.9, 0.9, 0.9], 4),
        ([0, 1, 2], [0.9, 0.5, 0.9], 2),  # 0.9, 0.45, 0.405: the limit is 0.5
        ([0, 1, 2], [0.9, 0.6, 0.9], 3),  # 0.9, 0.54, 0.486
        ([0, 0, 1], [0.6, 0.2, 0.9], 3),  # 0.6, 0.2, 0.54: an unlikely row is left out
        ([0, 0, 2], [0.6, 0.5, 0.9], 3),  # the chance is that of the row's own path
        ([0], [0.4], 1),
    ],
)
def test_rows_are_kept_while_they_are_likely_to_be_reached_and_right(
    parents: list[int], confidence: list[float], kept: int
) -> None:
    drafter = Proposes(with_confidence(parents, confidence))
    plan = FixedPolicy(min_confidence=0.5).choose([drafter], 0, BUDGET)
    assert len(plan.tree) == kept
    assert plan.plain_reason == (PlainReason.BELOW_BREAK_EVEN if kept == 1 else None)


def test_rows_that_a_drafter_needs_are_scored_however_unlikely() -> None:
    tree = replace(
        with_confidence([0, 0, 2, 0], [0.5, 0.01, 0.01, 0.3]),
        required=(True, False, True, True, False),
    )
    plan = FixedPolicy().choose([Proposes(tree)], 0, BUDGET)
    assert plan.tree.tokens.tolist() == [0, 1, 2, 3] and plan.plain_reason is None
    plan = FixedPolicy(max_draft_tokens=2).choose([Proposes(tree)], 0, BUDGET)
    assert plan.tree.tokens.tolist() == [0, 2, 3]


def test_where_rows_may_not_branch_the_most_promising_path_is_verified() -> None:
    # Expected draft tokens: 0.5 for the first path, 0.45 + 0.45 * 0.9 for the second.
    tree = with_confidence([0, 0, 2], [0.5, 0.45, 0.9])
    for policy, budget in (
        (FixedPolicy(branches=False), BUDGET),
        (FixedPolicy(), BUDGET._replace(branches=False)),
    ):
        assert policy.choose([Proposes(tree)], 0, budget).tree.tokens.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    ("draft_tokens", "budget", "reason"),
    [
        (None, BUDGET, PlainReason.OFF),
        ([1], Budget(0, 20), PlainReason.BUDGET),
        ([], BUDGET, PlainReason.NO_CANDIDATE),
        ([1], BUDGET, None),
    ],
)
def test_a_plain_round_says_why(
    draft_tokens: list[int] | None, budget: Budget, reason: PlainReason | None
) -> None:
    drafters = [] if draft_tokens is None else [Proposes(TokenTree.chain(0, draft_tokens))]
    plan = FixedPolicy().choose(drafters, 0, budget)
    assert plan.plain_reason == reason
    assert (len(plan.tree) == 1) == (reason is not None)


def test_a_drafter_that_exceeds_its_budget_is_cut_to_the_budgets_rows() -> None:
    drafter = Proposes(TokenTree.chain(0, list(range(50))))
    assert len(FixedPolicy().choose([drafter], 0, Budget(4, 5)).tree) <= 5


# --- exact mode -------------------------------------------------------------------------------


class Always:
    """A policy with one tree."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree

    def choose(self, drafters: Any, pending: int, budget: Budget) -> RoundPlan:
        tree = self.tree.first_rows(min(budget.num_draft_tokens + 1, budget.num_rows))
        return RoundPlan(tree, PlainReason.BUDGET if len(tree) == 1 else None)


@pytest.mark.parametrize(
    ("rows", "num_rows", "kept", "width"),
    [
        (1, 64, 1, 2),
        (2, 64, 2, 2),
        (3, 64, 3, 4),
        (4, 64, 4, 4),
        (5, 64, 5, 8),
        (30, 64, 8, 8),
        (5, 7, 4, 4),  # a width of 8 does not fit
        (5, 3, 2, 2),
    ],
)
def test_exact_mode_cuts_and_pads_to_measured_widths(
    rows: int, num_rows: int, kept: int, width: int
) -> None:
    tree = TokenTree.chain(0, list(range(1, rows)))
    plan = ExactPolicy(Always(tree), (2, 4, 8)).choose([], 0, Budget(63, num_rows))
    assert len(plan.tree) == kept and plan.num_rows == width
    assert plan.tree.tokens.tolist() == tree.tokens[:kept].tolist()


@given(parents=st.integers(1, 8).flatmap(lambda n: st.tuples(*map(st.integers, [0] * n, range(n)))))
def test_exact_mode_verifies_chains_only(make_tree: Any, parents: tuple[int, ...]) -> None:
    tree = make_tree(0, range(len(parents)), parents)
    plan = ExactPolicy(Always(tree), (1, 4, 16)).choose([], 0, Budget(15, 64))
    assert plan.tree.is_chain
    assert len(plan.tree) == tree.depths.max() + 1  # equally likely rows: the longest path


def test_exact_mode_tells_who_rests() -> None:
    class Resting(Always):
        def choose(self, drafters: Any, pending: int, budget: Budget) -> RoundPlan:
            return super().choose(drafters, pending, budget)._replace(resting=frozenset("a"))

    plan = ExactPolicy(Resting(TokenTree.chain(0, [1])), (1, 4)).choose([], 0, Budget(15, 64))
    assert plan.resting == {"a"}


@pytest.mark.parametrize("rows", [3, 4])
def test_k_seq_siblings_are_kept_or_dropped_together(rows: int) -> None:
    probs = np.full(9, 1 / 9)
    tree = TokenTree(
        np.array([0, 1, 2, 3], np.int32),
        np.array([-1, 0, 0, 0], np.int32),
        np.array([1, 0.3, 0.3, 0.3], np.float32),
        draft_probs=(None, probs, probs, probs),
        siblings=Siblings.K_SEQ,
    )
    plan = cut(tree, Budget(4, rows), 0.1)
    assert (plan.tree if plan else None) is (tree if rows == len(tree) else None)
