"""Which drafters "auto" stands for follows from what rows cost on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Drafter
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.engine_plan import widest_cheap

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
    context = DrafterContext(9, cheap_rows=widest_cheap(RowCosts(seconds)))
    assert [drafter.name for drafter in factory.load_drafters("auto", context)] == names


def test_beside_a_draft_or_a_head_it_stays_out() -> None:
    for has in ({"drafts": True}, {"drafts": False, "head": "eagle"}):
        assert "recycling" not in factory.auto_drafters(corpora=False, cheap_rows=64, **has)
    assert factory.auto_drafters(drafts=False, corpora=True, cheap_rows=8)[-1] == "corpus"


def test_only_a_cascade_looks_up_for_its_draft() -> None:
    made: list[tuple[str, list[str]]] = []

    class Draft:
        def make_drafter(self, below: Any, name: str) -> Drafter:
            made.append((name, [each.name for each in below]))
            return Drafter()

    drafts: Any = [Draft()]
    for name in ("cascade", "draft-model"):
        factory.load_drafters(name, DrafterContext(8, drafts=drafts))
    assert made == [("cascade", ["suffix"]), ("draft-model", [])]
