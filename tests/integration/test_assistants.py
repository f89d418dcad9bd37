"""The assistants of Gemma 4: what they draft is what transformers and llama.cpp draft with them,
and texts stay the target's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.features import SharesKeysValues
from edge_spec.core.heads import AssistantHead
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.heads.assistant import AssistantDrafter, AssistantNetwork
from edge_spec.drafters.heads.drafting import RowScores
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.heads import is_head, open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import assistant, families
from fixtures import text_distribution as text
from fixtures.family_gguf import write_gguf

DRAFTED = np.load(Path(assistant.__file__).with_suffix(".npz"))
PROMPT = [5, 6, 7, 8, 9, 10]
# onnxruntime adds up a target's sums in another order; llama.cpp rounds its activations to 16 bits.
TOLERANCES = {"reference": 3e-5, "ort": 1e-4, "llamacpp": 5e-3}
FLOAT32 = RuntimeOptions(threads=1, kv_type="f32", flash_attention=False)


@pytest.fixture(params=TOLERANCES)
def opened(
    request: pytest.FixtureRequest, family_bundle: Callable[[str], Bundle], tmp_path: Path
) -> Callable[[str], Model]:
    """opened(name): a target, by a runtime, in float32."""

    def open_target(name: str) -> Model:
        runtime = runtimes.load_runtime(request.param)
        source: Any = family_bundle(name)
        options = RuntimeOptions(threads=1)
        if request.param == "reference":
            source = open_checkpoint(families.write_hf(name, tmp_path / name))
        elif request.param == "llamacpp":
            pytest.importorskip("llama_cpp")
            path = write_gguf(name, tmp_path / "model.gguf")
            source, options = runtimes.open_model_info(path), FLOAT32
        model: Model = runtime.open(source, options)
        return model

    return open_target


def drafted_after(
    head: AssistantHead, name: str, folder: Path, model: Model, length: int = 6
) -> Callable[[int], RowScores]:
    """Of an assistant that goes on from the first tokens of the text: each call from the one
    before."""
    tables = StoredTables(open_checkpoint(families.write_hf(name, folder / "tables")))
    read = families.texts()[0].tolist()
    target, network = model.open_session(), AssistantNetwork(head, tables)
    assert isinstance(target, SharesKeysValues)
    target.share_keys_values(network.sources)
    target.prefill(read[: length - 1])
    out = target.forward(TokenTree.chain(read[length - 1]))
    target.commit([0])
    assert out.hidden is not None
    state = out.hidden[:1].copy()
    seen = [target.keys_values(layer) for layer in network.sources]
    near = network.near([each for each in seen if each is not None], length)

    def draft(token: int) -> RowScores:
        nonlocal state
        found = network.draft(np.array([token]), state, length, near)
        assert found.state is not None
        state = found.state[None]
        return found

    return draft


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
    draft = drafted_after(head, name, tmp_path, model)
    kept = f"{name}{' in clusters' if in_clusters else ''}"
    token = families.texts()[0, 6]
    tolerance = TOLERANCES[request.node.callspec.params["opened"]]
    for expected, chosen in zip(DRAFTED[kept], DRAFTED[f"{kept} tokens"], strict=True):
        found = draft(int(token))
        scores, ids = found.logits, found.ids
        assert ids is not None
        np.testing.assert_allclose(scores, expected[ids], atol=tolerance, rtol=0)
        token = ids[scores.argmax()]
        assert token == chosen
    model.close()


@pytest.mark.parametrize("length", [6, 7, 8, 9, 22])
def test_beyond_the_window_drafts_are_those_of_llama_cpp(
    length: int, opened: Callable[[str], Model], tmp_path: Path
) -> None:
    """A row sees what the target's own rows see: 8 positions, its own among them."""
    pytest.importorskip("llama_cpp")
    from fixtures.llamacpp_assistant import OwnAssistant

    path = assistant.write_gguf("gemma4", tmp_path / "assistant.gguf")
    own = OwnAssistant(write_gguf("gemma4", tmp_path / "own.gguf"), path)
    read = families.texts()[0].tolist()
    expected = own.drafted(read[: length + 1], 3)
    own.close()
    model = opened("gemma4")
    head = open_head(path, model.config)
    assert isinstance(head, AssistantHead)
    draft = drafted_after(head, "gemma4", tmp_path, model, length)
    token = read[length]
    for each in expected:
        scores = draft(token).logits
        np.testing.assert_allclose(scores, each, atol=TOLERANCES["llamacpp"], rtol=0)
        token = int(each.argmax())
    model.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.write_hf("gemma4", tmp_path_factory.mktemp("target") / "model")


