"""First draft tokens: where they come from, and that they depend on the text and the seed alone."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.jacobi.jacobi_init import Filler, JacobiInit

texts = st.lists(st.integers(0, 4), min_size=1, max_size=30)
aheads = st.lists(st.integers(0, 4), max_size=5)


def filler(fill: JacobiInit, text: Sequence[int], seed: int = 0) -> Filler:
    filler = Filler(fill, seed)
    filler.begin(text)
    return filler


def what_followed(text: Sequence[int], end: Sequence[int]) -> int | None:
    """The token after the last place in `text` where `end` stands and something follows."""
    for stop in range(len(text) - 1, len(end) - 1, -1):
        if list(text[stop - len(end) : stop]) == list(end):
            return text[stop]
    return None


def by_search(text: Sequence[int], ahead: Sequence[int], count: int) -> list[int]:
    before = [*text, *ahead]
    for _ in range(count):
        token = what_followed(text, before[-2:]) if len(before) > 1 else None
        if token is None:
            token = what_followed(text, before[-1:])
        before.append(before[-1] if token is None else token)
    return before[len(before) - count :]


@given(text=texts, ahead=aheads, count=st.integers(0, 8))
def test_ngrams_are_what_a_search_of_the_text_finds(
    text: list[int], ahead: list[int], count: int
) -> None:
    assert filler(JacobiInit.NGRAM, text).fill(ahead, count) == by_search(text, ahead, count)


@given(text=texts, more=texts, ahead=aheads)
def test_a_text_that_grew_fills_as_if_it_had_been_whole(
    text: list[int], more: list[int], ahead: list[int]
) -> None:
    for fill in JacobiInit:
        grown = filler(fill, text)
        grown.extend(tuple(more))
        assert grown.fill(ahead, 6) == filler(fill, [*text, *more]).fill(ahead, 6)


@given(text=texts, ahead=aheads, seed=st.integers(0, 1000))
def test_random_tokens_are_of_the_text_and_follow_the_seed(
    text: list[int], ahead: list[int], seed: int
) -> None:
    one, other = filler(JacobiInit.RANDOM, text, seed), filler(JacobiInit.RANDOM, text, seed)
    first, second = one.fill(ahead, 20), one.fill(ahead, 20)
    assert len(first) == 20 and set(first) <= set(text)
    assert [other.fill(ahead, 20), other.fill(ahead, 20)] == [first, second]
    if len(set(text)) > 1:
        assert set(filler(JacobiInit.RANDOM, text, seed).fill([], 1000)) == set(text)
