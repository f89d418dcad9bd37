"""Suffix lookup against a search that tries every suffix at every place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.protocol import Budget
from edge_spec.drafters.suffix import MatchAcceptance, SuffixDrafter, SuffixIndex
from edge_spec.model import Forward
from edge_spec.tree import Verdict

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


@given(text=texts)
def test_the_match_is_the_longest_and_ends_at_an_earlier_occurrence(text: list[int]) -> None:
    index = SuffixIndex()
    for count, token in enumerate(text, start=1):
        index.extend([token])
        length, end = index.match
        assert length == longest_match(text[:count])
        if length:
            assert length <= end < count
            assert text[end - length : end] == text[count - length : count]
    assert index.tokens == text


@given(text=texts, count=st.integers(0, 30))
def test_the_continuation_repeats_what_followed_the_match(text: list[int], count: int) -> None:
    index = SuffixIndex()
    index.extend(text)
    continuation = index.continuation(count)
    if index.match.length == 0:
        assert continuation == []
        return
    assert len(continuation) == count
    # Copying one token at a time from the text and what was copied so far.
    copied = list(text)
    for i in range(count):
        copied.append(copied[index.match.end + i])
    assert continuation == copied[len(text) :]


def test_of_several_occurrences_the_latest_is_continued() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 9, 1, 2, 8, 1, 2])
    assert index.continuation(2) == [8, 1]


@given(text=texts)
def test_extending_at_once_or_by_token_gives_the_same_match(text: list[int]) -> None:
    at_once, by_token = SuffixIndex(), SuffixIndex()
    at_once.extend(text)
    for token in text:
        by_token.extend([token])
    assert at_once.match == by_token.match


@pytest.mark.parametrize("alphabet", [1, 2, 4, 1000])
def test_the_index_stays_linear(alphabet: int) -> None:
    text = np.random.default_rng(0).integers(0, alphabet, 3000).tolist()
    index = SuffixIndex()
    index.extend(text)
    # Blumer et al. 1985: at most 2n - 1 states and 3n - 4 transitions.
    assert len(index._next) < 2 * len(text)
    assert sum(map(len, index._next)) < 3 * len(text)


def test_a_repeated_text_is_guessed_and_a_new_one_is_not() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    tree = drafter.propose(2, BUDGET)
    assert tree.tokens.tolist() == [2, 3, 4, 5, 1] and tree.is_chain
    assert tree.proposed_by == ("", *["suffix"] * 4)
    drafter.begin([7, 8, 9])
    assert len(drafter.propose(9, BUDGET)) == 1
    assert len(drafter.propose(9, Budget(0, 1))) == 1


def test_what_was_written_is_found_in_the_same_generation() -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3])
    tree = drafter.propose(3, BUDGET)
    drafter.observe(tree, OUT, Verdict((9, 1, 2), (), True))
    assert drafter.propose(2, BUDGET).tokens.tolist() == [2, 3, 9, 1, 2]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 1, 2, 3, 5], [1, 2, 4, 1], [1, 2], [1, 2, 3, 1, 2]])
def test_beginning_again_forgets_what_is_not_in_the_prompt(prompt: list[int]) -> None:
    used, fresh = SuffixDrafter(), SuffixDrafter()
    used.begin([1, 2, 3])
    used.observe(used.propose(3, BUDGET), OUT, Verdict((1, 2), (), True))
    used.begin(tuple(prompt))
    fresh.begin(prompt)
    proposed, expected = (drafter.propose(prompt[-1], BUDGET) for drafter in (used, fresh))
    assert proposed.tokens.tolist() == expected.tokens.tolist()


def test_confidence_grows_with_the_match() -> None:
    estimate = MatchAcceptance().estimate(1, 30)
    assert estimate == sorted(estimate) and 0 < estimate[0] < estimate[-1] < 1


def test_confidence_moves_towards_the_outcomes_of_its_match_length() -> None:
    acceptance = MatchAcceptance()
    before = acceptance.estimate(1, 30)
    for _ in range(200):
        acceptance.observe(1, False)
        acceptance.observe(2, True)
    after = acceptance.estimate(1, 30)
    assert after[0] < 0.05 and after[1] > 0.95
    assert after[2:] == before[2:]


@pytest.mark.parametrize(
    ("written", "learnt"),
    [
        # Guesses 3 4 5 after a match of 2. Rows below a wrong one say nothing.
        ((3, 4, 5, 9), [(2, True), (3, True), (4, True)]),
        ((3, 9), [(2, True), (3, False)]),
        ((9,), [(2, False)]),
        ((3,), [(2, True)]),  # cut by a stop token
    ],
)
def test_each_verified_guess_is_learnt_from_once(
    monkeypatch: Any, written: tuple[int, ...], learnt: list[tuple[int, bool]]
) -> None:
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        MatchAcceptance, "observe", lambda self, length, right: seen.append((length, right))
    )
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    tree = drafter.propose(2, Budget(3, 64))
    drafter.observe(tree, OUT, Verdict(written, (), False))
    assert seen == learnt


def test_a_tree_of_another_drafter_teaches_nothing_but_the_text(make_tree: Any) -> None:
    drafter = SuffixDrafter()
    drafter.begin([1, 2, 1])
    before = drafter._acceptance.estimate(1, 30)
    drafter.observe(make_tree(1, [5, 6], [0, 1]), OUT, Verdict((2, 1), (), False))
    assert drafter._acceptance.estimate(1, 30) == before
    assert drafter._index.tokens == [1, 2, 1, 2, 1]
