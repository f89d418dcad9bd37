"""Snapshots of a pool of n-grams. What it keeps is tested with the window that fills it."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.jacobi import NgramPool

BOUND = "edge_spec.drafters.jacobi.MAX_FIRST_TOKENS"

ngrams = st.lists(st.tuples(*(st.integers(0, 3),) * 3), max_size=40)


@given(added=ngrams, later=ngrams, per_token=st.integers(1, 4))
def test_a_snapshot_is_the_pool(
    added: list[tuple[int, ...]], later: list[tuple[int, ...]], per_token: int
) -> None:
    pool, fresh = NgramPool(3, per_token), NgramPool(3, per_token)
    for ngram in added:
        pool.add(ngram)
    fresh.add((4, 4, 4))
    fresh.restore(pool.snapshot())
    assert fresh.snapshot().tolist() == pool.snapshot().tolist()
    assert not fresh.after(4)
    with mock.patch(BOUND, 2):  # what is forgotten next is part of it
        for ngram in later:
            pool.add(ngram)
            fresh.add(ngram)
    for first in range(4):
        assert fresh.after(first) == pool.after(first)


@pytest.mark.parametrize(
    "snapshot",
    [
        np.zeros((2, 4), np.int32),
        np.zeros((2, 2), np.int32),
        np.zeros(3, np.int32),
        np.zeros((1, 1, 3), np.int32),
        np.int32(0),
        np.zeros((2, 3)),
        np.array([["a", "b", "c"]]),
    ],
)
def test_what_is_no_snapshot_is_refused_and_changes_nothing(snapshot: np.ndarray) -> None:
    pool = NgramPool(3, 2)
    pool.add((1, 2, 3))
    with pytest.raises(ValueError, match="pool of 3-grams"):
        pool.restore(np.asarray(snapshot))
    assert pool.after(1) == [(2, 3)]
