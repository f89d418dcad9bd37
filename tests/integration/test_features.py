"""What a model's layers compute is the same in every runtime that gives it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import RuntimeOptions, Session
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.llamacpp.features import Tap
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import family_gguf
from fixtures.feature_checks import check_features
from fixtures.rows import stock_weights

Tokens = Callable[..., list[int]]
LAYERS = (0, 1, 2)  # of a model of two layers: all
TOLERANCE = 1e-4  # of streams of a size of about 1 in float32, summed in another order


def nothing(position: int, features: np.ndarray) -> None:
    """Takes nothing."""


def collecting(session: Session, layers: tuple[int, ...] = LAYERS) -> Session:
    assert isinstance(session, GivesFeatures)
    session.collect_features(layers, nothing)
    return session


@pytest.fixture(scope="module")
def expected(hf: Callable[..., Path]) -> Callable[[str], np.ndarray]:
    def features(variant: str) -> np.ndarray:
        return check_features(ReferenceModel(open_checkpoint(hf(variant))), LAYERS, TOLERANCE)

    return features


def opened(bundle: Bundle) -> OrtModel:
    return OrtRuntime().open(bundle, RuntimeOptions(threads=1))


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_onnxruntime_gives_what_the_reference_computes(
    variant: str, exported: Callable[..., Bundle], expected: Callable[[str], np.ndarray]
) -> None:
    model = opened(exported(variant))
    found = check_features(model, LAYERS, TOLERANCE)
    np.testing.assert_allclose(found, expected(variant), atol=TOLERANCE, rtol=0)
    model.close()


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_llamacpp_gives_what_the_reference_computes(
    variant: str,
    gguf: Callable[..., Path],
    open_llama: Callable[..., Any],
    expected: Callable[[str], np.ndarray],
) -> None:
    plain = {"kv_type": "f32", "flash_attention": False}
    model = open_llama("llamacpp", gguf(variant), **plain)
    found = check_features(model, LAYERS, 3 * TOLERANCE)  # its tolerance in side_by_side.py
    np.testing.assert_allclose(found, expected(variant), atol=3 * TOLERANCE, rtol=0)
    assert check_features(model, (1,), 3 * TOLERANCE).shape == (20, 1, 64)  # prompts unscored
    model.close()


@pytest.mark.parametrize("family", ["gemma3", "phi3", "granite", "lfm2"])
def test_llamacpp_gives_those_of_other_architectures(
    family: str, open_llama: Callable[..., Any], tmp_path: Path
) -> None:
    path = family_gguf.write_gguf(family, tmp_path / "model.gguf", max_position_embeddings=64)
    checkpoint = open_checkpoint(path)
    last = checkpoint.config.num_layers
    layers = (0, 1, last - 1) if family == "lfm2" else (0, 1, last - 1, last)
    model = open_llama("llamacpp", path, kv_type="f32", flash_attention=False)
    own = check_features(ReferenceModel(checkpoint), layers, 1e-3)
    tolerance = 1e-3 * float(np.abs(own).max())
    found = check_features(model, layers, tolerance)
    np.testing.assert_allclose(found, own, atol=tolerance, rtol=0)
    model.close()


def test_what_a_library_does_not_give_is_refused(
    gguf: Callable[..., Path], open_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out = Tap._lay_out

    def without_one(tap: Tap) -> None:
        """Asks for a kind of tensor that no graph has, in the place of the stream of layer 1."""
        lay_out(tap)
        for at, each in enumerate(tap._wanted):
            if each.layer == 1:
                tap._fields.kinds[at] = 9

    monkeypatch.setattr(Tap, "_lay_out", without_one)
    session = open_llama("llamacpp", gguf("qwen2")).open_session()
    with pytest.raises(UnsupportedModelError, match=r"the layers 1 of the architecture 'qwen2'"):
        collecting(session, (0, 1, 2))
    session.forward(TokenTree.chain(5))  # goes on as before


@pytest.mark.parametrize("rows", [True, False])
def test_llamacpp_scores_the_same_bit_for_bit_while_features_are_collected(
    rows: bool, gguf: Callable[..., Path], open_llama: Callable[..., Any], tokens: Tokens
) -> None:
    """Of a prompt of several passes, of trees and after a rollback; features of no pass are lost
    where another reader is attached, or where there was none for a while."""
    with nullcontext() if rows else stock_weights():
        model = open_llama("llamacpp", gguf("qwen2", "Q4_0"), threads=2)
    plain, told = model.open_session(), collecting(model.open_session(), (1, 2))
    found: list[tuple[int, int]] = []
    told.collect_features((0, 1), lambda position, each: found.append((position, len(each))))
    text = tokens(40)
    for each in (plain, told):
        each.prefill(text[:30])
    assert found == [(0, 30)]
    tree = TokenTree(
        np.array([3, 4, 5], np.int32), np.array([-1, 0, 0], np.int32), np.ones(3, np.float32)
    )
    for layers in ((0, 1), (), (1,)):
        told.collect_features(layers, nothing)
        outs = [each.forward(tree) for each in (plain, told)]
        np.testing.assert_array_equal(outs[0].logits, outs[1].logits)
        assert (outs[1].features is None) == (not layers)
        for each in (plain, told):
            each.commit([0, 2])
            each.rollback(25)
            each.prefill(text[25:30])
    model.close()


@pytest.mark.parametrize("quantization", ["fp32", "int4"])
def test_scores_stay_the_same_bit_for_bit_while_features_are_collected(
    quantization: str, exported: Callable[..., Bundle], tokens: Tokens
) -> None:
    """So that drafting from them changes no text: of the same threads, by the same kernels."""
    model, text = opened(exported("llama", quantization)), tokens(30)
    before, after = model.open_session(), collecting(model.open_session())
    other = model.open_session()  # of the graph that has the outputs, and binds none
    for each in (before, after, other):
        each.prefill(text)
    tree = TokenTree(
        np.array([3, 4, 5], np.int32), np.array([-1, 0, 0], np.int32), np.ones(3, np.float32)
    )
    scores = [each.forward(tree) for each in (before, after, other)]
    for score in scores[1:]:
        np.testing.assert_array_equal(score.logits, scores[0].logits)
    assert [score.features is None for score in scores] == [True, False, True]


def test_a_session_that_collects_shares_no_pass(exported: Callable[..., Bundle]) -> None:
    model = opened(exported("llama"))
    assert model.prepare_sharing(2) > 1
    sessions = [collecting(model.open_session()), model.open_session()]
    parts = [PassPart(session, TokenTree.chain(5)) for session in sessions]
    for session in sessions:
        session.prefill([1, 2, 3])
    with pytest.raises(SessionError, match="shares no pass"):
        model.forward_together(parts, 2)
    assert sessions[0].forward(TokenTree.chain(5)).features is not None
    model.close()
