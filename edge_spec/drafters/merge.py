"""Several trees of draft tokens in one: shared beginnings once, no two equal siblings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_spec.core.tree import TokenTree


class MergedRow:
    """A row of the result: its token, its parent's row, and the rows that it stands for."""

    def __init__(self, token: int, parent: int) -> None:
        self.token = token
        self.parent = parent
        self.sources: list[tuple[int, int]] = []  # (which tree, its row)
        self.drafters: list[str] = []
        self.required = False


def merge_rows(pending: int, trees: Sequence[TokenTree]) -> list[MergedRow]:
    """The rows of all trees, parents first. Every path of every tree is a path of the result, and
    no row has two children with the same token."""
    merged = [MergedRow(pending, -1)]
    rows: dict[tuple[int, int], int] = {}
    for which, tree in enumerate(trees):
        drafters = tree.proposed_by or ("",) * len(tree)
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        new_row = [0]
        for row in range(1, len(tree)):
            place = new_row[parents[row]], tokens[row]
            if place not in rows:
                rows[place] = len(merged)
                merged.append(MergedRow(token=place[1], parent=place[0]))
            new_row.append(rows[place])
            entry = merged[rows[place]]
            entry.sources.append((which, row))
            if drafters[row] not in entry.drafters:
                entry.drafters.append(drafters[row])
            entry.required |= bool(tree.required and tree.required[row])
    return merged


def tree_of(merged: Sequence[MergedRow], confidence: Sequence[float]) -> TokenTree:
    """confidence: of each row, the pending one's not read; siblings' are scaled to a sum of 1
    where they exceed it, since at most one of them is right."""
    below = [0.0] * len(merged)
    for row, entry in enumerate(merged):
        if row:
            below[entry.parent] += confidence[row]
    scaled = [
        confidence[row] / max(1.0, below[entry.parent]) if row else 1.0
        for row, entry in enumerate(merged)
    ]
    required = tuple(entry.required for entry in merged)
    return TokenTree(
        np.array([entry.token for entry in merged], np.int32),
        np.array([entry.parent for entry in merged], np.int32),
        np.array(scaled, np.float32),
        proposed_by=tuple("+".join(entry.drafters) for entry in merged),
        required=required if any(required) else (),
    )
