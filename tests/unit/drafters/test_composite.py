"""Several drafters as one: merged trees keep every path, and each learns from its own draft
tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.drafters.tree_builder import merge

BUDGET = Budget(num_draft_tokens=4, num_rows=16)


class Proposes(Drafter):
    """A drafter with one tree, which records what it is shown."""

    def __init__(self, name: str, tree: TokenTree) -> None:
        self.name = name
        self.tree = tree
        self.seen: list[Any] = []

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self.seen.append(tuple(prompt))

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        return self.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self.seen.append((tree, verdict))


@st.composite
def proposals(draw: st.DrawFn) -> list[TokenTree]:
    """Trees with few tokens, so that they overlap; siblings may be equal."""
    trees = []
    for which in range(draw(st.integers(1, 3))):
        rows = draw(st.integers(0, 6))
        rated = [draw(st.floats(0, 1, width=32)) for _ in range(rows)]
        trees.append(
            TokenTree(
                np.array([9, *(draw(st.integers(0, 2)) for _ in range(rows))], np.int32),
                np.array([-1, *(draw(st.integers(0, row)) for row in range(rows))], np.int32),
                np.array([1.0, *rated], np.float32),
                proposed_by=("", *(f"drafter{which}",) * rows),
                required=(True, *(draw(st.booleans()) for _ in range(rows))),
            )
        )
    return trees


def paths(tree: TokenTree) -> dict[tuple[int, ...], int]:
    """Each row by the tokens down to it."""
    return {tuple(tree.tokens[tree.path(row)].tolist()): row for row in range(len(tree))}


@given(trees=proposals())
def test_a_merged_tree_has_every_path_once_and_remembers_who_proposed_it(
    trees: list[TokenTree],
) -> None:
    rows, chances = merge(9, trees)
    tree = rows.tree([0.3] * len(rows))
    wanted = {path for each in trees for path in paths(each)} | {(9,)}
    assert len(tree) == len(wanted) and paths(tree).keys() == wanted
    for path, row in paths(tree).items():
        theirs = [
            (which, each, r)
            for which, each in enumerate(trees)
            for r in range(1, len(each))
            if tuple(each.tokens[each.path(r)].tolist()) == path
        ]
        assert not row or chances[row] == [each.confidence[r] for _, each, r in theirs]
        names = dict.fromkeys(each.proposed_by[r] for _, each, r in theirs)
        assert tree.proposed_by[row] == "+".join(names)
        if row and tree.required:
            assert tree.required[row] == any(each.required[r] for _, each, r in theirs)
    for row in range(len(tree)):
        assert tree.confidence[tree.children(row)].sum() <= 1 + 1e-6


@given(trees=proposals(), text=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_the_merged_tree_accepts_what_any_of_its_trees_would(
    trees: list[TokenTree], text: list[int]
) -> None:
    def accepted(tree: TokenTree) -> int:
        return sum(right for _, right in tree.followed(text))

    longest = 0
    for each in trees:  # of equal siblings any may be right
        for path in paths(each):
            draft_tokens = path[1:]
            longest = max(
                longest, len(draft_tokens) * (list(draft_tokens) == text[: len(draft_tokens)])
            )
    rows, _ = merge(9, trees)
    assert accepted(rows.tree([0.5] * len(rows))) == longest


def test_every_drafter_sees_the_prompt_and_each_outcome() -> None:
    first = Proposes("first", TokenTree.chain(0, [1], [0.9], "first"))
    second = Proposes("second", TokenTree.chain(0))
    composite = CompositeDrafter([first, second])
    assert composite.name == "first+second"
    composite.begin([5, 0])
    tree = composite.propose(0, BUDGET)
    verdict = Verdict((1, 2), (1,), True)
    composite.observe(tree, Forward(np.zeros((2, 4))), verdict)
    assert first.seen == second.seen == [(5, 0), (tree, verdict)]
