"""The numpy reference against Hugging Face transformers and in a stream of layers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference import ReferenceModel, ReferenceRuntime
from fixtures import tolerance

FIXTURE = Path(__file__).parents[1] / "fixtures" / "reference_logits.npz"
VARIANTS = ("llama", "llama-linear", "llama-llama3", "llama-bias", "mistral", "qwen2", "qwen3")

Tokens = Callable[..., list[int]]


@pytest.fixture(scope="module")
def transformers_logits() -> dict[str, np.ndarray]:
    with np.load(FIXTURE, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture
def model(checkpoint: Callable[..., StoredCheckpoint]) -> ReferenceModel:
    return ReferenceModel(checkpoint("llama-llama3"))


def test_the_fixture_is_of_these_weights(
    tiny: ModuleType, transformers_logits: dict[str, np.ndarray]
) -> None:
    digest = hashlib.sha256()
    for variant in VARIANTS:
        for values in tiny.build(variant).weights.values():
            digest.update(values.tobytes())
    assert digest.digest() == transformers_logits["weights_sha256"].tobytes()


@pytest.mark.parametrize("source", ["hf", "gguf"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(
    variant: str,
    source: str,
    transformers_logits: dict[str, np.ndarray],
    request: pytest.FixtureRequest,
) -> None:
    expected = transformers_logits[variant]
    tokens = transformers_logits["tokens"].tolist()
    path = request.getfixturevalue(source)(variant)
    model = ReferenceModel(open_checkpoint(path))
    session = model.open_session()
    session.prefill(tokens[: -len(expected)])
    rest = tokens[-len(expected) :]
    logits = session.forward(TokenTree.chain(rest[0], rest[1:])).logits
    assert expected.std() > 1  # flat logits would equal anything
    tolerance.require_float32(logits, expected, model.config, len(tokens))


def test_layers_in_a_stream_score_as_the_opened_model(
    checkpoint: Callable[..., StoredCheckpoint], model: ReferenceModel, tokens: Tokens
) -> None:
    """Each of several sequences as if it were alone."""
    texts = [tokens(40), tokens(7, 1), tokens(23, 2)]
    stream = ReferenceRuntime().open_layers(checkpoint("llama-llama3"), texts)
    for _ in range(model.config.num_layers):
        stream.advance()
    found = stream.logits(np.arange(70))
    start = 0
    for text in texts:
        expected = model.open_session().forward(TokenTree.chain(text[0], text[1:])).logits
        own = found[start : start + len(text)]
        tolerance.require_float32(own, expected, model.config, len(text))
        start += len(text)
    some = stream.logits(
        np.array([3, 60])
    )  # fewer rows at once, whose sums may be in another order
    tolerance.require_float32(some, found[[3, 60]], model.config, len(texts[0]))
