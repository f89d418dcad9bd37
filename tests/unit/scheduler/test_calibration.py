"""How likely draft tokens are, by what came of those before them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.drafter_record import Calibration, learn, reach_of

CONFIDENCE = st.floats(0, 1)


@given(depth=st.integers(1, 40), confidence=CONFIDENCE)
def test_before_anything_was_seen_a_drafter_is_believed(depth: int, confidence: float) -> None:
    assert Calibration().estimate(depth, confidence) == confidence


@pytest.mark.parametrize(("claimed", "right"), [(0.9, 0.3), (0.3, 0.8)])
def test_a_drafter_that_is_wrong_about_a_text_is_corrected_within_a_few_dozen_tokens(
    claimed: float, right: float
) -> None:
    """And believed again when the text has changed."""
    calibration, rng = Calibration(), np.random.default_rng(0)
    for share in (right, claimed):
        for _ in range(60):
            calibration.observe(1, claimed, rng.random() < share)
        assert abs(calibration.estimate(1, claimed) - share) < 0.5 * abs(claimed - right)


def branching(sampled: bool = False) -> TokenTree:
    probs = np.full(10, 0.1, np.float32)
    return TokenTree(
        np.array([0, 1, 2, 3], np.int32),
        np.array([-1, 0, 0, 1], np.int32),
        np.array([1, 0.5, 0.25, 0.5], np.float32),
        draft_probs=(None, probs, probs, probs) if sampled else (),
    )


def test_what_the_text_decides_is_learnt_and_nothing_else() -> None:
    """Rows below a wrong one say nothing."""
    calibration = Calibration()
    learn(calibration, TokenTree.chain(0, [1, 2, 3], [0.5, 0.9, 0.99]), [1, 7])
    seen, right, claimed = calibration.counts()
    assert (seen.sum(), right.sum()) == (2, 1)
    assert claimed.sum() == pytest.approx(1.4)


def test_a_sampled_row_keeps_its_drafters_word() -> None:
    """Acceptance of a sampled row is not equality with the text, and a policy that corrected it by
    past luck could come to keep a second sample without the first."""
    calibration = Calibration()
    tree = branching(sampled=True)
    for _ in range(40):
        learn(calibration, tree, [2, 5])
    assert calibration.counts().sum() == 0
    for _ in range(40):
        calibration.observe(1, 0.5, False)
    np.testing.assert_allclose(reach_of(calibration, tree), tree.reach, rtol=1e-6)
