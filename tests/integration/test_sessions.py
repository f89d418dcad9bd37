"""One contract for the sessions of every runtime: what they promise, in any order of calls, at
their limits, beside each other, and after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Interruptible
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError, SessionError, UsageError
from edge_spec.testing import check_session
from fixtures import npu_stand_in
from fixtures.session_cases import CASES, Opened, open_case, random_tree

STEPS = 25
# Around what one pass of a prefill takes (64, 256, 512) and where caches grow (512).
SIZES = (1, 2, 7, 63, 64, 65, 120, 255, 256, 257, 300, 513)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Opened]]:
    """opened(name, context_length=None): a model of session_cases.CASES, opened once."""
    models = ExitStack()  # closed here: what is collected later warns in a test of another file

    @cache
    def open_once(name: str, context_length: int | None = None) -> Opened:
        directory = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("EDGE_SPEC_CACHE", str(directory / "cache"))
            npu_stand_in.put_in_place(patched)
            found = open_case(name, directory, context_length)
        models.callback(found.model.close)
        return found

    with models:
        yield open_once


@pytest.fixture(params=CASES)
def held(request: pytest.FixtureRequest, opened: Callable[..., Opened]) -> Opened:
    return opened(request.param)


@pytest.mark.parametrize("name", CASES)
def test_it_passes_the_conformance_suite(name: str, opened: Callable[..., Opened]) -> None:
    short = opened(name, 48)
    assert check_session(short.model, short.case.own_tolerance).max_difference >= 0


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))]
)
def test_anything_in_any_order_scores_as_the_reference(seed: int, held: Opened) -> None:
    """Chains, trees and prefills of any size, on an empty cache too, committed in part, as a branch
    or not at all, rolled back, until the context is full and after it; beside a session that holds
    another text, and one that is closed meanwhile."""
    random = np.random.RandomState(seed)
    capabilities, context = held.model.capabilities, held.model.config.context_length
    both, other, closed = held.both(), held.both(), held.both()
    other.prefill([5, 9, 100])
    closed.prefill([7])
    for step in range(STEPS):
        room = context - both.length
        kind = random.randint(6)
        if room < capabilities.max_rows or kind == 0:
            both.rollback(random.randint(both.length + 1))
        elif kind == 1:
            sizes = [size for size in SIZES if size <= room]
            size = sizes[random.randint(len(sizes))]
            both.prefill(random.randint(0, 262, size).tolist())
        else:
            widest = capabilities.max_rows if kind == 2 else min(20, capabilities.max_rows)
            branches = capabilities.trees and kind != 3
            tree = random_tree(random, random.randint(1, widest + 1), branches)
            both.forward(tree)
            if kind != 4:
                both.commit(tree.path(random.randint(len(tree))))
        if step == STEPS // 2:
            closed.sessions[0].close()
    both.rollback(min(both.length, context - 5))
    both.chain([1, 2, 3, 4, 5])
    other.chain([1, 2])


def test_a_full_context_says_so_and_loses_nothing(held: Opened) -> None:
    context = held.model.config.context_length
    both = held.both()
    both.prefill((list(range(3, 250)) * 5)[: context - 2])
    session = both.sessions[0]
    for act in (lambda: session.prefill([1, 2, 3]), lambda: both.chain([1, 2, 3])):
        with pytest.raises(ContextFullError, match=f"{context + 1} tokens do not fit the context"):
            act()
    both.chain([1, 2])
    both.commit(range(2))
    assert both.length == context
    with pytest.raises(ContextFullError):
        session.forward(TokenTree.chain(1))


def test_more_rows_than_stated_and_a_rollback_to_where_it_never_was_are_refused(
    held: Opened,
) -> None:
    most, both = held.model.capabilities.max_rows, held.both()
    both.prefill(range(8))
    session: Any = both.sessions[0]
    if held.case is not CASES["reference"]:  # numpy takes as many as the context holds
        with pytest.raises((ValueError, UsageError), match=f"{most + 1} rows"):
            session.forward(TokenTree.chain(1, [1] * most))
    for length in (-1, 9):
        with pytest.raises(ValueError, match="roll back"):
            session.rollback(length)
    assert session.length == 8
    both.chain([1, 2, 3])


def test_scores_stay_until_the_next_pass(held: Opened) -> None:
    """The decoder commits before it samples."""
    session = held.model.open_session()
    session.prefill([3, 4, 5])
    out = session.forward(TokenTree.chain(1, [2, 3, 4]))
    before = out.logits.copy()
    session.commit([0, 1])
    session.rollback(4)
    np.testing.assert_array_equal(out.logits, before)
    session.close()


def test_a_session_that_was_interrupted_scores_no_more_and_others_go_on(held: Opened) -> None:
    both, other = held.both(), held.both()
    for each in (both, other):
        each.prefill([5, 6, 7])
    session = both.sessions[0]
    if not isinstance(session, Interruptible):
        # Numpy's operations end by themselves; llama.cpp's are waited for (test_llamacpp_guard.py).
        assert held.case.library in ("numpy", "llama_cpp")
        return
    session.interrupt()
    with pytest.raises(SessionError) as caught:
        session.forward(TokenTree.chain(8))
    assert "\n" not in str(caught.value)
    assert session.length == 3
    other.chain([8, 9])
