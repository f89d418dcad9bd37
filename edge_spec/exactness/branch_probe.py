"""Measures whether rows of a branch are scored as the same rows of a chain are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Session
from edge_spec.core.tree import TokenTree

BRANCH_ROWS, BRANCH_ROUNDS = 8, 4  # of a small model's probe
_TOP_TOKENS = 32


class Branching(NamedTuple):
    """A tree of BRANCH_ROWS rows, and the rows of it that are a chain and kept."""

    parents: tuple[int, ...]
    kept: tuple[int, ...]


# The kept rows go on after three rows of another branch, or come before rows that are not kept.
BRANCHES = Branching((-1, 0, 1, 2, 0, 4, 5, 6), (0, 4, 5, 6, 7))
PROBES = Branching((-1, 0, 1, 2, 0, 4, 1, 6), (0, 1, 2, 3))


def measure_branch(
    session: Session, vocab_size: int, num_rounds: int, branching: Branching
) -> tuple[float, bool]:
    """Returns the largest change of a margin between the kept rows of a tree and the same tokens as
    a chain, and whether they were bit-identical; as they are scored and after they were committed.

    Several rounds unless the first one tells: a cache may place tokens in the holes that rejected
    rows leave, and order matters from then on. session: holds the prompt, before and after.
    """
    drawn = np.random.default_rng(1).integers(0, vocab_size, num_rounds * BRANCH_ROWS)
    rounds = drawn.reshape(-1, BRANCH_ROWS).astype(np.int32)
    margin, identical = 0.0, True
    for count in (1, len(rounds)):
        if identical:
            branched, chained = (
                _score_rounds(session, rounds[:count], branching, branches)
                for branches in (True, False)
            )
            margin = margin_change(branched, chained)
            identical = bool(np.array_equal(branched, chained))
    return margin, identical


def _score_rounds(
    session: Session, rounds: np.ndarray, branching: Branching, branches: bool
) -> np.ndarray:
    """Returns the logits of the kept rows, as a tree or as a chain."""
    parents, path = np.array(branching.parents, np.int32), list(branching.kept)
    length, rows = session.length, []
    for tokens in rounds:
        chain = TokenTree.chain(int(tokens[0]), tokens[path[1:]].tolist())
        tree = TokenTree(tokens, parents, np.ones(BRANCH_ROWS, np.float32))
        kept = path if branches else list(range(len(path)))
        rows.append(session.forward(tree if branches else chain).logits[kept].copy())
        session.commit(kept)
    session.rollback(length)
    return np.concatenate(rows)


def margin_change(logits: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest change, over rows, of a likely token's distance to the likeliest."""
    count = min(_TOP_TOKENS, expected.shape[1])
    top = np.argpartition(expected, -count, axis=1)[:, -count:]
    change = np.take_along_axis(logits - expected, top, axis=1)
    best = np.take_along_axis(logits - expected, expected.argmax(axis=1)[:, None], axis=1)
    return float(np.abs(change - best).max())
