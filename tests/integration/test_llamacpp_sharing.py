"""Conversations on llama.cpp in passes that they share: each as in a cache of its own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError, SessionError
from edge_spec.runtimes.llamacpp import LlamaCppModel, cache
from edge_spec.runtimes.llamacpp.compute_thread import current_worker
from edge_spec.testing import check_sharing
from fixtures.rows import stock_weights

Files = Callable[..., Path]
Tokens = Callable[..., list[int]]
OpenLlama = Callable[..., LlamaCppModel]

# Half-precision keys and values: beside the same session in other passes; a wrong cache makes 1 to
# 10. See tests/fixtures/side_by_side.py.
TOLERANCE = 0.05
CONTEXT = 128


@pytest.fixture
def model(gguf: Files, open_llama: OpenLlama) -> LlamaCppModel:
    pytest.importorskip("llama_cpp")
    opened = open_llama("llamacpp", gguf("llama", "Q8_0"), context_length=CONTEXT)
    if not opened.capabilities.invariant_rows:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")
    return opened


def chain(tokens: list[int]) -> TokenTree:
    return TokenTree.chain(tokens[0], tokens[1:])


def together(model: LlamaCppModel, *parts: tuple[Any, TokenTree]) -> list[np.ndarray]:
    rows = sum(len(tree) for _, tree in parts)
    outs = model.forward_together([PassPart(*part) for part in parts], rows)
    return [out.logits for out in outs]


def test_trees_of_several_score_as_alone(model: LlamaCppModel) -> None:
    assert model.prepare_sharing(4) > 1
    assert check_sharing(model, TOLERANCE) <= TOLERANCE


def test_kernels_of_the_library_share_no_pass(gguf: Files, open_llama: OpenLlama) -> None:
    pytest.importorskip("llama_cpp")
    with stock_weights():
        model = open_llama("llamacpp", gguf("llama", "Q8_0"), context_length=CONTEXT)
    assert model.prepare_sharing(4) == 1


@pytest.mark.parametrize("first_cells", [32, 1024])
def test_scores_are_bit_identical_whoever_comes_and_goes(
    first_cells: int,
    model: LlamaCppModel,
    tokens: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rejected drafts, rollbacks, prompts, lone passes, sessions that close or have not chosen yet:
    whatever the others do. A small cache moves all the time."""
    monkeypatch.setattr(cache, "FIRST_TOKENS", first_cells)
    pairs = [(model.open_session(), model.open_session()) for _ in range(4)]
    drawn: Any = np.random.RandomState(first_cells)
    undecided: dict[int, int] = {}  # rows of the last pass, by pair
    for round in range(60):
        for each in [each for each in undecided if drawn.randint(2)]:
            kept = undecided.pop(each)
            for one in pairs[each]:
                one.commit(range(kept))
        ready = [each for each in drawn.permutation(4) if each not in undecided]
        taking = ready[: drawn.randint(1, 5)]
        found = []
        trees = [chain(tokens(drawn.randint(1, 5), 10 * round + int(each))) for each in taking]
        shared = [pairs[each][0] for each in taking]
        if len(taking) == 1:
            found = [shared[0].forward(trees[0]).logits]
        elif taking:
            found = together(model, *zip(shared, trees, strict=True))
        for each, tree, logits in zip(taking, trees, found, strict=True):
            rows = len(tree)
            np.testing.assert_array_equal(logits, pairs[each][1].forward(tree).logits)
            kept, forgotten = drawn.randint(0, rows + 1), drawn.randint(0, 3)
            if drawn.randint(4) == 0:
                undecided[int(each)] = kept
                continue
            more = tokens(drawn.randint(1, 12), round) if drawn.randint(6) == 0 else []
            for one in pairs[each]:
                one.commit(range(kept))
                if one.length > CONTEXT - 20:
                    one.rollback(10)
                elif forgotten <= one.length:
                    one.rollback(one.length - forgotten)
                one.prefill(more) if more else None
            assert pairs[each][0].length == pairs[each][1].length
        if round % 15 == 14:
            undecided.pop(round % 4, None)
            for one in pairs[round % 4]:
                one.close()
            pairs[round % 4] = (model.open_session(), model.open_session())


def test_a_session_that_has_joined_is_kept_and_restored(
    model: LlamaCppModel, tokens: Tokens
) -> None:
    one, other, copy = (model.open_session() for _ in range(3))
    one.prefill(tokens(20))
    together(model, (one, chain(tokens(4))), (other, chain(tokens(2))))
    one.commit(range(3))
    other.commit(range(1))
    state, probe = one.state(), chain(tokens(2, 7))
    copy.restore(state, one.length)
    np.testing.assert_array_equal(copy.forward(probe).logits, one.forward(probe).logits)
    with pytest.raises(ValueError):
        other.restore({}, 5)
    before, _ = together(model, (other, probe), (copy, probe))
    other.restore(state, one.length)  # leaves the others
    after, same = together(model, (other, probe), (copy, probe))
    np.testing.assert_allclose(after, same, atol=TOLERANCE, rtol=0)
    assert np.abs(after - before).max() > TOLERANCE


