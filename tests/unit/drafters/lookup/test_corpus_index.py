"""Look-ups in a corpus against a search that tries every place of every document."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.lookup.corpus_index import (
    MAX_FOLLOWING,
    MAX_MATCH,
    SEPARATOR,
    CorpusIndex,
    CorpusMatch,
)

VOCAB_SIZE = 4

document_lists = st.integers(1, VOCAB_SIZE).flatmap(
    lambda alphabet: st.lists(
        st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=40), min_size=1, max_size=4
    )
)
texts = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=24)


def stored(documents: Sequence[Sequence[int]]) -> tuple[list[int], list[int], bytes]:
    """Tokens with separators, their suffixes sorted the slow way, and both as a file has them."""
    tokens = [token for document in documents for token in (*document, SEPARATOR)]
    suffixes = sorted(range(len(tokens)), key=lambda place: tokens[place:])
    data = np.array(tokens, ">u4").tobytes() + np.array(suffixes, "<i4").tobytes()
    return tokens, suffixes, data


def index_of(documents: Sequence[Sequence[int]], vocab_size: int = VOCAB_SIZE) -> CorpusIndex:
    tokens, _, data = stored(documents)
    return CorpusIndex(b"head" + data, 4, len(tokens), vocab_size)


def occurrences(documents: Sequence[Sequence[int]], sought: Sequence[int]) -> list[tuple[int, int]]:
    """Document and place of each."""
    return [
        (number, place)
        for number, document in enumerate(documents)
        for place in range(len(document) - len(sought) + 1)
        if list(document[place : place + len(sought)]) == list(sought)
    ]


def longest_end(documents: Sequence[Sequence[int]], text: Sequence[int]) -> list[int]:
    for length in range(min(MAX_MATCH, len(text)), 0, -1):
        if occurrences(documents, text[-length:]):
            return list(text[-length:])
    return []


def places(documents: Sequence[Sequence[int]], match: CorpusMatch) -> list[tuple[int, int]]:
    """Document and place of each occurrence that a match of one token or more stands for."""
    _, suffixes, _ = stored(documents)
    begins = list(itertools.accumulate((len(document) + 1 for document in documents), initial=0))
    found = []
    for suffix in suffixes[match.low : match.high]:
        number = max(i for i, begin in enumerate(begins) if begin <= suffix)
        found.append((number, suffix - begins[number]))
    return sorted(found)


@given(documents=document_lists, text=texts)
def test_a_match_is_the_longest_end_and_has_all_its_occurrences(
    documents: list[list[int]], text: list[int]
) -> None:
    match = index_of(documents).match(text)
    expected = longest_end(documents, text)
    assert match.length == len(expected)
    if expected:
        assert places(documents, match) == occurrences(documents, expected)


@given(documents=document_lists, choice=st.data())
def test_what_was_indexed_is_found_up_to_the_longest_match(
    documents: list[list[int]], choice: st.DataObject
) -> None:
    document = choice.draw(st.sampled_from(documents))
    end = choice.draw(st.integers(1, len(document)))
    match = index_of(documents).match(tuple(document[:end]))
    assert match.length == min(end, MAX_MATCH)


@given(documents=document_lists, text=texts)
def test_what_follows_is_counted_and_is_the_match_of_the_longer_text(
    documents: list[list[int]], text: list[int]
) -> None:
    index = index_of(documents)
    match = index.match(text)
    sought = list(text[len(text) - match.length :])
    counts = Counter(
        documents[number][place + match.length]
        for number, place in occurrences(documents, sought)
        if place + match.length < len(documents[number])
    )
    found = index.following(match)
    # The least frequent token may hide between the samples of a match that occurs so often.
    if match.num_occurrences <= 64:
        assert {token: longer.num_occurrences for token, longer in found} == counts
    for token, longer in found:
        assert longer.length == match.length + 1
        assert places(documents, longer) == occurrences(documents, [*sought, token])


@given(documents=document_lists)
def test_following_again_and_again_leads_to_the_end_of_a_document(
    documents: list[list[int]],
) -> None:
    index = index_of(documents)
    match, path = CorpusMatch(0, 0, index.num_tokens), []
    while found := index.following(match):
        token, match = found[0]
        path.append(token)
        assert occurrences(documents, path)
    assert any(document[len(document) - len(path) :] == path for document in documents)


@pytest.mark.parametrize("text", [[1, 2, 3], [2, 3]])
def test_no_match_spans_documents(text: list[int]) -> None:
    index = index_of([[0, 1, 2], [3, 0]])
    assert index.match(text) == index.match([3])
    assert index.match([3]).length == 1
    assert index.following(index.match([1, 2])) == []


@pytest.mark.parametrize("unknown", [-1, VOCAB_SIZE, 2**31, SEPARATOR])
def test_a_token_that_no_corpus_has_ends_the_match(unknown: int) -> None:
    index = index_of([[1, 2, 3], [0, 1]])
    assert index.match([0, unknown, 1, 2]) == index.match([1, 2])
    assert index.match([1, 2, unknown]) == CorpusMatch(0, 0, index.num_tokens)


def test_numpy_tokens_are_tokens() -> None:
    index = index_of([[1, 2, 3]])
    text = np.array([1, 2], np.int64)
    assert index.match(text.tolist()) == index.match(list(text)) == CorpusMatch(2, 0, 1)


def test_only_the_last_tokens_are_looked_up() -> None:
    index = index_of([[1] * 40])
    assert index.match([1] * 30).length == index.match([0, *[1] * 16]).length == MAX_MATCH == 16


def test_of_many_occurrences_the_frequent_continuations_are_found_and_counted_exactly() -> None:
    random = np.random.default_rng(0)
    drawn = random.choice(40, 2000, p=[0.5, 0.3, *[0.2 / 38] * 38])
    documents = [[99, int(token)] for token in drawn]
    index = index_of(documents, vocab_size=100)
    found = index.following(index.match([99]))
    assert len(found) == MAX_FOLLOWING
    assert [token for token, _ in found[:2]] == [0, 1]
    counts = Counter(drawn.tolist())
    for token, longer in found:
        assert longer.num_occurrences == counts[token]
        assert longer == index.match([99, token])


def test_of_few_occurrences_the_most_frequent_continuations_are_found() -> None:
    documents = [[99, token] for token in range(20) for _ in range(1 + 2 * (token >= 12))]
    index = index_of(documents, vocab_size=100)
    assert index.match([99]).num_occurrences == 36
    found = index.following(index.match([99]))
    assert sorted(token for token, _ in found) == list(range(12, 20))


def test_a_token_beyond_the_vocabulary_is_never_returned() -> None:
    index = index_of([[1, 9], [1, 2]])
    assert [token for token, _ in index.following(index.match([1]))] == [2]


@given(data=st.binary(min_size=8, max_size=240), text=texts)
def test_damaged_data_costs_draft_tokens_only(data: bytes, text: list[int]) -> None:
    num_tokens = len(data) // 8
    index = CorpusIndex(data, 0, num_tokens, VOCAB_SIZE)
    matches = [index.match(text), CorpusMatch(0, 0, num_tokens)]
    for _ in range(20):
        if not matches:
            break
        match = matches.pop()
        assert 0 <= match.low < match.high <= num_tokens
        found = index.following(match)
        assert len({token for token, _ in found}) == len(found)
        assert all(0 <= token < VOCAB_SIZE for token, _ in found)
        matches += [longer for _, longer in found]


@given(places=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=20), text=texts)
def test_suffixes_that_lie_outside_cost_draft_tokens_only(
    places: list[int], text: list[int]
) -> None:
    tokens = [place % VOCAB_SIZE for place in places]
    data = np.array(tokens, ">u4").tobytes() + np.array(places, "<i4").tobytes()
    index = CorpusIndex(data, 0, len(places), VOCAB_SIZE)
    match = index.match(text)
    assert 0 <= match.low < match.high <= len(places)
    assert all(0 <= token < VOCAB_SIZE for token, _ in index.following(match))


def test_suffixes_out_of_order_give_no_token_twice() -> None:
    data = np.array([0, 1], ">u4").tobytes() * 3 + np.array([0, 1] * 3, "<i4").tobytes()
    index = CorpusIndex(data, 0, 6, VOCAB_SIZE)
    assert sorted(token for token, _ in index.following(CorpusMatch(0, 0, 6))) == [0, 1]


class CountedBytes(bytes):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        CountedBytes.num_reads += 1
        return super().__getitem__(key)


def test_a_look_up_reads_a_logarithm_of_the_corpus() -> None:
    # Sorted by hand: a suffix is decided by its first token, 0, 1, 2, ...
    num_tokens = 1 << 16
    data = np.arange(num_tokens, dtype=">u4").tobytes()
    data += np.arange(num_tokens, dtype="<i4").tobytes()
    index = CorpusIndex(CountedBytes(data), 0, num_tokens, num_tokens)
    text = list(range(100, 100 + MAX_MATCH))
    CountedBytes.num_reads = 0
    match = index.match(text)
    assert match.length == MAX_MATCH
    # Five lengths and the end of the interval, each a bisection of 17 steps at most.
    assert CountedBytes.num_reads <= 6 * 18
    CountedBytes.num_reads = 0
    index.following(CorpusMatch(0, 0, num_tokens))
    # A sample, and two bisections of the gaps beside it, of 2**10, for each token returned.
    assert CountedBytes.num_reads <= 64 + MAX_FOLLOWING * 2 * 11
