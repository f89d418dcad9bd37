"""Trials: forecasts that were wrong are found out before a plan is kept, on synthetic machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from edge_spec.models.memory import FreeMemory
from edge_spec.placement.place_work import OnStep, PlaceError
from edge_spec.placement.replay import Recording
from edge_spec.placement.trial import Prompts, Trials
from edge_spec.scheduler.plan_file import Place, Placement
from fixtures.silence import quiet

MB = 1_000_000
FREE = FreeMemory(500 * MB)
HERE, THERE = (Place(name, "cpu", None, "Q4_K", "1") for name in ("llamacpp", "ort"))
DRAFT = Place("llamacpp", "cpu", 1, "Q5_0", "1")


def forecast(drafter: str, rate: float, target: Place = HERE, **more: object) -> Placement:
    found = Placement(target, None, drafter, rate, acceptance=0.7, memory_bytes=100 * MB)
    return replace(found, **more)  # type: ignore[arg-type]


def recorded(length: int) -> Recording:
    return Recording("", (1,) * length, (2,), np.zeros((1, 1), np.int32), np.zeros((1, 1)))


@dataclass
class Machine:
    """Writes as fast as it is said to, by place and drafter; None: it fails. asked: drafters and
    tokens of each answer, of each trial."""

    rates: Mapping[tuple[Place, str], float | None]
    asked: list[tuple[list[str], int]] = field(default_factory=list)

    def __call__(
        self, placements: Sequence[Placement], prompts: Prompts, num_tokens: int, on_step: OnStep
    ) -> list[float]:
        assert len({each.target for each in placements}) == 1  # which are open at once
        assert len({each.draft for each in placements} - {None}) <= 1
        self.asked.append(([each.drafter for each in placements], num_tokens))
        found = []
        for each in placements:
            rate = self.rates[each.target, each.drafter]
            if rate is None:
                raise PlaceError("the device was lost")
            found.append(rate)
        return found


def settled(machine: Machine, *found: Placement) -> tuple[tuple[Placement, ...], list[str]]:
    texts = [recorded(length) for length in (50, 10, 40, 20, 30)]
    trials = Trials(machine, FREE, {HERE: "suffix", THERE: "suffix"}, texts, quiet)
    return trials.settle(found), trials.notes


PAIR = forecast("draft-model", 60.0, draft=DRAFT, memory_bytes=200 * MB, guess_share=0.4)
PLAIN = forecast("none", 50.0, step_s=1 / 50)


def test_a_forecast_that_does_not_come_true_is_dropped_and_one_line_says_so() -> None:
    rates = {(HERE, "draft-model"): 45.0, (HERE, "suffix"): 54.0, (HERE, "none"): 50.0}
    (first, *others), notes = settled(Machine(rates), PAIR, forecast("suffix", 55.0), PLAIN)
    assert (first.drafter, first.tokens_per_s, first.is_measured) == ("suffix", 54.0, True)
    assert [each.drafter for each in others] == ["none", "draft-model"]
    assert others[1].reason == "17% slower: a draft token takes 0.40 of a step"
    assert notes == [
        "llamacpp cpu, draft on llamacpp cpu 1 thread, drafter draft-model: 60.0 tokens/s were "
        "forecast and 45.0 written, 54.0 with suffix and no draft"
    ]


def test_nothing_is_kept_that_is_slower_than_plain_decoding() -> None:
    rates = {(HERE, "suffix"): 48.0, (HERE, "none"): 50.0}
    (first, _), notes = settled(Machine(rates), forecast("suffix", 55.0), PLAIN)
    assert first.drafter == "none" and first.reason == "" and len(notes) == 1


@pytest.mark.parametrize(
    ("drafter", "rate", "first"),
    [("b", 58.0, "suffix"), ("b", 61.0, "b"), ("none", 56.0, "suffix"), ("none", 57.0, "none")],
)
def test_the_default_stays_unless_another_is_clearly_faster(
    drafter: str, rate: float, first: str
) -> None:
    """A few short texts of one kind say little of others."""
    rates = {(HERE, "suffix"): 55.0, (HERE, "b"): 50.0, (HERE, "none"): 50.0}
    found = [forecast("b", 60.0), forecast("suffix", 55.0), PLAIN]
    (best, *others), _ = settled(Machine({**rates, (HERE, drafter): rate}), *found)
    assert best.drafter == first and best.reason == ""
    if first == "suffix":
        assert others[0].reason == "no faster than other texts may turn it: the default stays"


def test_a_place_that_fails_when_it_is_tried_is_left_out_with_its_reason() -> None:
    rates = {(HERE, "draft-model"): None, (HERE, "suffix"): 54.0, (HERE, "none"): 50.0}
    found, notes = settled(Machine(rates), PAIR, forecast("suffix", 55.0), PLAIN)
    assert [each.drafter for each in found] == ["suffix", "none"] and found[0].is_measured
    assert notes == [f"{PAIR}: the device was lost"]


@pytest.mark.parametrize(("plain", "is_certain"), [(50.0, True), (35.0, True), (30.0, False)])
def test_what_was_tried_on_a_busy_machine_is_not_certain(plain: float, is_certain: bool) -> None:
    """Plain decoding has no reason to be much slower than its passes but other processes."""
    machine = Machine({(HERE, "suffix"): plain + 3, (HERE, "none"): plain})
    trials = Trials(machine, FREE, {HERE: "suffix"}, [recorded(10)], quiet)
    trials.settle([forecast("suffix", 55.0), PLAIN])
    assert trials.is_certain is is_certain
    assert any("the machine was busy" in line for line in trials.notes) is not is_certain
