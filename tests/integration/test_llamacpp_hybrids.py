"""Models with recurrent layers on llama.cpp: what was drafted and taken back leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.llamacpp.hybrid import KEPT_STATES, HybridSession
from edge_spec.testing import check_session
from fixtures.family_gguf import write_gguf
from fixtures.hybrid_models import VOCABULARY, write_qwen35

pytest.importorskip("llama_cpp")

FLOAT32 = RuntimeOptions(context_length=256, kv_type="f32", flash_attention=False)
# Of logits of about 1, sums of up to 128 products in float32 in another order, through 4 layers: a
# prompt's pass is another kernel than a row's.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["qwen35", "lfm2", "lfm2moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    if request.param == "qwen35":
        return write_qwen35(target)
    return write_gguf(request.param, target, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaCppModel:
    opened = runtimes.load_runtime("llamacpp").open(runtimes.open_model_info(path), FLOAT32)
    assert isinstance(opened, LlamaCppModel)
    return opened


def scores(session: Session, tokens: list[int]) -> np.ndarray:
    return session.forward(TokenTree.chain(tokens[0], tokens[1:])).logits.copy()


def test_it_passes_the_conformance_suite_for_chains(model: LlamaCppModel) -> None:
    capabilities = model.capabilities
    assert (capabilities.trees, capabilities.rollback_rows) == (False, KEPT_STATES)
    assert capabilities.max_rows == capabilities.verified_rows == KEPT_STATES + 1
    assert check_session(model, TOLERANCE).max_difference <= TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_drafts_commits_and_rollbacks_changes_what_follows(
    seed: int, model: LlamaCppModel
) -> None:
    """A pass of which nothing is kept is what the library's states do not reach back to."""
    draw = random.Random(seed)
    session, text = model.open_session(), []
    for _ in range(24):
        act = draw.choice(("read", "keep", "keep", "keep", "drop", "back"))
        drafted = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, KEPT_STATES + 1))]
        if act == "read" or not text:
            session.prefill(drafted)
            text += drafted
        elif act == "back":
            text = text[: draw.randint(0, len(text))]
            session.rollback(len(text))
        else:
            found = scores(session, drafted)
            fresh = model.open_session()
            fresh.prefill(text)
            np.testing.assert_allclose(found, scores(fresh, drafted), atol=TOLERANCE, rtol=0)
            fresh.close()
            if act == "keep":
                kept = draw.randint(1, len(drafted))
                session.commit(range(kept))
                text += drafted[:kept]
    session.close()


def test_a_cache_that_grows_takes_its_states_along(
    model: LlamaCppModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_spec.runtimes.llamacpp.session.FIRST_TOKENS", 64)
    text = np.random.RandomState(0).randint(0, VOCABULARY, 100).tolist()
    session, whole = model.open_session(), model.open_session()
    session.prefill(text[:60])
    scores(session, [text[60], 1, 2])
    session.commit([0])
    for token in text[61:99]:
        scores(session, [token])
        session.commit([0])
    whole.prefill(text[:99])
    np.testing.assert_allclose(
        scores(session, [text[99]]), scores(whole, [text[99]]), atol=TOLERANCE, rtol=0
    )
    session.close()
    whole.close()


def test_what_it_drafts_leaves_its_text_as_it_is(path: Path) -> None:
    texts, drafted = [], []
    for drafter in ("none", "suffix"):
        options = LoadOptions(runtime="llamacpp", drafter=drafter, exact=True)
        with (
            load_engine(str(path), options, lambda *_: None) as engine,
            engine.verifying_all_draft_tokens(),
        ):
            prompt = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]
            result = engine.generate(prompt, max_tokens=48)
            texts.append([token.id for token in result.tokens])
            drafted.append(result.stats.draft_n)
    assert texts[0] == texts[1]
    assert drafted[1] > 0


@pytest.mark.parametrize("kept", [1, 3, KEPT_STATES])
def test_the_bound_of_its_rollback_is_the_librarys(
    kept: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many rows of a pass are dropped without reading text again, and of one more, which nothing
    drafts, the library has no state."""
    monkeypatch.setattr("edge_spec.runtimes.llamacpp.hybrid.KEPT_STATES", kept)
    opened = runtimes.load_runtime("llamacpp").open(runtimes.open_model_info(path), FLOAT32)
    assert opened.capabilities.rollback_rows == kept
    session = opened.open_session()
    assert isinstance(session, HybridSession)
    for num_dropped in (kept, kept + 1):
        monkeypatch.setattr(session, "_most_rows", kept + 2)
        session.prefill([1, 2, 3])
        scores(session, [4, *[5] * num_dropped])
        session.commit([0])
        library, context = session._library, session._context()
        memory = library.memory(context)
        removed = library.sequence_remove(memory, 0, session.length, -1)
        assert removed == (num_dropped <= kept)
        session._read_again(0)
    session.close()
    opened.close()


def test_no_round_drafts_more_than_it_takes_back(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that repeats itself is drafted for as far as rounds allow."""
    monkeypatch.setattr("edge_spec.runtimes.llamacpp.hybrid.KEPT_STATES", 2)
    widths: list[int] = []
    scored = HybridSession.forward
    monkeypatch.setattr(
        HybridSession,
        "forward",
        lambda self, tree: widths.append(len(tree)) or scored(self, tree),
    )
    options = LoadOptions(runtime="llamacpp", drafter="suffix", lossless="ties")
    with (
        load_engine(str(path), options, lambda *_: None) as engine,
        engine.verifying_all_draft_tokens(),
    ):
        del widths[:]
        result = engine.generate([5, 6, 7, 8] * 4, max_tokens=24)
        assert result.stats.draft_n > 0
    assert max(widths) == 3


def test_asked_for_trees_it_says_why_it_drafts_in_chains(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = LoadOptions(runtime="llamacpp", drafter="suffix,lookahead")
    with load_engine(str(path), options, lambda *_: None):
        pass
    [told] = [each.getMessage() for each in caplog.records if "in chains" in each.getMessage()]
    assert "lookahead" in told and "suffix" not in told and "\n" not in told
    assert "recurrent layers have one state for the text" in told


def test_a_tree_is_no_pass_of_it(model: LlamaCppModel) -> None:
    session = model.open_session()
    assert isinstance(session, HybridSession)
    session.prefill([1, 2, 3])
    tree = TokenTree(np.array([4, 5, 6]), np.array([-1, 0, 0]), np.ones(3))
    with pytest.raises(ValueError, match="a chain of up to 8 rows: its recurrent layers"):
        session.forward(tree)
    session.close()


def test_a_library_that_keeps_no_states_is_refused_in_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older one would say that it kept none."""
    from dataclasses import replace

    runtime = runtimes.load_runtime("llamacpp")
    older = replace(runtime._library(), kept_states=lambda context: 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(runtime), "_library", staticmethod(lambda: older))
    with pytest.raises(UnsupportedModelError, match="recurrent state") as refused:
        runtime.open(runtimes.open_model_info(path), FLOAT32)
    assert "\n" not in str(refused.value)
