"""The pool of n-grams against a list of all of them, and which prompts share one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.jacobi.lookahead import NgramPool
from edge_spec.drafters.state import continues, restored_prompt

BOUND = "edge_spec.drafters.jacobi.lookahead.MAX_FIRST_TOKENS"

ngrams = st.lists(st.tuples(*(st.integers(0, 3),) * 3), max_size=40)


def latest(added: Sequence[Sequence[int]], first: int, per_token: int) -> list[tuple[int, ...]]:
    """The last `per_token` different n-grams of a token, the latest first."""
    rests = [tuple(each[1:]) for each in reversed(added) if each[0] == first]
    return list(dict.fromkeys(rests))[:per_token]


@given(added=ngrams, per_token=st.integers(1, 5))
def test_each_token_keeps_its_latest_ngrams(added: list[tuple[int, ...]], per_token: int) -> None:
    pool = NgramPool(3, per_token)
    for count, ngram in enumerate(added, start=1):
        pool.add(ngram)
        assert pool.after(ngram[0])[0] == ngram[1:]
        for first in range(5):
            assert pool.after(first) == latest(added[:count], first, per_token)


@given(added=ngrams, bound=st.integers(1, 4))
def test_of_first_tokens_the_latest_are_kept(added: list[tuple[int, ...]], bound: int) -> None:
    pool = NgramPool(3, 50)
    with mock.patch(BOUND, bound):
        for ngram in added:
            pool.add(ngram)
    kept = list(dict.fromkeys(each[0] for each in reversed(added)))[:bound]
    assert {first for first in range(5) if pool.after(first)} == set(kept)


@given(
    text=st.lists(st.integers(0, 3), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    ngram=st.integers(2, 5),
)
def test_a_text_is_read_whole_however_it_comes(
    text: list[int], cuts: list[int], ngram: int
) -> None:
    pool, places = NgramPool(ngram, 3), sorted({0, len(text), *(min(c, len(text)) for c in cuts)})
    pool.begin(text[: places[0]])
    for start, end in pairwise(places):
        pool.read(tuple(text[start:end]))
    added = [text[i : i + ngram] for i in range(len(text) - ngram + 1)]
    for first in range(4):
        assert pool.after(first) == latest(added, first, 3)


def test_a_new_prompt_does_not_follow_the_text_before() -> None:
    pool = NgramPool(3, 3)
    pool.begin([1, 2, 3])
    pool.read([4])
    pool.begin([5, 6])
    pool.read([7])
    assert pool.after(2) == [(3, 4)] and pool.after(5) == [(6, 7)]
    assert not (pool.after(3) or pool.after(4))
    pool.clear()
    assert not (pool.after(2) or pool.after(5))
    pool.read([8])
    assert pool.after(6) == [(7, 8)]


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


@pytest.mark.parametrize(
    ("earlier", "prompt", "expected"),
    [
        ([], [1], False),
        ([1], [1], True),
        ([1, 2], [1, 2, 3], True),
        ([1, 2], [1, 3, 2], False),
        ([1, 2, 3], [1, 2], False),
        ([9, 9, 1], [9, 9, 2, 1], False),  # a system message in common
        ((1, 2), [1, 2, 3], True),
        ([1, 2], (1, 2), True),
    ],
)
def test_a_conversation_goes_on_where_it_stood(
    earlier: Sequence[int], prompt: Sequence[int], expected: bool
) -> None:
    assert continues(earlier, prompt) is expected


def test_a_prompt_comes_back_from_a_snapshot() -> None:
    assert restored_prompt(np.array([1, 2], np.int32)) == (1, 2)
    assert restored_prompt(np.zeros(0, np.int32)) == ()
    for wrong in (np.zeros((1, 2), np.int32), np.zeros(2), np.asarray(3), np.array(["a"])):
        with pytest.raises(ValueError, match="prompt"):
            restored_prompt(wrong)
