"""Token trees: validation, shape queries and verdicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.tree import Siblings, TokenTree, Verdict, chain_first, likeliest


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


@st.composite
def rated_trees(draw: st.DrawFn) -> TokenTree:
    """Trees with few tokens, so that siblings may be equal, some with rows that are needed."""
    parents = draw(parents_lists())
    rows = len(parents) + 1
    tenths = st.integers(0, 10).map(lambda n: n / 10)
    needed = [True] + [draw(st.booleans()) for _ in parents]
    for row in range(1, rows):  # an ancestor of a needed row is needed
        needed[row] &= needed[parents[row - 1]]
    return TokenTree(
        np.array([7, *(draw(st.integers(0, 2)) for _ in parents)], np.int32),
        np.array([-1, *parents], np.int32),
        np.array([1.0, *(draw(tenths) for _ in parents)], np.float32),
        proposed_by=("", *(f"row {row}" for row in range(1, rows))),
        required=tuple(needed) if draw(st.booleans()) else (),
    )


def chance(tree: TokenTree, row: int) -> float:
    product = 1.0
    for ancestor in tree.path(row)[1:]:
        product *= float(tree.confidence[ancestor])
    return product


@given(tree=rated_trees())
def test_reach_is_the_chance_of_the_whole_path(tree: TokenTree) -> None:
    for row in range(len(tree)):
        assert tree.reach[row] == pytest.approx(chance(tree, row))


@given(tree=rated_trees(), token=st.integers(0, 3))
def test_a_child_is_found_by_its_token(tree: TokenTree, token: int) -> None:
    for row in range(len(tree)):
        found = [child for child in tree.children(row) if tree.tokens[child] == token]
        assert tree.child(row, token) == (found[0] if found else None)


@given(tree=rated_trees(), num_rows=st.integers(1, 10), limit=st.integers(0, 9))
def test_the_likeliest_rows_are_needed_or_likelier_than_all_others(
    tree: TokenTree, num_rows: int, limit: int
) -> None:
    min_reach = limit / 10 + 0.05  # away from the tenths, where float32 would decide
    kept = likeliest(tree, num_rows, min_reach)
    names = kept.proposed_by
    rows = [tree.proposed_by.index(name) for name in names]
    assert rows == sorted(rows) and rows[0] == 0 and len(rows) <= num_rows
    for new, row in enumerate(rows):  # each with its own parent, token and confidence
        assert kept.tokens[new] == tree.tokens[row]
        assert kept.confidence[new] == tree.confidence[row]
        assert new == 0 or names[kept.parents[new]] == tree.proposed_by[tree.parents[row]]
    needed = tree.required or (False,) * len(tree)
    left = [row for row in range(1, len(tree)) if row not in rows]
    for row in left:
        if needed[row]:
            assert len(rows) == num_rows and all(needed[other] for other in rows)
        elif chance(tree, row) >= min_reach:
            assert len(rows) == num_rows
            assert all(
                needed[other] or chance(tree, other) >= chance(tree, row) - 1e-6 for other in rows
            )
    for row in rows[1:]:
        assert needed[row] or chance(tree, row) >= min_reach - 1e-6


@given(tree=rated_trees(), num_rows=st.integers(1, 10), limit=st.integers(0, 9))
def test_the_chain_with_most_expected_draft_tokens_comes_first(
    tree: TokenTree, num_rows: int, limit: int
) -> None:
    min_reach = limit / 10 + 0.05  # away from the tenths, where float32 would decide
    cut = chain_first(tree, num_rows, min_reach)
    rows = [tree.proposed_by.index(name) for name in cut.proposed_by]
    assert len(rows) <= num_rows and len(set(rows)) == len(rows)
    for new, row in enumerate(rows):
        assert cut.tokens[new] == tree.tokens[row]
        assert new == 0 or rows[cut.parents[new]] == tree.parents[row]

    def expected(row: int) -> float:
        return sum(chance(tree, above) for above in tree.path(row)[1:])

    best = max(map(expected, range(len(tree))))
    likely = [row for row in range(len(tree)) if expected(row) >= best - 1e-6]
    paths = [[r for r in tree.path(row) if not r or chance(tree, r) >= min_reach] for row in likely]
    assert any(rows[: len(path)] == path[:num_rows] for path in paths)
    # After it all rows that are needed, as far as there is room, and no others.
    chain = max(len(path) for path in paths if rows[: len(path)] == path[:num_rows])
    needed = {row for row, wanted in enumerate(tree.required) if wanted}
    assert set(rows[chain:]) <= needed
    if len(rows) < num_rows:
        assert needed <= set(rows)


@st.composite
def sampled_trees(draw: st.DrawFn) -> TokenTree:
    """Rated trees of which some rows were sampled, each with an array of its own."""
    tree = draw(rated_trees())
    sampled = [draw(st.booleans()) for _ in range(len(tree) - 1)]
    probs = (np.full(3, row) if is_sampled else None for row, is_sampled in enumerate(sampled, 1))
    return replace(tree, draft_probs=(None, *probs), siblings=draw(st.sampled_from(Siblings)))


@given(tree=sampled_trees())
def test_sampled_rows_are_told_from_certain_ones(tree: TokenTree) -> None:
    for row in range(len(tree)):
        children = tree.children(row)
        assert tree.is_sampled(row) == any(tree.draft_probs[i] is not None for i in children)
        chain = tree.sampled_chain(row)
        for above, below in pairwise([row, *chain]):
            assert tree.children(above) == [below] and tree.draft_probs[below] is not None
        beyond = tree.children(chain[-1] if chain else row)
        assert len(beyond) != 1 or tree.draft_probs[beyond[0]] is None


def test_a_tree_without_draft_probs_has_no_sampled_row() -> None:
    tree = TokenTree.chain(1, [2, 3])
    assert not tree.is_sampled(0) and not tree.is_sampled(2)


@given(tree=sampled_trees(), num_rows=st.integers(1, 10), limit=st.integers(0, 9))
def test_rows_keep_what_they_were_sampled_from(tree: TokenTree, num_rows: int, limit: int) -> None:
    for cut in (
        likeliest(tree, num_rows, limit / 10),
        chain_first(tree, num_rows, limit / 10),
        tree.first_rows(num_rows),
        tree.select(tree.path(len(tree) - 1)),
    ):
        assert cut.siblings is tree.siblings
        rows = [tree.proposed_by.index(name) for name in cut.proposed_by]
        assert [id(probs) for probs in cut.draft_probs] == [
            id(tree.draft_probs[row]) for row in rows
        ]


@given(tree=rated_trees())
def test_the_leading_chain_ends_where_the_first_row_is_no_child_of_the_one_before(
    tree: TokenTree,
) -> None:
    length = tree.leading_chain
    assert tree.first_rows(length).is_chain
    assert length == len(tree) or not tree.first_rows(length + 1).is_chain


@given(tree=rated_trees(), text=st.lists(st.integers(0, 2), max_size=5))
def test_followed_rows_are_the_children_of_the_texts_path(tree: TokenTree, text: list[int]) -> None:
    expected = []
    row: int | None = 0
    for token in text:
        if row is None:
            break
        children = tree.children(row)
        expected += [(child, tree.tokens[child] == token) for child in children]
        row = next((child for child in children if tree.tokens[child] == token), None)
    assert list(tree.followed(text)) == expected


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
        ([1, 2], [-1, 0], [1, 1], {"required": (True,)}),
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
