"""Growing trees best first, and learning how likely draft tokens are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.tree_builder import Candidate, LearntAcceptance, grow

PRIORS = (0.9, 0.6, 0.3, 0.1)


def expander(seed: int) -> Any:
    """What may follow a state (a path): up to three different tokens of random kinds."""

    def expand(path: tuple[int, ...]) -> list[Candidate[tuple[int, ...]]]:
        rng = np.random.default_rng([seed, *path])
        tokens = rng.permutation(5)[: rng.integers(0, 4)].tolist()
        return [Candidate(t, int(rng.integers(len(PRIORS))), (*path, t)) for t in tokens]

    return expand


budgets = st.builds(
    lambda **limits: Budget(**limits),  # of a tuple, hypothesis would draw all fields
    num_draft_tokens=st.integers(1, 5),
    num_rows=st.integers(1, 12),
    branches=st.booleans(),
    min_reach=st.sampled_from([0.0, 0.05, 0.3, 0.6]),
)


@given(seed=st.integers(0, 10_000), budget=budgets)
def test_a_grown_tree_keeps_its_budget_and_its_order(seed: int, budget: Budget) -> None:
    tree = grow("test", 4, budget, LearntAcceptance(PRIORS), (), expander(seed)).tree
    assert tree.tokens[0] == 4 and len(tree) <= budget.num_rows
    assert tree.depths.max() <= budget.num_draft_tokens
    assert (np.diff(tree.reach) <= 1e-6).all()  # float32 confidences
    assert set(tree.proposed_by[1:]) <= {"test"}
    if not budget.branches:
        assert tree.is_chain
    for row in range(len(tree)):
        children = tree.children(row)
        assert len({int(tree.tokens[child]) for child in children}) == len(children)
        assert tree.confidence[children].sum() <= 1 + 1e-6
    # What is unlikely is proposed so that it is learnt about, and never grown from.
    unlikely = np.flatnonzero(tree.reach < budget.min_reach - 1e-6)
    assert len(unlikely) <= 3
    assert not set(tree.parents.tolist()) & set(unlikely.tolist())


@given(seed=st.integers(0, 10_000), num_rows=st.integers(2, 12))
def test_no_row_left_out_is_likelier_than_one_that_is_in(seed: int, num_rows: int) -> None:
    everything = Budget(num_draft_tokens=3, num_rows=1000)
    acceptance, expand = LearntAcceptance(PRIORS), expander(seed)
    whole = grow("test", 4, everything, acceptance, (), expand).tree
    part = grow("test", 4, Budget(3, num_rows), acceptance, (), expand).tree
    assert len(part) == min(num_rows, len(whole))
    best = sorted(whole.reach.tolist(), reverse=True)[: len(part)]
    assert part.reach.tolist() == pytest.approx(best, abs=1e-6)  # float32 confidences


@given(seed=st.integers(0, 10_000), passes=st.integers(0, 6), least=st.sampled_from([0.02, 0.2]))
def test_siblings_that_cost_no_pass_are_proposed_below_what_a_pass_is_worth(
    seed: int, passes: int, least: float
) -> None:
    asked: list[tuple[int, ...]] = []

    def expand(path: tuple[int, ...]) -> list[Candidate[tuple[int, ...]]]:
        asked.append(path)
        return expander(seed)(path)

    budget = Budget(6, 12, min_reach=0.5, least_reach=least)
    tree = grow("test", 4, budget, LearntAcceptance(PRIORS), (), expand, passes).tree
    assert len(asked) <= passes
    grown_from = set(tree.parents.tolist()[1:])
    assert all(tree.reach[row] >= 0.5 - 1e-6 for row in grown_from)
    # Of each row that was read, all that is worth its row; of others one, to learn from.
    for path in asked:
        rated = sorted((PRIORS[each.kind] for each in expander(seed)(path)), reverse=True)
        if not path and len(tree) < budget.num_rows:
            left, worth = 1.0, 0
            for chance in rated:
                worth += min(chance, left) >= least
                left -= min(chance, left)
            assert len(tree.children(0)) >= worth
    assert int((tree.reach < least - 1e-6).sum()) <= 3


@given(outcomes=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=50))
def test_counts_survive_a_snapshot(outcomes: list[tuple[int, bool]]) -> None:
    acceptance, fresh = LearntAcceptance(PRIORS), LearntAcceptance(PRIORS)
    for kind, right in outcomes:
        acceptance.observe(kind, right)
    fresh.load(acceptance.state())
    counts = acceptance.state()["acceptance"]
    assert fresh.state()["acceptance"].tolist() == counts.tolist()
    fresh.load(acceptance.state(learnt_only=True), learnt_only=True)
    learnt = fresh.state()["acceptance"]
    assert learnt[:2].tolist() == counts[:2].tolist() and not learnt[2:].any()
    with pytest.raises(ValueError):
        LearntAcceptance((0.5,)).load(acceptance.state())
    with pytest.raises(ValueError):
        fresh.load(acceptance.state(learnt_only=True))


@pytest.mark.parametrize(
    "counts",
    [
        [[1.0], [0.5]],
        [[1.0, 0.0, 1.0, 1.0], [0.5, 0.0, 0.5, 0.5]],
        [[1.0, 1.0, 1.0, 1.0], [0.5, 2.0, 0.5, 0.5]],
        [[1.0, 1.0, 1.0, 1.0], [0.5, -0.5, 0.5, 0.5]],
        [[1.0, np.inf, 1.0, 1.0], [0.5, 0.5, 0.5, 0.5]],
        [[1.0, 1.0, 1.0, 1.0], [0.5, np.nan, 0.5, 0.5]],
    ],
)
def test_counts_that_cannot_be_are_refused(counts: list[list[float]]) -> None:
    acceptance = LearntAcceptance(PRIORS)
    with pytest.raises(ValueError, match="acceptance counts"):
        acceptance.load({"acceptance": np.array(counts)})
    assert acceptance.estimate(1) == pytest.approx(PRIORS[1])
