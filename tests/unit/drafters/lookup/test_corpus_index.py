"""The index of a corpus against a search that tries every place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.drafters.lookup.corpus_index import (
    MAX_MATCH,
    SEPARATOR,
    CorpusIndex,
    CorpusMatch,
    index_of,
    sorted_suffixes,
)

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
