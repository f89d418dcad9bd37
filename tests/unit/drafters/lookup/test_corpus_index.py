"""The index of a corpus against a search that tries every place."""

from __future__ import annotations

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
    index_of,
    sorted_suffixes,
)
from edge_spec.text.vocabulary import Vocabulary

document_lists = st.integers(1, 4).flatmap(
    lambda alphabet: st.lists(
        st.lists(st.integers(0, alphabet - 1), min_size=1, max_size=40), min_size=1, max_size=4
    )
)
texts = st.lists(st.integers(-1, 4), max_size=24)  # also what no vocabulary has


def count(documents: Sequence[Sequence[int]], sought: Sequence[int]) -> int:
    """Occurrences, by looking at every place."""
    return sum(
        list(document[place : place + len(sought)]) == list(sought)
        for document in documents
        for place in range(len(document) - len(sought) + 1)
    )


def longest_end(documents: Sequence[Sequence[int]], text: Sequence[int]) -> list[int]:
    ends = (list(text[len(text) - n :]) for n in range(min(MAX_MATCH, len(text)), 0, -1))
    return next((end for end in ends if count(documents, end)), [])


@given(
    tokens=st.integers(1, 5).flatmap(
        lambda alphabet: st.lists(
            st.sampled_from([*range(alphabet), SEPARATOR]), min_size=1, max_size=80
        )
    )
)
def test_suffixes_are_sorted(tokens: list[int]) -> None:
    expected = sorted(range(len(tokens)), key=lambda place: tokens[place:])
    found = sorted_suffixes(np.array(tokens, np.uint32))
    assert found.dtype == np.int32 and found.tolist() == expected


@pytest.mark.parametrize(
    ("tokens", "most_passes", "most_sorted"),
    [
        (np.zeros(5000), 14, 14),  # 1 + log2(5000)
        (np.arange(5000) % 7, 14, 14),
        (np.tile(np.random.default_rng(0).integers(0, 300, 1250), 4), 14, 14),
        # Only what is equal so far is sorted again.
        (np.random.default_rng(0).integers(0, 1000, 5000), 14, 2.1),
    ],
    ids=["one token", "a period", "four copies", "hardly repetitive"],
)
def test_repetitive_text_is_sorted_in_a_logarithm_of_passes(
    monkeypatch: Any, tokens: np.ndarray, most_passes: int, most_sorted: float
) -> None:
    sizes: list[int] = []
    argsort = np.argsort
    monkeypatch.setattr(np, "argsort", lambda keys: sizes.append(len(keys)) or argsort(keys))
    suffixes = sorted_suffixes(tokens.astype(np.uint32)).tolist()
    assert len(sizes) <= most_passes and sum(sizes) <= most_sorted * 5000
    as_bytes = tokens.astype(">u4").tobytes()
    assert suffixes == sorted(range(5000), key=lambda place: as_bytes[4 * place :])


@given(documents=document_lists, text=texts)
def test_a_match_is_the_longest_end_and_what_follows_is_counted(
    documents: list[list[int]], text: list[int]
) -> None:
    index = index_of(documents, 4)
    match, sought = index.match(text), longest_end(documents, text)
    assert match.length == len(sought)
    if sought:
        assert match.num_occurrences == count(documents, sought)
    expected = {token: count(documents, [*sought, token]) for token in range(4)}
    found = index.following(match)
    # The least frequent token may hide between the samples of a match that occurs so often.
    if match.num_occurrences <= 64:
        assert {token for token, _ in found} == {token for token, n in expected.items() if n}
    for token, longer in found:
        assert longer.num_occurrences == expected[token] and longer.length == len(sought) + 1
        if longer.length <= MAX_MATCH:
            assert longer == index.match([*sought, token])


@given(documents=document_lists)
def test_no_token_outside_the_vocabulary_is_returned(documents: list[list[int]]) -> None:
    index = index_of(documents, 4)
    known = CorpusIndex(index._tokens, np.array(index._suffixes), vocab_size=2)
    found = known.following(CorpusMatch(0, 0, index.num_tokens))
    assert {token for token, _ in found} == {each for text in documents for each in text} & {0, 1}


@pytest.mark.parametrize("documents", [[], [[]], [[1, -1]], [[4]], [[1], [2**40]]])
def test_what_cannot_be_indexed_is_refused(documents: list[list[int]]) -> None:
    with pytest.raises(ValueError):
        index_of(documents, 4)


def test_of_many_occurrences_the_frequent_continuations_are_found_and_counted_exactly() -> None:
    drawn = np.random.default_rng(0).choice(40, 2000, p=[0.5, 0.3, *[0.2 / 38] * 38]).tolist()
    index = index_of([[99, token] for token in drawn], 100)
    found = index.following(index.match([99]))
    assert len(found) == MAX_FOLLOWING and [token for token, _ in found[:2]] == [0, 1]
    for token, longer in found:
        assert longer.num_occurrences == Counter(drawn)[token]
        assert longer == index.match([99, token])


def test_of_few_occurrences_the_most_frequent_continuations_are_found() -> None:
    documents = [[99, token] for token in range(20) for _ in range(1 + 2 * (token >= 12))]
    index = index_of(documents, 100)
    assert index.match([99]).num_occurrences == 36
    assert sorted(token for token, _ in index.following(index.match([99]))) == list(range(12, 20))


class CountedBytes(bytes):
    """Counts how often it is read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        CountedBytes.num_reads += 1
        return super().__getitem__(key)


def test_a_look_up_reads_a_logarithm_of_the_corpus() -> None:
    # Sorted by hand: a suffix is decided by its first token, 0, 1, 2, ...
    num_tokens = 1 << 16
    numbers = np.arange(num_tokens)
    data = CountedBytes(numbers.astype(">u4").tobytes())
    index = CorpusIndex(data, numbers.astype(np.int32), num_tokens)
    CountedBytes.num_reads = 0
    assert index.match(list(range(100, 100 + MAX_MATCH))).length == MAX_MATCH
    # Five lengths and the end of the interval, each a bisection of 17 steps at most.
    assert CountedBytes.num_reads <= 6 * 18
    CountedBytes.num_reads = 0
    index.following(CorpusMatch(0, 0, num_tokens))
    # A sample, and two bisections of the gaps beside it, of 2**10, for each token returned.
    assert CountedBytes.num_reads <= 64 + MAX_FOLLOWING * 2 * 11


def test_a_vocabulary_is_its_tokens_and_their_ids() -> None:
    vocabulary = Vocabulary.of({"a": 0, "b": 5})
    assert vocabulary == Vocabulary.of({"b": 5, "a": 0})
    assert vocabulary.size == 6 and Vocabulary.of({}).size == 0
    others = [{"a": 5, "b": 0}, {"a": 0}, {"a": 0, "b": 6}, {"a": 0, "c": 5}, {"a": 0, "b\n": 5}]
    digests = {vocabulary.sha256, *(Vocabulary.of(other).sha256 for other in others)}
    assert len(digests) == 1 + len(others)
