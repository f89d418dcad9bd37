"""Which drafters "auto" stands for follows from what rows cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.profile import cheap_rows

CHEAP = {1: 0.030, 2: 0.030, 4: 0.033, 8: 0.037}  # 1.5B in 4 bits, on AVX-512 VNNI
DEAR = {1: 0.027, 2: 0.026, 4: 0.035, 8: 0.060}  # the same, with kernels for AVX2
SHORT = {1: 0.0020, 2: 0.0022, 4: 0.0025, 8: 0.0028}  # of a small model, cheap beside each other


@pytest.mark.parametrize(
    ("seconds", "names"),
    [(CHEAP, ["suffix", "recycling"]), (DEAR, ["suffix"]), (SHORT, ["suffix"])],
)
def test_recycling_is_among_them_where_its_rows_are_cheap(
    seconds: Mapping[int, float], names: list[str]
) -> None:
    """A step of 2 ms is short beside what the drafter takes itself."""
    context = DrafterContext(9, cheap_rows=lambda: cheap_rows(RowCosts(seconds)))
    assert [drafter.name for drafter in factory.load_drafters("auto", context)] == names


def test_rows_are_measured_for_nobody_who_names_drafters() -> None:
    def measure() -> int:
        raise AssertionError("nothing depends on it")

    context = DrafterContext(9, cheap_rows=measure)
    assert [each.name for each in factory.load_drafters("suffix", context)] == ["suffix"]
    assert factory.load_drafters("none", context) == []


def test_beside_a_draft_or_a_head_it_stays_out() -> None:
    for has in ({"drafts": True}, {"drafts": False, "head": "eagle"}):
        assert "recycling" not in factory.auto_drafters(corpora=False, cheap_rows=64, **has)
    assert factory.auto_drafters(drafts=False, corpora=True, cheap_rows=8)[-1] == "corpus"
