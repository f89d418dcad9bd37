"""A plan's choice for pairs on machines that are not here, against every way there is, decoded."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.engine.draft_overlap import HYSTERESIS
from edge_spec.placement.chain import Meanwhile

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # scripts, not a package

from pair_regret import PairCase, SimulatedDraft, Way  # noqa: E402
from pair_replay import DraftedText, PairCosts, decode_pair, tokens_per_s  # noqa: E402
from roofline import RooflineModel, SimulatedMachine, Unit  # noqa: E402

# Forecasts know first choices alone: that an overlapped draft has read on after its second one,
# which is right in a third of the other places, they leave out. In turns they leave out nothing.
MOST_REGRET, MOST_REGRET_IN_TURNS = 0.12, 0.01
TARGET, TINY = RooflineModel(4.5, 16, 0.1), RooflineModel(0.08, 0.27, 0.1)
DRAFT = RooflineModel(0.3, 1.0, 0.1)
GPU, NPU = Unit(120, 10, 0.2), Unit(60, 15, 1.0, (1, 4, 8))
MACHINE = SimulatedMachine({"gpu": GPU, "npu": NPU}, None, 0.2)


def texts(share: float, count: int = 2) -> list[DraftedText]:
    """Tokens that a draft has right so often, without any order; of the others its second choice is
    right as often as on the recorded texts, a third."""
    rng = np.random.default_rng(0)
    right, second = rng.random((2, count, 60))
    ranks = np.where(right < share, 0, np.where(second < 1 / 3, 1, 2))
    return [DraftedText(tuple(each.tolist()), (share,) * 60) for each in ranks]


CASE = PairCase(MACHINE, TARGET, {"draft": SimulatedDraft(DRAFT, texts(0.75))}, ["npu"])
GOOD = {"draft": SimulatedDraft(DRAFT, texts(0.95))}


def with_npu(case: PairCase, **changed: Any) -> PairCase:
    units = {**case.machine.units, "npu": replace(NPU, **changed)}
    return replace(case, machine=replace(case.machine, units=units))


def sharing(case: PairCase, memory_gb_s: float) -> PairCase:
    return replace(case, machine=replace(case.machine, memory_gb_s=memory_gb_s))


def held_to_the_best(case: PairCase) -> Way:
    """What is planned, whose regret is small."""
    way, _ = case.planned()
    best = case.best()
    most = MOST_REGRET if best.way.overlaps else MOST_REGRET_IN_TURNS
    assert case.decoded(way).rate >= (1 - most) * best.rate
    return way


@pytest.mark.parametrize(
    ("case", "changed", "drafts", "drafts_then"),
    [
        (CASE, with_npu(CASE, call_ms=1037.7), True, False),
        (CASE, with_npu(CASE, gb_s=6), True, False),
        (CASE, with_npu(CASE, tops=0.01), True, False),
        (CASE, replace(CASE, target=TINY), True, False),
        (CASE, replace(CASE, drafts={"d": SimulatedDraft(DRAFT, texts(0.02))}), True, False),
    ],
    ids=["call", "bandwidth", "operations", "tiny target", "acceptance"],
)
def test_whether_to_draft_follows_from_the_figure_that_decides(
    case: PairCase, changed: PairCase, drafts: bool, drafts_then: bool
) -> None:
    assert (held_to_the_best(case).draft is not None) == drafts
    assert (held_to_the_best(changed).draft is not None) == drafts_then


def test_overlap_follows_from_what_both_units_get_of_one_memory() -> None:
    case = replace(CASE, drafts=GOOD)
    apart, shared = held_to_the_best(case), held_to_the_best(sharing(case, 90))
    assert apart.overlaps and not shared.overlaps
    assert shared.draft is not None  # in turns neither slows the other down


def test_a_slower_call_means_fewer_draft_tokens_and_another_place() -> None:
    quick, slow = held_to_the_best(CASE), held_to_the_best(with_npu(CASE, call_ms=10))
    assert slow.num_draft_tokens < quick.num_draft_tokens
    anywhere = replace(with_npu(CASE, call_ms=10), draft_units=None)
    assert held_to_the_best(anywhere).draft_unit == "gpu"


def test_a_larger_draft_is_taken_where_it_is_right_often_enough() -> None:
    two = {"small": SimulatedDraft(DRAFT, texts(0.4)), "large": SimulatedDraft(DRAFT, texts(0.8))}
    assert held_to_the_best(replace(CASE, drafts=two)).draft == "large"
    dear = {**two, "large": SimulatedDraft(RooflineModel(4.0, 14, 0.1), texts(0.8))}
    assert held_to_the_best(replace(CASE, drafts=dear)).draft == "small"


def test_a_forecast_in_turns_is_what_is_decoded() -> None:
    way, placement = sharing(CASE, 100).planned()
    assert not way.overlaps and placement.tokens_per_s is not None
    assert sharing(CASE, 100).decoded(way).rate == pytest.approx(placement.tokens_per_s, rel=0.01)


def test_overlap_that_was_measured_to_lose_begins_off() -> None:
    """What is known need not be found out by slow rounds."""
    case = sharing(replace(CASE, drafts={"draft": SimulatedDraft(DRAFT, texts(0.75, 8))}), 60)
    way, _ = case.planned()
    rate, stats = case.used(way)
    reasons = sum((each.overlap_reasons for each in stats), start=stats[0].overlap_reasons.copy())
    assert reasons["slower"] > 10 * sum(each.overlapped_n for each in stats)
    tried_first = decode_pair(case.drafts["draft"].texts, case._costs(way), None, None)
    assert rate > (1 + HYSTERESIS) * tokens_per_s(tried_first)


def test_what_is_read_meanwhile_saves_time_and_changes_no_token() -> None:
    costs = PairCosts(lambda rows: 0.03, lambda rows: 0.006, 0.0, Meanwhile(1.0, 1.0))
    one, other = (decode_pair(texts(0.8), costs, 4, overlaps) for overlaps in (False, True))
    assert [each.acceptance_histogram for each in one] == [e.acceptance_histogram for e in other]
    assert tokens_per_s(other) > 1.05 * tokens_per_s(one)
    slowed = costs._replace(meanwhile=Meanwhile(2.0, 2.0))
    assert tokens_per_s(decode_pair(texts(0.8), slowed, 4, True)) < tokens_per_s(one)


def test_every_figure_of_the_machines_has_a_source() -> None:
    table = json.loads((BENCHMARKS / "pair_machines.json").read_text(encoding="utf-8"))
    figures = [*table["models"].values(), *table["drafts"].values(), *table["machines"].values()]
    figures += [
        unit for machine in table["machines"].values() for unit in machine["units"].values()
    ]
    assert {each["source"] for each in figures} == set(table["sources"])
    assert {case["machine"] for case in table["cases"]} == set(table["machines"])
