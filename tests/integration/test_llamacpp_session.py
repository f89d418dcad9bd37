"""The llama.cpp sessions do what the reference session does, operation for operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.runtimes.llamacpp.context import HELD
from fixtures.axes import each

Both = Any  # as in fixtures/side_by_side.py, with its Setup
Setup = Any
Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


VARIANTS = ["llama", "llama-bias", "llama-tied", "llama-linear", "llama-llama3"]
VARIANTS += ["mistral", "qwen2", "qwen3"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_scores_as_the_reference(
    variant: str,
    setup: Setup,
    gguf: Callable[..., Path],
    make_both: Callable[..., Both],
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    both = make_both(setup, gguf(variant))
    both.prefill(tokens(60))
    both.chain(tokens(10, seed=1))
    both.forward(random_tree(20))


def left_over(session: Any) -> tuple[int, int, list[int]]:
    """Bytes of the committed sequence, its first position, and what else the cache holds."""
    session.state()  # removes what was not committed
    context, number = session._sequence.home, session._sequence.number
    numbers = (each for each in range(64) if each not in (number, HELD))
    others = [each for each in numbers if context.first_position(each) != -1]
    return len(context.read(number)), context.first_position(number), others


@pytest.mark.parametrize("seed", range(4))
def test_a_committed_branch_leaves_what_its_path_alone_leaves(
    seed: int, setup: Setup, make_both: Callable[..., Both], tokens: Tokens, random_tree: RandomTree
) -> None:
    branched, alone = make_both(setup).sessions[0], make_both(setup).sessions[0]
    for session in (branched, alone):
        session.prefill(tokens(20, seed))
    for round in range(4):
        tree = random_tree(24, 10 * seed + round)
        branched.forward(tree)
        # The first leaf is sequence 0, which is kept as it is; the others have to be moved.
        path = tree.path(23) if round else tree.path(int(np.setdiff1d(range(24), tree.parents)[0]))
        branched.commit(path)
        alone.prefill(tree.tokens[path].tolist())
        assert branched.length == alone.length
        assert left_over(branched) == left_over(alone)
        assert left_over(branched)[1:] == (0, [])
        probe = TokenTree.chain(1, tokens(3, round))
        found, expected = branched.forward(probe).logits, alone.forward(probe).logits
        np.testing.assert_allclose(found, expected, atol=setup.own_tolerance, rtol=0)


@pytest.mark.parametrize(
    ("uncommitted", "after"),
    each(
        ["chain", "tree", "chain tree", "tree chain", "tree tree"],
        ["tree", "prefill", "growth", "rollback", "chain"],
    ),
)
def test_rows_that_are_not_committed_leave_no_trace(
    uncommitted: str, after: str, both: Both, tokens: Tokens, random_tree: RandomTree
) -> None:
    def score(kind: str, seed: int) -> None:
        tree = TokenTree.chain(3, tokens(7, seed)) if kind == "chain" else random_tree(12, seed)
        both.forward(tree)

    both.prefill(tokens(20))
    for seed, kind in enumerate(uncommitted.split()):
        score(kind, seed)
    if after == "prefill":
        both.prefill(tokens(5, seed=7))
    elif after == "growth":
        both.prefill(tokens(600, seed=7))
    elif after == "rollback":
        both.rollback(9)
    else:
        score(after, 8)
        both.commit([0, 1])
    _, start, others = left_over(both.sessions[0])
    assert (start, others) == (0, [])
    both.chain(tokens(5, seed=9))
