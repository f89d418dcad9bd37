"""Suffix lookup against a search that tries every suffix at every place."""

from __future__ import annotations

import itertools
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup.suffix import SuffixDrafter, SuffixIndex
from edge_spec.drafters.protocol import Budget

BUDGET = Budget(num_draft_tokens=4, num_rows=64)
OUT = Forward(np.zeros((1, 1), np.float32))

texts = st.integers(1, 4).flatmap(
    lambda alphabet: st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=60)
)


def longest_match(text: Sequence[int]) -> int:
    """Length of the longest end of `text` that also occurs earlier in it."""
    for length in range(len(text) - 1, 0, -1):
        end = text[len(text) - length :]
        if any(text[i : i + length] == end for i in range(len(text) - length)):
            return length
    return 0


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """The positions after each place where `part` occurs."""
    starts = range(len(text) - len(part) + 1)
    return [i + len(part) for i in starts if list(text[i : i + len(part)]) == list(part)]


@given(text=texts)
def test_the_match_is_the_longest(text: list[int]) -> None:
    index = SuffixIndex()
    for count, token in enumerate(text, start=1):
        index.extend([token])
        assert index.match.length == longest_match(text[:count])
    assert index.tokens == text


@given(text=texts, count=st.integers(1, 12))
def test_continuations_are_all_that_followed_with_their_counts(text: list[int], count: int) -> None:
    """Along the likeliest continuation, at each step against a search of the whole text."""
    index = SuffixIndex()
    with mock.patch("edge_spec.drafters.lookup.suffix._COUNTED_SUFFIXES", 1000):
        index.extend(text)
    match = index.match
    end = text[len(text) - match.length :]
    for _ in range(count):
        # Where it occurs at the text's end alone, what occurs before it as well is continued.
        while end and occurrences(text, end) == [len(text)]:
            end = end[1:]
        following = Counter(text[at] for at in occurrences(text, end) if at < len(text))
        found = index.continuations(match)
        if not end:
            assert found == []
            return
        assert {each.token: each.times for each in found} == dict(following)
        assert {each.total for each in found} == {following.total()}
        latest = {token: max(occurrences(text, [*end, token])) for token in following}
        ranked = sorted(following, key=lambda token: (-following[token], -latest[token]))
        assert [each.token for each in found] == ranked
        assert {each.match.length for each in found} == {len(end) + 1}
        match, end = found[0].match, [*end, found[0].token]


def test_counting_is_bounded_in_a_text_of_one_token() -> None:
    index = SuffixIndex()
    index.extend([1] * 2000)
    assert sum(index._count) <= 2000 * 16
    assert [each.token for each in index.continuations(index.match)] == [1]


@pytest.mark.parametrize("alphabet", [1, 2, 4, 1000])
def test_the_index_stays_linear(alphabet: int) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 3000).tolist()
    index = SuffixIndex()
    index.extend(text)
    # Blumer et al. 1985: at most 2n - 1 states and 3n - 4 transitions.
    assert len(index._next) < 2 * len(text)
    assert sum(map(len, index._next)) < 3 * len(text)


def test_a_repeated_text_is_drafted_and_a_new_one_is_not() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    tree = drafter.propose(2, BUDGET)
    assert tree.tokens.tolist() == [2, 3, 4, 5, 1] and tree.is_chain
    assert tree.proposed_by == ("", *["suffix"] * 4)
    drafter.begin([7, 8, 9])
    assert len(drafter.propose(9, BUDGET)) == 1
    assert len(drafter.propose(9, Budget(0, 1))) == 1


@pytest.mark.parametrize(
    ("written", "learnt"),
    [
        # Draft tokens 3 4 5 after a match of 2. Rows below a wrong one say nothing.
        ((3, 4, 5, 9), [(2, True), (3, True), (4, True)]),
        ((3, 9), [(2, True), (3, False)]),
        ((9,), [(2, False)]),
        ((3,), [(2, True)]),  # cut by a stop token
    ],
)
def test_each_draft_token_that_the_text_decides_is_learnt_from_once(
    written: tuple[int, ...], learnt: list[tuple[int, bool]]
) -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    before = drafter._acceptance.state()["acceptance"]
    # What was verified does not matter: here nothing was.
    drafter.propose(2, Budget(3, 64))
    drafter.observe(TokenTree.chain(2), OUT, Verdict(written, (), False))
    change = drafter._acceptance.state()["acceptance"] - before
    rows = [bisect([1, 2, 3, 4], length) - 1 for length, _ in learnt]  # buckets of match length
    seen, right = np.zeros(48), np.zeros(48)
    for row, (_, outcome) in zip(rows, learnt, strict=True):
        seen[6 * row] += 1  # continued always, once
        right[6 * row] += outcome
    np.testing.assert_allclose(change[:2], [seen, right], atol=1e-9)
    after = drafter._acceptance.state()["acceptance"]
    drafter.observe(
        TokenTree.chain(9), OUT, Verdict((1, 2), (), False)
    )  # a round without draft token
    assert np.array_equal(drafter._acceptance.state()["acceptance"], after)


@pytest.mark.parametrize("at", range(2, 12))
def test_after_an_interrupt_the_text_is_read_anew(at: int) -> None:
    """Half of a token in the index: a link that leads nowhere can be followed for ever."""
    text = [0, 1, 0, 1, 1, 0, 1, 0, 2, 0, 1]
    drafter, fresh = SuffixDrafter(), SuffixDrafter()
    new_state, states = SuffixIndex._new_state, itertools.count()

    def interrupted(index: SuffixIndex, *arguments: Any) -> int:
        state = new_state(index, *arguments)
        if next(states) == at:
            raise KeyboardInterrupt
        return state

    patched = mock.patch.object(SuffixIndex, "_new_state", interrupted)
    with patched, pytest.raises(KeyboardInterrupt):
        drafter.begin(text)
    drafter.begin(text)
    fresh.begin(text)
    for token in (1, 0, 1, 1):
        found, expected = drafter.propose(token, BUDGET), fresh.propose(token, BUDGET)
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert np.array_equal(found.confidence, expected.confidence)
        for each in (drafter, fresh):
            each.observe(TokenTree.chain(token), OUT, Verdict((token,), (), exhausted=True))
