"""Chooses the rows of a tree that are scored, where not all of them fit or pay."""

from __future__ import annotations

import numpy as np

from edge_spec.core.tree import Siblings, TokenTree


def chain_first(tree: TokenTree, num_rows: int, min_reach: float = 0.0) -> TokenTree:
    """Takes the best chain, up to its last row that is reached with `min_reach` or more, and after
    it the other rows that are required; `num_rows` at most. Rows that can do without are left out.
    """
    reach: list[float] = tree.reach.tolist()
    if tree.is_chain and not tree.required:  # most rounds
        return tree.first_rows(min(num_rows, sum(chance >= min_reach for chance in reach)))
    expected = reach.copy()
    for row, parent in enumerate(tree.parents.tolist()):
        if row:
            expected[row] += expected[parent]
    path = tree.path(expected.index(max(expected)))
    path = [row for row in path if reach[row] >= min_reach][:num_rows]
    others = (row for row, required in enumerate(tree.required) if required and row not in path)
    return tree.select(path + list(others)[: num_rows - len(path)])


def likeliest(tree: TokenTree, num_rows: int, min_reach: float = 0.0) -> TokenTree:
    """Takes the `num_rows` rows that are most likely to be accepted, each with `min_reach` or more.
    Rows that are required go before all others, however unlikely. Siblings of K_SEQ are kept or
    dropped together, by the last of them."""
    if tree.siblings is Siblings.K_SEQ and tree.draft_probs and not tree.is_chain:
        return tree.select(sorted(_likeliest_groups(tree, num_rows, min_reach)))
    reach = tree.reach
    if not tree.required and bool((reach[1:] <= reach[:-1]).all()):
        return tree.first_rows(min(num_rows, int((reach >= min_reach).sum())))
    wanted = np.array(tree.required or (False,) * len(tree))
    wanted[0] = True
    # Stable, and no row is likelier than its parent: parents come before their children.
    order = np.lexsort((-reach, ~wanted))
    rows = [int(row) for row in order if wanted[row] or reach[row] >= min_reach]
    return tree.select(sorted(rows[:num_rows]))


def _likeliest_groups(tree: TokenTree, num_rows: int, min_reach: float) -> list[int]:
    """Returns rows whose siblings are all among them. Whether a group is depends on none of its own
    tokens: what is below it, which may depend on them, comes after it."""
    reach: list[float] = tree.reach.tolist()
    least: dict[int, float] = {}  # chance of a row's children, by the least likely on the way
    for row, parent in enumerate(tree.parents.tolist()):
        below = tree.children(row)
        if below:
            least[row] = min(least.get(parent, 1.0), *(reach[child] for child in below))
    kept = [0]
    for row in sorted(least, key=lambda row: (-least[row], row)):
        group = tree.children(row)
        fits = len(kept) + len(group) <= num_rows
        if row in kept and fits and least[row] >= min_reach:
            kept += group
    return kept
