"""Token trees: validation, shape queries and verdicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.tree import TokenTree, Verdict


@st.composite
def parents_lists(draw: st.DrawFn) -> list[int]:
    """Parents of rows 1, 2, ..., each an earlier row."""
    return [draw(st.integers(0, row)) for row in range(draw(st.integers(0, 8)))]


@given(parents=parents_lists())
def test_depths_ancestors_and_paths_follow_the_parents(make_tree: Any, parents: list[int]) -> None:
    tree = make_tree(7, [1] * len(parents), parents)
    above = [-1, *parents]
    for row in range(len(tree)):
        path = [row]
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
        assert tree.path(row) == path
        assert tree.depths[row] == len(path) - 1
        assert np.flatnonzero(tree.ancestors[row]).tolist() == sorted(path)
        assert tree.children(row) == [child for child, up in enumerate(above) if up == row]
    assert tree.is_chain == (above == list(range(-1, len(parents))))


@given(parents=parents_lists(), rows=st.integers(1, 12))
def test_first_rows_and_padded_keep_the_rows_they_share(
    make_tree: Any, parents: list[int], rows: int
) -> None:
    tree = make_tree(7, [1] * len(parents), parents)
    first, padded = tree.first_rows(rows), tree.padded(rows)
    assert len(first) == min(rows, len(tree)) and len(first.proposed_by) == len(first)
    assert len(padded) == max(rows, len(tree))
    for other in (first, padded):
        shared = min(len(other), len(tree))
        assert (other.tokens[:shared] == tree.tokens[:shared]).all()
        assert (other.parents[:shared] == tree.parents[:shared]).all()
    # Below the last row: no row that is read attends to padding.
    assert not padded.ancestors[: len(tree), len(tree) :].any()


def test_a_padded_chain_is_a_chain() -> None:
    assert TokenTree.chain(1, [2, 3]).padded(5).is_chain


def test_a_chain_carries_confidence_and_drafter() -> None:
    tree = TokenTree.chain(5, [6, 7], [0.5, 0.25], "suffix")
    assert tree.tokens.tolist() == [5, 6, 7] and tree.parents.tolist() == [-1, 0, 1]
    assert tree.confidence.tolist() == [1.0, 0.5, 0.25]
    assert tree.proposed_by == ("", "suffix", "suffix")
    assert TokenTree.chain(5, [6]).confidence.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("tokens", "parents", "confidence", "more"),
    [
        ([], [], [], {}),
        ([1, 2], [-1], [1, 1], {}),
        ([1, 2], [-1, 0], [1], {}),
        ([1], [0], [1], {}),
        ([1, 2], [-1, 1], [1, 1], {}),  # its own parent
        ([1, 2, 3], [-1, 2, 0], [1, 1, 1], {}),  # a parent after its child
        ([1, 2, 3], [-1, 0, -1], [1, 1, 1], {}),  # a second root
        ([1, 2], [-1, 0], [1, 1], {"draft_probs": (None,)}),
        ([1, 2], [-1, 0], [1, 1], {"proposed_by": ("",)}),
    ],
)
def test_a_malformed_tree_is_refused(
    tokens: list[int], parents: list[int], confidence: list[float], more: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):
        TokenTree(np.array(tokens), np.array(parents), np.array(confidence), **more)


@pytest.mark.parametrize(
    ("count", "tokens", "accepted", "kept"),
    [
        (1, (8,), (2,), (0,)),
        (2, (8, 9), (2, 4), (0, 2)),
        (3, (8, 9, 5), (2, 4), (0, 2, 4)),
        (4, (8, 9, 5), (2, 4), (0, 2, 4)),
    ],
)
def test_a_cut_verdict_keeps_the_rows_of_all_tokens_but_the_last(
    count: int, tokens: tuple[int, ...], accepted: tuple[int, ...], kept: tuple[int, ...]
) -> None:
    verdict = Verdict((8, 9, 5), accepted_rows=(2, 4), exhausted=True).first_tokens(count)
    assert verdict.tokens == tokens
    assert verdict.accepted_rows == accepted and verdict.num_accepted == len(accepted)
    assert verdict.kept == kept
    assert verdict.next_token == tokens[-1]