def test_a_context_that_fills_in_one_leaves_the_others(
    model: LlamaCppModel, tokens: Tokens
) -> None:
    full, other = model.open_session(), model.open_session()
    full.prefill(tokens(CONTEXT - 3))
    other.prefill(tokens(9))
    tree = chain(tokens(2, 3))
    together(model, (full, tree), (other, tree))
    for one in (full, other):
        one.commit(range(2))
    with pytest.raises(ContextFullError):
        together(model, (other, tree), (full, tree))
    for one in (full, other):
        with pytest.raises(ValueError, match="gone"):
            one.commit([0])
    assert len(other.forward(tree).logits) == 2
    other.commit(range(2))
    assert (full.length, other.length) == (CONTEXT - 1, 13)


def test_a_device_that_fails_in_a_shared_pass_costs_no_token(
    model: LlamaCppModel, tokens: Tokens
) -> None:
    """Chains and a tree; before and after a pass that went well. Each goes on alone, and together
    again afterwards."""
    sessions = [model.open_session() for _ in range(3)]
    expected = model.open_session()
    for one in (*sessions, expected):
        one.prefill(tokens(11))
    star = TokenTree(np.array(tokens(3), np.int32), np.array([-1, 0, 0], np.int32), np.ones(3))
    trees = [chain(tokens(3)), star, chain(tokens(1))]
    weights, probe = model._weights, chain(tokens(4, 5))
    library = weights.library
    wanted = expected.forward(probe).logits.copy()
    for succeeds_before in (False, True):
        if succeeds_before:
            together(model, *zip(sessions, trees, strict=True))
        weights.library = library.replacing(llama_decode=lambda context, batch: -3)
        with pytest.raises(SessionError, match="11 and 11 and 11") as caught:
            together(model, *zip(sessions, trees, strict=True))
        assert "\n" not in str(caught.value)
        weights.library = library
        for one in sessions:
            assert one.length == 11
            np.testing.assert_allclose(one.forward(probe).logits, wanted, atol=TOLERANCE, rtol=0)
            one.rollback(11)
        for logits in together(model, *((one, probe) for one in sessions)):
            np.testing.assert_allclose(logits, wanted, atol=TOLERANCE, rtol=0)


def test_scores_are_read_in_the_thread_of_their_pass(model: LlamaCppModel, tokens: Tokens) -> None:
    """Each change of threads takes a few percent of a GPU's pass."""
    session, weights = model.open_session(), model._weights
    session.prefill(tokens(5))
    library, runs = weights.library, []

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        runs.append(function)
        return library.run(function, *arguments)

    def read(handle: int) -> Any:
        assert current_worker() is not None
        return library.llama_get_logits(handle)

    weights.library = library.replacing(run=run, llama_get_logits=read)
    session.forward(chain(tokens(3)))
    assert len(runs) == 1


def test_the_cache_is_freed_when_all_have_left(model: LlamaCppModel, tokens: Tokens) -> None:
    sessions = [model.open_session() for _ in range(3)]
    shared = sessions[0]._cache
    together(model, *((one, chain(tokens(2))) for one in sessions))
    context = shared._current
    assert context is not None
    sessions.pop().close()
    assert context.free.alive
    one = sessions.pop()
    del one
    gc.collect()  # nobody has closed it
    assert len(shared._sequences) == 1
    sessions.pop().close()
    assert not context.free.alive and shared._current is None


def test_scores_that_are_read_are_not_written_over(model: LlamaCppModel, tokens: Tokens) -> None:
    """Who is alone reads the library's own buffer, also when another one comes."""
    one = model.open_session()
    one.prefill(tokens(9))
    found = one.forward(chain(tokens(3))).logits
    before = found.copy()
    other = model.open_session()
    for _ in range(2):
        other.forward(chain(tokens(4, 5)))
        other.commit(range(4))
    np.testing.assert_array_equal(found, before)
    one.commit(range(3))
    together(model, (one, chain(tokens(2))), (other, chain(tokens(2))))
    assert other._sequence.home is one._sequence.home


def test_passes_alike_reuse_the_graph_of_the_one_before(
    model: LlamaCppModel, tokens: Tokens
) -> None:
    """Whoever they are of; passes of other widths build another one."""
    one, other = model.open_session(), model.open_session()
    counts = []
    for widths in ((3, 2), (3, 2), (2, 3), (2, 2), (2, 2)):
        parts = zip((one, other), map(chain, map(tokens, widths)), strict=True)
        together(model, *parts)
        context = one._sequence.home.handle
        counts.append(model._weights.library.llama_perf_context(context).n_reused)
    assert counts == [0, 1, 2, 2, 3]
