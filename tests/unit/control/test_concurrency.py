"""Several conversations on one target: the more are active, the fewer rows each may score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edge_spec.control.concurrency import Concurrency, SharedPolicy
from edge_spec.control.policy import FixedPolicy, RoundPlan
from edge_spec.core.metrics import PlainReason
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.exactness.lossless import ExactPolicy
from edge_spec.testing import ScriptedModel, random_logits

VOCAB = 12
ALL = Budget(15, 16)


def rows(policy: SharedPolicy, drafters: Sequence[Drafter], budget: Budget = ALL) -> RoundPlan:
    for drafter in drafters:
        drafter.begin([1])
    return policy.choose(drafters, 1, budget)


@pytest.fixture
def chain(tree_drafter: Any) -> Any:
    """Always drafts as much as it may."""

    def candidate(text: tuple[int, ...], budget: Budget) -> tuple[list[int], range]:
        count = budget.num_draft_tokens
        return [2] * count, range(count)

    return tree_drafter(candidate)


def test_load_forgets_who_left_by_an_error() -> None:
    load = Concurrency()
    with pytest.raises(KeyboardInterrupt), load.entered():
        raise KeyboardInterrupt
    assert load.active == 0


@pytest.mark.parametrize(
    ("active", "expected"), [(0, 8), (1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (100, 1)]
)
def test_all_that_are_active_have_equal_parts_of_the_rows(
    active: int, expected: int, chain: Any
) -> None:
    load = Concurrency()
    load.active = active
    plan = rows(SharedPolicy(FixedPolicy(), load, 8), [chain])
    assert len(plan.tree) == expected
    assert plan.plain_reason is (PlainReason.SHARED if expected == 1 else None)


def test_exact_mode_pads_what_is_left(chain: Any) -> None:
    load = Concurrency()
    policy = ExactPolicy(SharedPolicy(FixedPolicy(), load, 4), (2, 4, 8))
    chain.begin([1])
    for active, width in ((1, 4), (2, 2), (4, 2)):
        load.active = active
        plan = policy.choose([chain], 1, ALL)
        assert (plan.num_rows, len(plan.tree)) == (width, max(1, 4 // active))


def test_the_text_is_the_same_however_many_are_active(decode: Any, greedy: Any, chain: Any) -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    load = Concurrency()

    class Changing(FixedPolicy):
        def choose(self, drafters: Any, pending: int, budget: Budget) -> RoundPlan:
            load.active = load.active % 9 + 1
            return super().choose(drafters, pending, budget)

    policy = SharedPolicy(Changing(), load, 8)
    run = decode(model, [1, 2], [chain], max_tokens=40, policy=policy)
    assert run.tokens == greedy(model, [1, 2], 40)
    assert len({stats.num_rows for stats in run.rounds}) > 3
