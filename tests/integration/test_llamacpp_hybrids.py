"""Models with recurrent layers on llama.cpp: what was drafted and taken back leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError
from edge_spec.exporters.families import BY_ARCHITECTURE
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.runtimes.llamacpp.hybrid import KEPT_STATES
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.testing import check_session
from fixtures.family_gguf import write_gguf
from fixtures.feature_checks import check_features, feature_prompt
from fixtures.hybrid_models import VOCABULARY, write_qwen35

pytest.importorskip("llama_cpp")

FLOAT32 = RuntimeOptions(context_length=256, kv_type="f32", flash_attention=False)
# Of logits of about 1, sums of up to 128 products in float32 in another order, through 4 layers: a
# prompt's pass is another kernel than a row's.
TOLERANCE = 1e-4
TEXT = np.random.default_rng(0).integers(3, VOCABULARY, 20).tolist()


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe", "lfm2", "lfm2moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hybrid") / "model.gguf"
    if request.param.startswith("qwen35"):
        return write_qwen35(target, experts=request.param == "qwen35moe")
    return write_gguf(request.param, target, max_position_embeddings=512)


@pytest.fixture(scope="module")
def model(path: Path) -> LlamaCppModel:
    opened = runtimes.load_runtime("llamacpp").open(runtimes.open_model_info(path), FLOAT32)
    assert isinstance(opened, LlamaCppModel)
    return opened


def tables(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The embeddings, and the matrix that scores tokens."""
    stored = GgufFile(path).tensors
    embedding = stored["token_embd.weight"].float32()
    output = stored.get("output.weight")
    return embedding, embedding if output is None else output.float32()


def collecting(session: Session, layers: tuple[int, ...]) -> Session:
    assert isinstance(session, GivesFeatures)
    session.collect_features(layers, lambda position, features: None)
    return session


def scores(session: Session, tokens: list[int]) -> np.ndarray:
    return session.forward(TokenTree.chain(tokens[0], tokens[1:])).logits.copy()


def test_it_passes_the_conformance_suite_for_chains(model: LlamaCppModel) -> None:
    capabilities = model.capabilities
    assert (capabilities.trees, capabilities.rollback_rows) == (False, KEPT_STATES)
    assert capabilities.max_rows == capabilities.verified_rows == KEPT_STATES + 1
    assert check_session(model, TOLERANCE).max_difference <= TOLERANCE


def test_it_passes_the_suite_of_features(path: Path, model: LlamaCppModel) -> None:
    """Layer 0 reads embeddings, and scores are products of final states with the output matrix."""
    embedding, output = tables(path)
    layers = (0, model.config.num_layers - 1)
    if model.capabilities.hidden_states:
        layers = (*layers, model.config.num_layers)
    found = check_features(model, layers, TOLERANCE)
    np.testing.assert_array_equal(found[:, 0], embedding[feature_prompt(VOCABULARY)])
    if model.config.architecture in BY_ARCHITECTURE:  # Qwen 3.5's are held to transformers'
        same = check_features(ReferenceModel(open_checkpoint(path)), layers, TOLERANCE)
        np.testing.assert_allclose(found, same, atol=TOLERANCE, rtol=0)
    session = collecting(model.open_session(), layers)
    session.prefill(TEXT[:9])
    for drafted in (TEXT[9:14], TEXT[11:18]):  # of the first one two tokens are accepted
        out = session.forward(TokenTree.chain(drafted[0], drafted[1:]))
        if model.capabilities.hidden_states:
            assert out.features is not None
            products = out.features[:, -1] @ output.T
            np.testing.assert_allclose(products, out.logits, atol=TOLERANCE, rtol=0)
        session.commit([0, 1])
    session.close()


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_drafts_commits_and_rollbacks_changes_what_follows(
    seed: int, model: LlamaCppModel
) -> None:
    """A pass of which nothing is kept is what the library's states do not reach back to."""
    draw = random.Random(seed)
    layers = (1, model.config.num_layers) if model.capabilities.hidden_states else (1,)
    session, text = collecting(model.open_session(), layers), []
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
            out = session.forward(TokenTree.chain(drafted[0], drafted[1:]))
            found, states = out.logits.copy(), out.features.copy()
            fresh = collecting(model.open_session(), layers)
            fresh.prefill(text)
            again = fresh.forward(TokenTree.chain(drafted[0], drafted[1:]))
            np.testing.assert_allclose(found, again.logits, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(states, again.features, atol=TOLERANCE, rtol=0)
            fresh.close()
            if act == "keep":
                kept = draw.randint(1, len(drafted))
                session.commit(range(kept))
                text += drafted[:kept]
    session.close()


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


def test_a_library_that_keeps_no_states_is_refused_in_words(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older one would say that it kept none."""
    runtime = runtimes.load_runtime("llamacpp")
    library = runtime._library()  # type: ignore[attr-defined]
    older = library.replacing(llama_n_rs_seq=lambda context: 0)
    monkeypatch.setattr(type(runtime), "_library", staticmethod(lambda: older))
    with pytest.raises(UnsupportedModelError, match="recurrent state") as refused:
        runtime.open(runtimes.open_model_info(path), FLOAT32)
    assert "\n" not in str(refused.value)
