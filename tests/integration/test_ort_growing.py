"""Graphs with growing keys and values, as optimum writes them, on the committed bundles of two tiny
models (tests/fixtures/other_models.py): no torch is needed here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.model import Model, RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError
from edge_spec.loader import load_engine
from edge_spec.models.bundle import MANIFEST, open_bundle
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS, measure_batch_invariance

GROWING = Path(__file__).parents[1] / "fixtures" / "growing"
NAMES = ("gemma3_text", "gpt2")
TOLERANCE = 1e-4  # float32; logits have a deviation of about 1
PROMPT = "the thing in the hat and the thing in the"


def opened(name: str, context_length: int | None = None) -> Model:
    options = RuntimeOptions(context_length=context_length)
    return OrtRuntime().open(open_bundle(GROWING / name), options)


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Model:
    return opened(request.param)


@pytest.fixture
def session(model: Model) -> Session:
    return model.open_session()


def scored(session: Session, tokens: list[int], widths: list[int]) -> np.ndarray:
    """[tokens, vocab] of passes of these widths in turns, all committed."""
    found, start, turn = [], 0, 0
    while start < len(tokens):
        chain = tokens[start : start + widths[turn % len(widths)]]
        found.append(session.forward(TokenTree.chain(chain[0], chain[1:])).logits.copy())
        session.commit(range(len(chain)))
        start, turn = start + len(chain), turn + 1
    return np.concatenate(found)


@pytest.mark.parametrize("widths", [[64], [1], [5, 1, 16]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_those_of_transformers_even_beyond_a_window(
    name: str, widths: list[int]
) -> None:
    fixture = np.load(GROWING / "logits.npz")
    expected = fixture[name]
    found = scored(opened(name).open_session(), fixture["tokens"].tolist(), widths)
    assert np.abs(found[-len(expected) :] - expected).max() < TOLERANCE


def test_it_says_that_it_takes_chains_only(model: Model, session: Session) -> None:
    assert not model.capabilities.trees
    assert model.capabilities.rollback
    branches = TokenTree(np.zeros(3, np.int32), np.array([-1, 0, 0], np.int32), np.ones(3))
    with pytest.raises(ValueError, match="a chain"):
        session.forward(branches)
    assert not measure_batch_invariance(model, USUAL_WIDTHS).branch_invariant


def test_a_state_stays_as_it_was_whatever_its_session_does(session: Session) -> None:
    session.prefill([1, 2, 3])
    state = session.state()
    expected = {name: each.copy() for name, each in state.items()}
    session.rollback(2)
    session.prefill([4, 5, 6])
    session.close()
    for name, each in state.items():
        np.testing.assert_array_equal(each, expected[name])


def test_rows_of_a_pass_before_a_restore_or_a_rollback_are_not_committed(session: Session) -> None:
    session.prefill([1, 2, 3])
    state = session.state()
    for change in (lambda: session.restore(state, 3), lambda: session.rollback(2)):
        session.forward(TokenTree.chain(4, [5]))
        change()
        with pytest.raises(ValueError, match="not the first"):
            session.commit([0])


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_drafting_changes_no_token(name: str, exact: bool) -> None:
    texts = []
    for drafter in ("auto", "suffix,recycling,lookahead", "none"):
        options = LoadOptions(runtime="ort", drafter=drafter, exact=exact)
        with load_engine(str(GROWING / name), options, lambda what, done: None) as engine:
            result = engine.generate(PROMPT, max_tokens=60)
            texts.append([token.id for token in result.tokens])
    assert texts[0] == texts[1] == texts[2]


def test_another_kind_of_graph_is_refused(exported: Callable[..., object], tmp_path: Path) -> None:
    path = shutil.copytree(exported("llama", "fp32").path, tmp_path / "bundle")  # type: ignore[attr-defined]
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps(manifest | {"kv_cache": "growing"}))
    with pytest.raises(BundleError, match=r"no graph with growing keys.*Export"):
        OrtRuntime().open(open_bundle(path), RuntimeOptions())
