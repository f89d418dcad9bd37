"""Tokens stand in the cells of llama.cpp's cache in their order, whatever was drafted, rejected and
forgotten: the bits of a row may then follow from its text alone, since attention adds up cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.shared_pass import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel, upstream
from edge_spec.runtimes.llamacpp.session import LlamaCppSession
from edge_spec.runtimes.llamacpp.shared_session import SharedSession
from edge_spec.runtimes.llamacpp.transfer import read_sequence
from fixtures.random_trees import random_path, random_tree

CONTEXT = 256
TOLERANCE = 0.05  # of a logit: see tests/fixtures/side_by_side.py


@pytest.fixture
def model(gguf: Callable[..., Path]) -> Iterator[LlamaCppModel]:
    """Takes rows for invariant, whichever kernels compute them."""
    pytest.importorskip("llama_cpp")
    library = replace(upstream.library(), has_invariant_rows=lambda source: True)
    source = runtimes.open_model_info(gguf("llama"))
    options = RuntimeOptions(threads=1, context_length=CONTEXT)
    model = LlamaCppModel(library, source, options)
    yield model
    model.close()


def positions(session: LlamaCppSession) -> list[int]:
    """Returns those of the committed tokens, in the order of their cells."""
    member = session._member if isinstance(session, SharedSession) else None
    if member is not None:
        sequence = session.joint.read(member)
    else:
        session._reserve(0)
        sequence = read_sequence(session._library, session._context(), 0)
    form = session._library.state_form
    start, width = form.words_before + 1, 1 + len(form.cell)
    words = sequence[4 * start : 4 * (start + session.length * width)]
    found: list[int] = np.frombuffer(words.tobytes(), "<u4").reshape(-1, width)[:, 0].tolist()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_tokens_of_a_session_keep_their_order(
    seed: int, model: LlamaCppModel, tokens: Callable[..., list[int]]
) -> None:
    """A cache of 256 cells is full of rejected rows more than once. What is scored at last is what
    another session scores that has read the same text at once."""
    drawn: Any = np.random.RandomState(seed)
    session, text = model.open_session(), tokens(17, seed)
    session.prefill(text)
    for round in range(80):
        tree = random_tree(drawn, tokens(int(drawn.randint(1, 12)), 100 * seed + round))
        session.forward(tree)
        if drawn.randint(5):
            kept = random_path(drawn, tree)
            session.commit(kept)
            text += tree.tokens[kept].tolist()
        if drawn.randint(6) == 0:
            more = tokens(int(drawn.randint(1, 9)), round)
            session.prefill(more)
            text += more
        if drawn.randint(4) == 0 or len(text) > CONTEXT - 40:
            text = text[: max(1, len(text) - int(drawn.randint(60)))]
            session.rollback(len(text))
        assert positions(session) == list(range(len(text)))
    other, probe = model.open_session(), TokenTree.chain(7, [8, 9])
    other.prefill(text)
    found, expected = session.forward(probe).logits.copy(), other.forward(probe).logits
    np.testing.assert_allclose(found, expected, atol=TOLERANCE, rtol=0)


def test_tokens_of_sessions_in_one_cache_keep_their_order(
    model: LlamaCppModel, tokens: Callable[..., list[int]]
) -> None:
    """Trees of three conversations, of which some have no pass for a while and go on alone."""
    drawn: Any = np.random.RandomState(3)
    sessions = [model.open_session() for _ in range(3)]
    for each, session in enumerate(sessions):
        session.prefill(tokens(5 + each, each))
    for round in range(60):
        taking = [int(each) for each in drawn.permutation(3)[: drawn.randint(1, 4)]]
        trees = [random_tree(drawn, tokens(int(drawn.randint(1, 9)), round)) for _ in taking]
        parts = [PassPart(sessions[each], tree) for each, tree in zip(taking, trees, strict=True)]
        model.forward_together(parts, sum(map(len, trees)))
        for each, tree in zip(taking, trees, strict=True):
            session = sessions[each]
            session.commit(random_path(drawn, tree))
            if drawn.randint(4) == 0 or session.length > CONTEXT - 40:
                session.rollback(max(1, session.length - int(drawn.randint(60))))
        if drawn.randint(5) == 0:
            sessions[0].prefill(tokens(3, round))
        for session in sessions:
            assert positions(session) == list(range(session.length))
