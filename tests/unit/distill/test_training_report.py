"""The picture of a training's report: what each draft token brings, and what it costs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from edge_spec.distill.training_report import html_page

PASSES = {1: 10.0, 2: 11.0, 3: 11.5, 5: 15.5}


def page(*, num_draft_tokens: int = 2, pays: bool = True, passes: Any = PASSES) -> str:
    of_position = [0.8, 0.5, 0.5]
    return html_page(
        {
            "model": "<b>tiny",
            "kind": "eagle3",
            "acceptance": of_position,
            "forecast": {"num_draft_tokens": num_draft_tokens, "speedup": 1.4},
            "pays": pays,
            "tokens": {"learnt": 10, "held_out": 5, "own": 0},
            "on_policy_from": None,
            "vocabulary": {"scored": 8, "coverage": 0.9},
            "costs_ms": {"passes": passes, "draft_token": 2.0},
            "history": [
                {
                    "step": 1,
                    "loss": None,
                    "of_position": of_position,
                    "num_draft_tokens": 1,
                    "speedup": 1.0,
                }
            ],
            "verify": {"num_tokens": 1, "draft_tokens": 1, "draft_tokens_accepted": 1},
            "machine": {"cpu": "x", "cores": 2, "system": "y"},
        }
    )


def test_bars_show_how_often_draft_tokens_are_kept_and_what_they_cost() -> None:
    """Kept: where all before it are, too. A cost: of one more row, and of drafting it."""
    found = page()
    assert re.findall(r"kept in (\d+) of 100 rounds", found) == ["80", "40", "20"]
    assert re.findall(r"costs ([\d.]+) of a step", found) == ["0.30", "0.25", "0.40"]
    assert re.findall(r'class="kept" x="110" y="4" width="([\d.]+)"', found) == [
        "224.0",
        "112.0",
        "56.0",
    ]
    assert "<b>tiny" not in found


@pytest.mark.parametrize(
    ("num_draft_tokens", "pays", "pale"), [(2, True, 1), (3, True, 0), (1, False, 3)]
)
def test_what_does_not_pay_is_pale(num_draft_tokens: int, pays: bool, pale: int) -> None:
    found = page(num_draft_tokens=num_draft_tokens, pays=pays)
    assert found.count('<g class="unused"') == pale
    assert ("Here none pays." in found) == (not pays)


def test_a_row_that_was_measured_cheaper_than_the_one_before_costs_nothing() -> None:
    found = page(passes={1: 10.0, 2: 9.0, 4: 12.0})
    assert re.findall(r"costs ([\d.]+) of a step", found)[0] == "0.20"  # drafting alone
