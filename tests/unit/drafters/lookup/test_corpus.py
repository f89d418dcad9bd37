"""What the corpus drafter proposes, how sure it is, and what it learns."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup.answers import CorpusDrafter, _kind, _priors
from edge_spec.drafters.lookup.corpus_index import MAX_MATCH, index_of
from edge_spec.drafters.protocol import Budget

VOCAB_SIZE = 100
BUDGET = Budget(num_draft_tokens=4, num_rows=64)
OUT = Forward(np.zeros((1, 1), np.float32))
POEM = list(range(10, 40))

document_lists = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3
)


def drafter_of(*documents: Sequence[int]) -> CorpusDrafter:
    return CorpusDrafter([index_of(documents, VOCAB_SIZE)])


def proposed(drafter: CorpusDrafter, text: Sequence[int], budget: Budget = BUDGET) -> TokenTree:
    drafter.begin(text)
    return drafter.propose(text[-1], budget)


def paths(tree: TokenTree) -> dict[tuple[int, ...], float]:
    """The tokens below the pending one on the way to each row, and the row's confidence."""
    return {
        tuple(int(tree.tokens[step]) for step in tree.path(row)[1:]): float(tree.confidence[row])
        for row in range(1, len(tree))
    }


def write(drafter: CorpusDrafter, *tokens: int) -> None:
    drafter.observe(TokenTree.chain(0), OUT, Verdict(tokens, (), True))


def test_what_follows_the_match_is_proposed() -> None:
    tree = proposed(drafter_of(POEM), [5, 10, 11, 12])
    assert tree.tokens.tolist() == [12, 13, 14, 15, 16] and tree.is_chain
    assert tree.proposed_by == ("", *["corpus"] * 4)
    # The longer the match, the surer; below a draft token the match is longer by it.
    expected = [_priors()[_kind(length, 1, 1)] for length in (3, 4, 5, 6)]
    assert tree.confidence[1:].tolist() == pytest.approx(expected)


@given(documents=document_lists, text=st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_several_corpora_are_as_one_of_all_their_documents(
    documents: list[list[int]], text: list[int]
) -> None:
    together = drafter_of(*documents)
    apart = CorpusDrafter([index_of([document], VOCAB_SIZE) for document in documents])
    assert paths(proposed(apart, text)) == paths(proposed(together, text))


@given(
    documents=document_lists,
    text=st.lists(st.integers(0, 2), min_size=20, max_size=40),
    cuts=st.lists(st.integers(1, 5), max_size=40),
)
def test_the_text_is_followed_however_it_comes(
    documents: list[list[int]], text: list[int], cuts: list[int]
) -> None:
    whole, by_parts = drafter_of(*documents), drafter_of(*documents)
    by_parts.begin(text[:1])
    begin = 1
    for cut in itertools.chain(cuts, itertools.repeat(3)):
        if begin >= len(text):
            break
        write(by_parts, *text[begin : begin + cut])
        begin += cut
    assert paths(by_parts.propose(text[-1], BUDGET)) == paths(proposed(whole, text))
    assert len(by_parts._text) <= MAX_MATCH
