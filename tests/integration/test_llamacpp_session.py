"""The llama.cpp sessions do what the reference session does, operation for operation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError
from edge_spec.runtimes.llamacpp import LlamaCppModel
from fixtures.axes import each_first

Both = Any  # as in fixtures/side_by_side.py, with its Setup
Setup = Any
Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]
OpenLlama = Callable[..., LlamaCppModel]


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


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_stored_weights_score_the_same_in_a_pass_of_any_width(
    kind: str, llama: str, gguf: Callable[..., Path], open_llama: OpenLlama, tokens: Tokens
) -> None:
    """Wide passes may have other kernels: of a matrix of 64 and of 96 columns, here.

    Tokens are rounded to 8 bits for these weights, so other kernels differ by up to 1.5 in a
    logit; those that fail make 14.
    """
    one = open_llama(llama, gguf("llama", kind)).open_session()
    text = tokens(64)
    steps = []
    for token in text:
        steps.append(one.forward(TokenTree.chain(token)).logits[0].copy())
        one.commit([0])
    for rows in (2, 8, 31, 32, 33, 64):
        one.rollback(0)
        wide = one.forward(TokenTree.chain(text[0], text[1:rows])).logits
        np.testing.assert_allclose(wide, steps[:rows], atol=3, rtol=0)
    for size in (31, 32, 63):
        one.rollback(0)
        one.prefill(text[:size])
        after = one.forward(TokenTree.chain(text[size])).logits[0]
        np.testing.assert_allclose(after, steps[size], atol=3, rtol=0)


@pytest.mark.parametrize(("rows", "seed"), [(3, 0), (8, 0), (16, 1), (64, 0), (64, 1), (64, 2)])
def test_a_tree_scores_as_its_paths_one_by_one(
    rows: int, seed: int, session: Any, setup: Setup, tokens: Tokens, random_tree: RandomTree
) -> None:
    session.prefill(tokens(30, seed))
    tree = random_tree(rows, seed)
    out = session.forward(tree).logits.copy()
    leaves = np.setdiff1d(np.arange(rows), tree.parents)
    assert len(leaves) > rows // 3
    for leaf in leaves:
        path = tree.path(int(leaf))
        chain = tree.tokens[path].tolist()
        alone = session.forward(TokenTree.chain(chain[0], chain[1:])).logits
        np.testing.assert_allclose(out[path], alone, atol=setup.own_tolerance, rtol=0)


@pytest.mark.parametrize("rows", [2, 8, 64])
def test_a_tree_of_leaves_alone(rows: int, both: Both, tokens: Tokens) -> None:
    """As many sequences as there can be beside the root's, on an empty cache too."""
    star = TokenTree(
        np.array(tokens(rows), np.int32),
        np.array([-1] + [0] * (rows - 1), np.int32),
        np.ones(rows, np.float32),
    )
    both.forward(star)
    both.commit([0, rows - 1])
    both.forward(star)
    both.commit([0])
    both.chain(tokens(4, seed=1))


def left_over(session: Any) -> tuple[int, int, list[int]]:
    """Bytes of the committed sequence, its first position, and what else the cache holds."""
    session.prefill([])  # removes what was not committed
    library, context = session._library, session._opened.handle
    memory = library.memory(context)
    others = [s for s in range(1, 64) if library.sequence_start(memory, s) != -1]
    return library.state_size(context, 0, 0), library.sequence_start(memory, 0), others


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
    each_first(
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


@pytest.mark.parametrize("seed", range(2))
def test_trees_until_the_context_is_full(
    seed: int, setup: Setup, make_both: Callable[..., Both], tokens: Tokens, random_tree: RandomTree
) -> None:
    """The cache's free cells lie scattered in the end."""
    both, random = make_both(setup, context_length=256), np.random.RandomState(seed)
    session, reference = both.sessions
    both.prefill(tokens(20, seed))
    round = 0
    while both.length + 40 <= 256:
        tree, row = random_tree(40, 1000 * seed + round), random.randint(40)
        if round % 4 == 0:
            both.forward(tree)
        else:
            session.forward(tree)
        session.commit(tree.path(row))
        reference.prefill(tree.tokens[tree.path(row)].tolist())
        round += 1
    with pytest.raises(ContextFullError):
        session.forward(random_tree(40))
    left = 256 - both.length
    both.chain(tokens(left))
    both.commit(range(left))
    with pytest.raises(ContextFullError, match="257 tokens do not fit the context of 256"):
        session.prefill([1])
    both.rollback(200)
    both.forward(random_tree(40))
