"""The default policy gains on recorded texts what it did when the golden files were made."""

from __future__ import annotations

import pytest

from golden import policy
from golden.make import stored


def test_every_fifth_case_gains_what_was_recorded() -> None:
    names = policy.subset()
    expected = {name: stored("policy")[name] for name in names}
    assert policy.difference(expected, policy.record(names)) == ""


@pytest.mark.slow
def test_all_cases_gain_what_was_recorded() -> None:
    assert policy.difference(stored("policy"), policy.record()) == ""


def test_figures_beyond_the_tolerance_are_told() -> None:
    recorded = {"a": {"speedup": 1.5, "worst": 0.9}}
    assert policy.difference(recorded, {"a": {"speedup": 1.52, "worst": 0.92}}) == ""
    assert "a/speedup" in policy.difference(recorded, {"a": {"speedup": 1.46, "worst": 0.9}})
    assert "a/worst" in policy.difference(recorded, {"a": {"speedup": 1.5, "worst": 0.84}})
