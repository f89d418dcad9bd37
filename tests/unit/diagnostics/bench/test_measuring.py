"""Who is measured when, and what is left of a measurement that ends early."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    BenchPlan,
    Run,
    Task,
    make_plan,
    measure,
    own_sides,
)
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.text.prompt_files import Prompt

WARM_UP = (9, 9)


@dataclass
class FakeSide:
    """Writes down what it is asked for; at one of its calls something happens."""

    name: str
    log: list[tuple[str, tuple[int, ...]]]
    fault: BaseException | None = None
    at: int = 0
    calls: int = field(default=0)

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Run:
        self.calls += 1
        if self.fault is not None and self.calls == self.at:
            raise self.fault
        self.log.append((self.name, tuple(prompt)))
        return Run((1,), Stats(predicted_n=1, predicted_ms=1e3))


def planned(num_tasks: int, repetitions: int) -> BenchPlan:
    tasks = [Task(Prompt(str(i), "any", "x"), (i, i)) for i in range(num_tasks)]
    return BenchPlan(tasks, [], WARM_UP, 4, repetitions, room=100)


def quiet(what: str, fraction: float) -> None:
    assert 0 <= fraction < 1


@pytest.mark.parametrize("num_tasks", [2, 3])
def test_each_of_two_sides_goes_first_as_often_as_the_other(num_tasks: int) -> None:
    log: list[tuple[str, tuple[int, ...]]] = []
    sides = [FakeSide(name, log) for name in ("a", "b", "c")]
    measured = measure(sides, planned(num_tasks, 2), quiet)
    turns = [each for each in log if each[1] != WARM_UP]
    for i in range(num_tasks):
        order = [name for name, prompt in turns if prompt == (i, i)]
        assert sorted([order[0], order[3]]) == ["a", "b"]  # in its two repetitions
        assert order[2] == order[5] == "c"
    assert all(len(runs) == 2 for each in measured.answered for runs in each.runs.values())


def test_a_side_that_fails_is_given_up_and_the_others_go_on() -> None:
    sides = [
        FakeSide("a", []),
        FakeSide("b", []),
        FakeSide("c", [], RuntimeError("gone"), 3),
    ]
    measured = measure(sides, planned(3, 2), quiet)
    assert measured.failures == {"c": "RuntimeError: gone"}
    assert [list(each.runs) for each in measured.answered] == [["a", "b"]] * 3
    assert sides[2].calls == 3 and not measured.partial


def test_our_own_failure_ends_it() -> None:
    sides = [FakeSide(DRAFTING, [], RuntimeError("broken"), 2), FakeSide(PLAIN, [])]
    with pytest.raises(RuntimeError, match="broken"):
        measure(sides, planned(2, 1), quiet)


def test_both_sides_of_an_engine_write_the_same_and_only_one_drafts(
    make_engine: Any, remembers_all: Any
) -> None:
    engine = make_engine(remembers_all(), [SuffixDrafter()], FixedPolicy(min_confidence=0.0))
    plan = make_plan(engine, [Prompt("1", "a", "one two one two one two")], 16, 2)
    measured = measure(own_sides(engine), plan, quiet)
    drafted, plain = (measured.answered[0].runs[name] for name in (DRAFTING, PLAIN))
    assert {run.tokens for run in drafted} == {run.tokens for run in plain}
    assert all(run.stats.draft_n > 0 for run in drafted)
    assert all(run.stats.plain_reasons == {"off": run.stats.rounds} for run in plain)
    assert all(run.seconds > 0 for run in drafted + plain)
