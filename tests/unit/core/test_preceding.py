"""Which rows stand before those of a pass in their paths."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.core.tree import NOTHING, TokenTree, chain_parents, parents_seen, preceding


def test_rows_of_a_chain_follow_each_other_and_the_text_before_them() -> None:
    found = preceding(chain_parents(3), 5, 2)
    np.testing.assert_array_equal(found, [[4, 5, 6], [3, 4, 5]])


def test_nothing_stands_before_the_text() -> None:
    found = preceding(chain_parents(3), 0, 3)
    np.testing.assert_array_equal(found, [[-1, 0, 1], [-1, -1, 0], [-1, -1, -1]])
    assert NOTHING == -1


@pytest.mark.parametrize("start", [0, 1, 7])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_a_tree_have_what_stands_before_them_in_their_paths(seed: int, start: int) -> None:
    random = np.random.RandomState(seed)
    parents = np.array([-1, *(random.randint(0, row) for row in range(1, 12))])
    tree = TokenTree(np.arange(12), parents, np.ones(12))
    found = preceding(tree.parents, start, 4)
    for row in range(12):
        path = [*range(start), *(start + np.array(tree.path(row)))]
        padded = [NOTHING] * 4 + path[:-1]
        assert found[:, row].tolist() == padded[-1:-5:-1]


@pytest.mark.parametrize("seed", range(3))
def test_what_rows_see_tells_their_parents(seed: int) -> None:
    random = np.random.RandomState(seed)
    parents = np.array([-1, *(random.randint(0, row) for row in range(1, 12))])
    tree = TokenTree(np.arange(12), parents, np.ones(12))
    np.testing.assert_array_equal(parents_seen(tree.ancestors), parents)
    rest = np.where(parents[1:] > 0, parents[1:] - 1, -1)  # the root's children have no parent
    np.testing.assert_array_equal(parents_seen(tree.ancestors[1:, 1:]), rest)
