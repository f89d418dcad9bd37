"""The assistants of Gemma 4: what they draft is what transformers and llama.cpp draft with them,
and texts stay the target's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.assistant import AssistantHead
from edge_spec.core.features import SharesKeysValues
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.heads.assistant import AssistantSession
from edge_spec.drafters.heads.assistant_network import AssistantNetwork
from edge_spec.exporters.heads import open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from fixtures import assistant, families

DRAFTED = np.load(Path(assistant.__file__).with_suffix(".npz"))
PROMPT = [5, 6, 7, 8, 9, 10]
TOLERANCES = {"reference": 1e-5, "ort": 1e-4}  # onnxruntime adds up a target's sums otherwise


@pytest.fixture(params=["reference", "ort"])
def opened(
    request: pytest.FixtureRequest, family_bundle: Callable[[str], Bundle], tmp_path: Path
) -> Callable[[str], Model]:
    """opened(name): a target, by a runtime, in float32."""

    def open_target(name: str) -> Model:
        runtime = runtimes.load_runtime(request.param)
        source: Any = family_bundle(name)
        if request.param == "reference":
            source = open_checkpoint(families.write_hf(name, tmp_path / name))
        model: Model = runtime.open(source, RuntimeOptions(threads=1))
        return model

    return open_target


def session_of(head: AssistantHead, name: str, folder: Path, model: Model) -> AssistantSession:
    """Of an assistant that goes on from the first LENGTH - 1 tokens of the text."""
    tables = StoredTables(open_checkpoint(families.write_hf(name, folder / "tables")))
    text = families.texts()[0].tolist()
    target = model.open_session()
    assert isinstance(target, SharesKeysValues)
    target.prefill(text[:5])
    out = target.forward(TokenTree.chain(text[5]))
    target.commit([0])
    assert out.hidden is not None
    found = AssistantSession(AssistantNetwork(head, tables))
    found.attach(target)
    found.go_on_from(6, out.hidden[0].copy())
    found.prefill(text[:6])
    return found


@pytest.mark.parametrize("in_clusters", [False, True])
@pytest.mark.parametrize("name", assistant.TARGETS)
def test_drafts_are_those_of_transformers(
    name: str,
    in_clusters: bool,
    opened: Callable[[str], Model],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    path = assistant.write_hf(name, tmp_path / "assistant", in_clusters)
    model = opened(name)
    head = open_head(path, model.config)
    assert isinstance(head, AssistantHead)
    session = session_of(head, name, tmp_path, model)
    kept = f"{name}{' in clusters' if in_clusters else ''}"
    token = families.texts()[0, 6]
    tolerance = TOLERANCES[request.node.callspec.params["opened"]]
    for expected, chosen in zip(DRAFTED[kept], DRAFTED[f"{kept} tokens"], strict=True):
        scores, tokens = session.forward(TokenTree.chain(int(token))).logits[0]
        session.commit([0])
        ids = tokens.astype(np.int64)
        np.testing.assert_allclose(scores, expected[ids], atol=tolerance, rtol=0)
        token = ids[scores.argmax()]
        assert token == chosen
    model.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_hf("gemma4", tmp_path_factory.mktemp("target") / "model")


@pytest.mark.parametrize("runtime", ["reference", "ort"])
@pytest.mark.parametrize("in_clusters", [False, True])
@pytest.mark.parametrize("drafter", ["auto", "assistant"])
@pytest.mark.usefixtures("fixed_policy")
def test_texts_are_those_of_plain_decoding(
    runtime: str, in_clusters: bool, drafter: str, target: Path, tmp_path: Path
) -> None:
    path = assistant.write_hf("gemma4", tmp_path / "assistant", in_clusters)
    with edge_spec.load(str(target), runtime=runtime, drafter="none", threads=1) as engine:
        plain = [token.id for token in engine.generate(PROMPT, max_tokens=40).tokens]
    with edge_spec.load(
        str(target), runtime=runtime, drafter=drafter, draft=str(path), threads=1
    ) as engine:
        result = engine.generate(PROMPT, max_tokens=40)
        again = engine.generate([*PROMPT, *plain[:3]], max_tokens=20)
    assert [token.id for token in result.tokens] == plain
    assert [token.id for token in again.tokens] == plain[3:23]
    assert result.stats.drafters["assistant"].draft_n > 0
