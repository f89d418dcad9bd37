"""The store of features knows of no position what belongs to another text."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.drafters.heads.features import FeatureStore


def rows(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.float32)[:, None]


@pytest.fixture
def store() -> FeatureStore:
    """Ten rows of a text that has begun."""
    made = FeatureStore(1, capacity=300)
    made.put(0, rows(0, 10))
    made.begin(0, 10)
    return made


def kept(store: FeatureStore) -> list[int]:
    return [int(value) for value in store.get(store.first, store.end)[:, 0]]


def test_a_write_makes_obsolete_what_followed(store: FeatureStore) -> None:
    store.put(4, rows(104, 2))
    assert kept(store) == [0, 1, 2, 3, 104, 105]
    assert store.has(5) and not store.has(6) and store.end == 6


def test_nothing_is_known_before_a_gap(store: FeatureStore) -> None:
    store.put(12, rows(12, 2))
    assert kept(store) == [12, 13]
    store.put(3, rows(3, 1))
    assert kept(store) == [3]


def test_the_last_rows_are_kept_of_a_long_text(store: FeatureStore) -> None:
    for at in range(10, 900, 7):
        store.put(at, rows(at, 7))
        found = kept(store)
        assert found == list(range(found[0], at + 7)) and len(found) >= min(300, at + 7)
        assert len(found) <= 600


def test_a_text_that_was_read_anew_from_there_on_keeps_all(store: FeatureStore) -> None:
    store.put(6, rows(106, 3))
    store.begin(6, 9)
    assert kept(store) == [0, 1, 2, 3, 4, 5, 106, 107, 108]


def test_what_a_session_was_restored_to_is_not_taken_for_the_text_before(
    store: FeatureStore,
) -> None:
    store.put(8, rows(108, 2))  # after eight tokens of which the store was never told
    store.begin(2, 10)
    assert kept(store) == [108, 109]
    store.begin(10, 5)
    assert kept(store) == []
