"""What a llama.cpp session refuses, and that it goes on after a failure or an interrupt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError

Both = Any  # as in fixtures/side_by_side.py, with its Setup
Setup = Any
Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


@pytest.mark.parametrize("token", [-1, 265, 2**31 - 1])
@pytest.mark.parametrize("scored", [False, True])
def test_a_token_outside_the_vocabulary_is_refused_and_the_session_goes_on(
    token: int, scored: bool, both: Both, session: Any, tokens: Tokens, random_tree: RandomTree
) -> None:
    """Nothing is read beyond the embeddings."""
    both.prefill(tokens(8))
    tree = random_tree(6)
    tree.tokens[3] = token
    with pytest.raises((SessionError, ValueError)) as caught:
        session.forward(tree) if scored else session.prefill(tree.tokens.tolist())
    assert "\n" not in str(caught.value)
    assert both.length == 8
    both.chain(tokens(6))
    both.forward(random_tree(6, seed=1))


def test_a_failed_pass_says_where_and_the_session_goes_on(
    both: Both, session: Any, tokens: Tokens, random_tree: RandomTree
) -> None:
    library = session._weights.library
    both.prefill(tokens(8))
    for tree in (random_tree(6), TokenTree.chain(1, tokens(5))):
        session._weights.library = library.replacing(llama_decode=lambda context, batch: -3)
        with pytest.raises(SessionError, match=r"6 tokens after 8 \(status -3\)"):
            session.forward(tree)
        session._weights.library = library
        both.chain(tokens(6))
        both.forward(random_tree(6, seed=1))


@pytest.mark.parametrize("at", range(1, 18))
@pytest.mark.parametrize("reads", [False, True])
def test_ctrl_c_between_two_calls_of_the_library_loses_no_committed_token(
    reads: bool, at: int, both: Both, session: Any, tokens: Tokens, random_tree: RandomTree
) -> None:
    """A second Ctrl-C raises wherever the program is, and a chat goes on afterwards."""
    left = at

    def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                raise KeyboardInterrupt
            return function(*arguments)

        return call

    library, names = session._weights.library, ("llama_decode", "llama_memory_seq_cp")
    both.prefill(tokens(8))
    tree = random_tree(6, seed=2)
    changed = {n: interrupted(getattr(library, n)) for n in (*names, "llama_memory_seq_rm")}
    session._weights.library = library.replacing(**changed)
    try:
        session.forward(tree)
        session.commit(tree.path(5))
        if reads:
            session.prefill(tokens(6, seed=3))
    except KeyboardInterrupt:
        session._weights.library = library
        session.rollback(8)
        both.chain(tokens(3))
        both.forward(random_tree(6, seed=1))
        both.commit([0])
        both.chain(tokens(4))