@pytest.mark.parametrize("runtime", ["reference", "ort", "llamacpp"])
@pytest.mark.parametrize(
    ("in_clusters", "drafter"), [(False, "auto"), (True, "auto"), (True, "assistant")]
)
@pytest.mark.usefixtures("fixed_policy")
def test_texts_are_those_of_plain_decoding(
    runtime: str, in_clusters: bool, drafter: str, target: Path, tmp_path: Path
) -> None:
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
        target = write_gguf("gemma4", tmp_path / "model.gguf")
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


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_target(
    family: Callable[[str], StoredCheckpoint], tmp_path: Path
) -> None:
    """Draft tokens are sampled from clusters alone, whose tokens are not all that the target
    chooses from."""
    source = family("gemma4")
    read = open_head(assistant.write_hf("gemma4", tmp_path / "assistant", True), source.config)
    assert isinstance(read, AssistantHead)
    drafter = AssistantDrafter(AssistantNetwork(read, StoredTables(source)))
    model, prompt = ReferenceModel(source), (5, 6, 7, 8)
    session, scorer = model.open_session(), model.open_session()
    chosen = SamplingParams(temperature=1.0, top_k=5)

    drafter.attach(model, session)
    seeded = SamplingParams(temperature=1.0, top_k=5, seed=5)
    sampler = Sampler(seeded, prompt, sampled_drafts=True)
    budget = Budget(3, 4, branches=False)
    found = text.sampled_texts(drafter, session, prompt, sampler, budget, 800)
    assert found.num_drafted > 500  # otherwise nothing was tried
    expected = text.joint(text.logits_of(scorer), prompt, chosen)
    assert text.p_value(found.counts, expected) > text.SMALLEST_P


@pytest.mark.usefixtures("fixed_policy")
def test_a_gguf_file_drafts_for_one(tmp_path: Path) -> None:
    target = write_gguf("gemma4-dense", tmp_path / "model.gguf")
    path = assistant.write_gguf("gemma4-dense", tmp_path / "assistant.gguf")
    with edge_spec.load(str(target), runtime="ort", drafter="none", threads=1) as engine:
        plain = [token.id for token in engine.generate(PROMPT, max_tokens=20).tokens]
    with edge_spec.load(str(target), runtime="ort", draft=str(path), threads=1) as engine:
        result = engine.generate(PROMPT, max_tokens=20)
    assert [token.id for token in result.tokens] == plain
    assert result.stats.drafters["assistant"].draft_n > 0


def _drop(name: str) -> assistant.Changed:
    return lambda tensors: tensors.pop(name)


def _set(name: str, values: np.ndarray) -> assistant.Changed:
    return lambda tensors: tensors.update({name: values})


ORDER = "masked_embedding.token_ordering"
REFUSED: dict[str, tuple[assistant.Changed, dict[str, Any], str]] = {
    "missing": (
        _drop("model.layers.1.mlp.up_proj.weight"),
        {},
        "model.layers.1.mlp.up_proj.weight is m",
    ),
    "shape": (
        _set("model.norm.weight", np.zeros(3, np.float32)),
        {},
        "model.norm.weight has the shape [3]",
    ),
    "too many": (_set("model.extra", np.zeros(3, np.float32)), {}, "a tensor model.extra, which"),
    "width": (id, {"backbone_hidden_size": 96}, "states of 96 numbers, this target's have 64"),
    "vocabulary": (id, {"vocab_size": 270}, "vocabulary has 270 tokens, this target's 265"),
    "window": (id, {"sliding_window": 16}, "it reads layers that see 16 tokens, which this one"),
    "activation": (id, {"hidden_activation": "silu"}, "an activation that is not computed"),
    "no size": (id, {"hidden_size": None}, "no usable hidden_size"),
    "clusters": (
        _set("masked_embedding.centroids.weight", np.zeros((52, assistant.HIDDEN), np.float32)),
        {"num_centroids": 52},
        "divides 265 tokens into 52 clusters",
    ),
    "order beyond": (
        _set(ORDER, np.arange(1, 266)),
        {},
        "is an assistant of another target: its token_ordering is no order",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_assistant_that_does_not_fit_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    breaks, changes, told = REFUSED[case]
    path = assistant.write_hf("gemma4", tmp_path / "assistant", True, breaks, **changes)
    assert is_head(path)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(target), runtime="reference", draft=str(path))
    assert told in caught.value.message and "\n" not in str(caught.value)
