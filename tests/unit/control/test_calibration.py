"""How likely draft tokens are, by what came of those before them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.control.calibration import Calibration, learn, reach_beside, reach_of
from edge_spec.core.tree import TokenTree

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


def test_draft_tokens_of_other_depths_and_confidences_are_not_concerned() -> None:
    calibration = Calibration()
    for _ in range(50):
        calibration.observe(1, 0.9, False)
    assert calibration.estimate(1, 0.92) < 0.6
    assert calibration.estimate(1, 0.4) == 0.4
    assert calibration.estimate(4, 0.9) == 0.9


@given(
    outcomes=st.lists(st.tuples(st.integers(1, 20), CONFIDENCE, st.booleans()), max_size=80),
    confidence=CONFIDENCE,
)
def test_an_estimate_is_a_probability(
    outcomes: list[tuple[int, float, bool]], confidence: float
) -> None:
    calibration = Calibration()
    for outcome in outcomes:
        calibration.observe(*outcome)
    assert all(0 <= calibration.estimate(depth, confidence) <= 1 for depth in (1, 3, 9))


def chain(*tokens: int) -> TokenTree:
    return TokenTree.chain(0, tokens, [0.5] * len(tokens), "test")


def test_where_a_model_drafts_the_same_a_token_is_as_likely_as_either_says() -> None:
    """And what follows after the model's last one is as likely as it was, given those before."""
    told = reach_beside(chain(1, 2, 3), [1.0, 0.5, 0.4, 0.2], chain(1, 2), [1.0, 0.9, 0.63])
    assert told == pytest.approx([1.0, 0.9, 0.9 * 0.8, 0.9 * 0.8 * 0.5])


def test_where_a_model_drafts_otherwise_at_most_one_of_the_two_is_right() -> None:
    """After that, the two speak of different texts."""
    told = reach_beside(chain(1, 2, 3), [1.0, 0.5, 0.4, 0.2], chain(1, 7, 3), [1.0, 0.9, 0.81, 0.8])
    assert told == pytest.approx([1.0, 0.9, 0.9 * 0.1, 0.9 * 0.1 * 0.5])
    unlikely = reach_beside(chain(1), [1.0, 0.05], chain(7), [1.0, 0.6])
    assert unlikely == pytest.approx([1.0, 0.05])  # as it was: less than the model leaves


@pytest.mark.parametrize("sampled", [False, True])
def test_trees_that_branch_and_samples_are_held_against_nothing(sampled: bool) -> None:
    tree, reach = branching(sampled), [1.0, 0.5, 0.4, 0.2]
    assert reach_beside(tree, reach, chain(9), [1.0, 0.9]) == reach
    assert reach_beside(chain(1), [1.0, 0.5], tree, reach) == [1.0, 0.5]


def branching(sampled: bool = False) -> TokenTree:
    probs = np.full(10, 0.1, np.float32)
    return TokenTree(
        np.array([0, 1, 2, 3], np.int32),
        np.array([-1, 0, 0, 1], np.int32),
        np.array([1, 0.5, 0.25, 0.5], np.float32),
        draft_probs=(None, probs, probs, probs) if sampled else (),
    )


@pytest.mark.parametrize("tree", [TokenTree.chain(0, [1, 2, 3], [0.5, 0.25, 0.5]), branching()])
def test_the_reach_of_a_row_is_the_product_along_its_path(tree: TokenTree) -> None:
    np.testing.assert_allclose(reach_of(Calibration(), tree), tree.reach, rtol=1e-6)


def test_a_row_below_a_corrected_one_is_reached_as_seldom() -> None:
    calibration = Calibration()
    for _ in range(40):
        calibration.observe(1, 0.5, False)
    first, second = reach_of(calibration, TokenTree.chain(0, [1, 2], [0.5, 0.8]))[1:]
    assert first < 0.25
    assert second == pytest.approx(0.8 * first, rel=1e-6)


def test_what_the_text_decides_is_learnt_and_nothing_else() -> None:
    """Rows below a wrong one say nothing."""
    calibration = Calibration()
    learn(calibration, TokenTree.chain(0, [1, 2, 3], [0.5, 0.9, 0.99]), [1, 7])
    seen, right, claimed = calibration.counts()
    assert (seen.sum(), right.sum()) == (2, 1)
    assert claimed.sum() == pytest.approx(1.4)


def test_of_siblings_each_is_learnt_from() -> None:
    calibration = Calibration()
    learn(calibration, branching(), [2, 5])
    seen, right, _ = calibration.counts()
    assert (seen.sum(), right.sum()) == (2, 1)


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


def test_within_a_bucket_a_surer_draft_token_stays_likelier() -> None:
    calibration = Calibration()
    for right in (False,) * 30 + (True,) * 10:
        calibration.observe(1, 0.7, right)
    estimates = [calibration.estimate(1, confidence) for confidence in (0.66, 0.7, 0.74, 0.79)]
    assert all(low < high for low, high in pairwise(estimates))


@pytest.mark.parametrize(("right", "seen"), [(0, 4), (3, 4), (4, 4), (6, 12)])
def test_what_is_told_of_a_few_draft_tokens_is_told_with_its_uncertainty(
    right: int, seen: int
) -> None:
    calibration = Calibration()
    assert calibration.of_late is None
    for number in range(seen):
        calibration.observe(1, 0.5, number < right)
    told = calibration.of_late
    assert told is not None
    assert told[0] == pytest.approx(right / seen, abs=0.06)  # the older ones count less
    assert 0.1 < told[1] < 0.2
