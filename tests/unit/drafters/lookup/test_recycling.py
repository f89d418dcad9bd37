"""Token recycling: which tokens it keeps, what it makes of them, and that no text changes."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.lookup import recycling
from edge_spec.drafters.lookup.recycling import (
    MAX_TABLE_TOKENS,
    TOP_TOKENS,
    RecyclingDrafter,
    top_tokens,
)
from edge_spec.drafters.protocol import Budget

CHILDREN = Budget(num_draft_tokens=1, num_rows=64)

# Below, at and above the size from which blocks are used (64 * 9), and no multiples of 64.


# Below, at and above the size from which blocks are used (64 * 9), and no multiples of 64.
@pytest.mark.parametrize(
    "vocab_size",
    [1, 3, 8, 63, 64, 65, 511, 513, 575, 576, 577, 639, 640, 641, 1000, 4097, 49_157],
)
def test_the_largest_logits_are_found_wherever_they_lie(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rising = np.arange(vocab_size, dtype=np.float32)
    # All of them among the tokens that are looked at together, or in the last, incomplete block.
    together = np.isin(rising, np.arange(64) * (vocab_size // 64)) * 1e6 + rising
    last = (rising >= vocab_size // 64 * 64) * 1e6 - rising
    drawn = [rng.permutation(rising) for _ in range(17)]
    equal = [rng.integers(0, levels, vocab_size) for levels in (1, 2, 5)]  # may change places
    logits = np.stack([rising, -rising, together, last, *drawn, *equal]).astype(np.float32)
    before = logits.copy()
    for count in (1, 3, TOP_TOKENS):
        count = min(count, vocab_size)
        found = top_tokens(logits, count)
        expected = -np.sort(-logits, axis=1)[:, :count]
        assert np.take_along_axis(logits, found, axis=1).tolist() == expected.tolist()
        assert all(len(set(row)) == count for row in found.tolist())
        assert np.array_equal(logits, before)


def draft_tokens(drafter: RecyclingDrafter, token: int) -> set[int]:
    """All that may follow a token."""
    return set(drafter.propose(token, CHILDREN).tokens[1:].tolist())


@st.composite
def scored(draw: st.DrawFn) -> tuple[TokenTree, list[int], int]:
    """A tree, the rows of it that the text keeps, and rows of padding after it."""
    tokens = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    parents = [-1, *(draw(st.integers(0, row)) for row in range(len(tokens) - 1))]
    tree = TokenTree(np.array(tokens), np.array(parents), np.ones(len(tokens)))
    return tree, tree.path(draw(st.integers(0, len(tokens) - 1))), draw(st.integers(0, 2))


@given(
    steps=st.lists(scored(), max_size=12), most=st.integers(1, 12), vocab_size=st.integers(10, 14)
)
def test_the_table_has_the_latest_row_of_each_token_the_texts_own_last(
    steps: list[tuple[TokenTree, list[int], int]], most: int, vocab_size: int
) -> None:
    """Against a dictionary; what was scored least lately is forgotten."""
    drafter, table = RecyclingDrafter(), {}  # type: ignore[var-annotated]
    drafter.begin([0])
    rng = np.random.default_rng(vocab_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recycling, "MAX_TABLE_TOKENS", most)
        for tree, kept, padding in steps:
            logits = rng.normal(size=(len(tree) + padding, vocab_size)).astype(np.float32)
            text = [*tree.tokens[kept[1:]].tolist(), 0]
            verdict = Verdict(tuple(text), tuple(kept[1:]), False)
            drafter.observe(tree, Forward(logits), verdict)
            rejected = [row for row in range(len(tree)) if row not in kept]
            for row in (*rejected, *kept):
                table.pop(int(tree.tokens[row]), None)
                table[int(tree.tokens[row])] = logits[row].argsort()[::-1][:TOP_TOKENS].tolist()
            table = dict(list(table.items())[-most:])
            state = drafter.state()
            assert state["tokens"].tolist() == list(table)
            assert state["entries"][:, 0].tolist() == list(table.values())
    for token in range(10):
        assert draft_tokens(drafter, token) == set(table.get(token, ()))


def size_in_bytes(held: Any) -> int:
    size = sys.getsizeof(held)
    if isinstance(held, dict):
        return size + sum(size_in_bytes(key) + size_in_bytes(held[key]) for key in held)
    if isinstance(held, (tuple, list)):
        return size + sum(map(size_in_bytes, held))
    if isinstance(held, np.ndarray) and held.base is not None:
        return size + size_in_bytes(held.base)
    return size


def test_the_table_is_bounded_in_bytes_also_when_it_is_restored() -> None:
    drafter, fresh = RecyclingDrafter(), RecyclingDrafter()
    drafter.begin([0])
    for start in range(0, 2 * MAX_TABLE_TOKENS, 64):
        logits = np.random.default_rng(start).normal(size=(64, 1000)).astype(np.float32)
        tree = TokenTree.chain(start, range(start + 1, start + 64))
        drafter.observe(tree, Forward(logits), Verdict((0,), (), False))
    fresh.load(drafter.state())
    for each in (drafter, fresh):
        assert len(each._table) == MAX_TABLE_TOKENS
        assert 0 < size_in_bytes(each._table) < 2_000_000


@pytest.mark.parametrize(
    "entries",
    [
        np.zeros((40, 16), np.int32),
        np.zeros((40, 3, 8), np.int32),
        np.zeros((39, 2, 8), np.int32),
        np.full((40, 2, 8), 24, np.int32),  # no such kind of draft token
        np.full((40, 2, 8), -1, np.int32),
    ],
)
def test_a_table_that_cannot_be_is_refused(entries: np.ndarray) -> None:
    drafter = RecyclingDrafter()
    state = drafter.state() | {"tokens": np.arange(40, dtype=np.int32)}
    with pytest.raises(ValueError, match="a table of shape"):
        drafter.load(state | {"entries": entries})
    drafter.load(state | {"entries": np.zeros((40, 2, 8), np.int32)})
