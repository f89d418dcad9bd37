"""What is special to onnxruntime's sessions in main memory: bound buffers, and their faults."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import onnxruntime
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from fixtures.session_cases import Opened, open_case

Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


@pytest.fixture(scope="module", params=["ort", "ort-stacked", "ort-normed"])
def held(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Of each form of attention that exporters/onnx/attention.py writes."""
    return open_case(request.param, tmp_path_factory.mktemp("ort"))


@pytest.fixture
def both(held: Opened) -> Any:
    return held.both()


def test_an_interrupted_tree_leaves_no_mask_behind(
    both: Any, tokens: Tokens, random_tree: RandomTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask's buffer is that of all passes of this width."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    both.prefill(tokens(20))
    both.chain(tokens(7, seed=1))  # the width is bound
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime.InferenceSession, "run_with_iobinding", interrupted)
        with pytest.raises(KeyboardInterrupt):
            both.sessions[0].forward(random_tree(7, seed=2))
    both.prefill(tokens(9, seed=3))
    both.chain(tokens(7, seed=4))


def test_a_failure_inside_onnxruntime_is_one_line_and_leaves_the_session_usable(
    both: Any, tokens: Tokens, random_tree: RandomTree
) -> None:
    both.prefill(tokens(8))
    tree = random_tree(6)
    tree.tokens[3] = 10_000  # no token of this model
    with pytest.raises(SessionError, match="6 rows at 8 tokens") as caught:
        both.sessions[0].forward(tree)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="the rows to commit are gone"):
        both.sessions[0].commit([0])
    both.chain(tokens(6))
    both.forward(random_tree(6, seed=1))


def test_a_closed_session_gives_its_memory_back_at_once(held: Opened, tokens: Tokens) -> None:
    """An engine is part of a cycle, which Python may keep for hours: in a long run, forks that were
    closed took 6 MB each."""
    session = held.model.open_session()
    session.prefill(tokens(20))
    scores = session.forward(TokenTree.chain(1, [2, 3])).logits
    assert scores.base is not None
    buffer = weakref.ref(scores.base)
    del scores
    session.close()
    assert buffer() is None
