"""What draft tokens are taken to be worth before anything was learnt of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_spec.drafters.draft.draft_tree import FIRST, PRIORS, kind_of

RECORDED = Path(__file__).parents[4] / "tests" / "fixtures" / "recorded_hits.json"


@pytest.mark.parametrize("draft", ["good", "fair"])
def test_a_first_choice_is_right_as_often_as_the_root_of_its_share_says(draft: str) -> None:
    """On recorded drafts, more nearly than as the share itself says. Of the poor one the share says
    it better: its first draft tokens are few, until it has been of use."""
    shares, right = [], []
    for text in json.loads(RECORDED.read_text(encoding="utf-8"))["texts"]:
        told = text["drafts"][draft]
        shares += [(int(digit) + 0.5) / 10 for digit in told["certainty"]]
        right += [rank == "0" for rank in told["ranks"]]
    begun = [PRIORS[kind_of(FIRST, share)] for share in shares]
    assert surprise(begun, right) < 0.97 * surprise(shares, right)


def surprise(chances: list[float], right: list[bool]) -> float:
    """Mean of minus the logarithm of what was said of the outcomes."""
    return float(-np.log(np.where(right, chances, 1 - np.array(chances))).mean())
