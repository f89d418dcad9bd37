"""Qwen 3.5's own layer for multi-token prediction drafts for it, on llama.cpp alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import edge_spec
from edge_spec.core.heads import ComputesHeads, EagleHead, EntryRows, HeadBackend
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.diagnostics.doctor.diagnose import DiagnosisRequest, diagnose
from edge_spec.diagnostics.doctor.finding import Severity
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_model_info import GgufModelInfo, open_model_info
from edge_spec.exporters.heads import is_head, open_head
from edge_spec.loader.head import StoredBackend, StoredTables
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from fixtures import hybrid_models as hybrid
from fixtures import text_distribution as text
from fixtures.head_drafting import FLOAT_BACKENDS, float_backend, oblige
from fixtures.llamacpp_mtp import OwnMtp

pytest.importorskip("llama_cpp")

FLOAT32 = RuntimeOptions(context_length=256, kv_type="f32", flash_attention=False)
PROMPT = np.random.default_rng(0).integers(3, 250, 12).tolist()
CHAIN = Budget(num_draft_tokens=3, num_rows=4, branches=False)
ACCEPTED = (0, 2, 1, 3, 0)  # draft tokens of each round
TOLERANCE = 1e-4  # float32 of sums of about a hundred terms, in another order; logits are below 5
LAYER = hybrid.MTP


class Recording(EagleNetwork):
    """Keeps the last logits."""

    def likeliest(self, scores: np.ndarray) -> list[tuple[int, int]]:
        self.seen = scores.copy()
        return super().likeliest(scores)


@pytest.fixture(scope="module", params=["dense", "experts"])
def has_experts(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "experts")


@pytest.fixture(scope="module")
def target(has_experts: bool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target") / "model.gguf"
    return hybrid.write_qwen35(path, mtp=True, experts=has_experts)


@pytest.fixture(scope="module", params=["own file", "file of the layer alone", "directory"])
def head(
    request: pytest.FixtureRequest,
    target: Path,
    has_experts: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("head")
    if request.param == "own file":
        return target
    if request.param == "directory":
        return hybrid.write_mtp_directory(folder / "model", experts=has_experts)
    path = folder / "mtp-model.gguf"
    return hybrid.write_qwen35(path, only_mtp=True, experts=has_experts)


@pytest.fixture(params=FLOAT_BACKENDS)
def backend(request: pytest.FixtureRequest) -> HeadBackend:
    return float_backend(request.param)


@pytest.fixture
def own(target: Path) -> Iterator[OwnMtp]:
    opened = OwnMtp(target)
    yield opened
    opened.close()


def model_of(path: Path) -> tuple[GgufModelInfo, LlamaCppModel]:
    info = open_model_info(path)
    assert isinstance(info, GgufModelInfo)
    opened = runtimes.load_runtime("llamacpp").open(info, FLOAT32)
    assert isinstance(opened, LlamaCppModel)
    return info, opened


def network_of(head: Path, info: GgufModelInfo, backend: HeadBackend | None = None) -> Recording:
    read = open_head(head, info.config)
    assert isinstance(read, EagleHead)
    return Recording(read, StoredTables(info.shared_tables()), backend)


def final_states(model: LlamaCppModel, tokens: list[int]) -> np.ndarray:
    """[tokens, hidden], of a session that reads them all at once."""
    session, found = model.open_session(), []
    layers = (model.config.num_layers,)
    session.collect_features(layers, lambda _, rows: found.append(rows[:, 0].copy()))
    session.prefill(tokens)
    session.close()
    return np.concatenate(found)


def test_each_draft_token_is_that_of_llama_cpps_own_graph(
    head: Path, target: Path, backend: HeadBackend, own: OwnMtp
) -> None:
    """In rounds that accept some draft tokens and reject others, whose states are taken back."""
    info, model = model_of(target)
    network = network_of(head, info, backend)
    drafter, session, written = EagleDrafter(network), model.open_session(), list(PROMPT)
    drafter.attach(model, session)
    session.prefill(written[:-1])
    drafter.begin(written)
    for accepted in ACCEPTED:
        features = final_states(model, written[:-1])
        tree = drafter.propose(written[-1], CHAIN)
        drafted = tree.tokens[1:].tolist()
        assert len(drafted) == 3
        for count in range(3):
            expected = own.drafted_logits([*written, *drafted[:count]], features)
            assert drafted[count] == expected.argmax()
        np.testing.assert_allclose(network.seen, expected, atol=TOLERANCE, rtol=0)
        out = session.forward(tree)
        other = next(token for token in range(3, 250) if token not in drafted)
        verdict = Verdict(
            (*drafted[:accepted], other), tuple(range(1, accepted + 1)), exhausted=False
        )
        session.commit(verdict.kept)
        drafter.observe(tree, out, verdict)
        written += verdict.tokens
    model.close()


@pytest.fixture(scope="module")
def computed(has_experts: bool) -> dict[str, np.ndarray]:
    """What transformers computes, by make_qwen35_fixture.py: of 20 tokens the streams that enter
    layers and the final states, and the scores of the layer's rows after them."""
    name = "qwen35moe.npz" if has_experts else "qwen35.npz"
    with np.load(Path(hybrid.__file__).with_name(name)) as stored:
        return dict(stored)


def test_states_are_those_of_transformers(target: Path, computed: dict[str, np.ndarray]) -> None:
    """Read as a prompt, and in passes whose last rows are taken back."""
    _, model = model_of(target)
    tokens, layers = computed["tokens"].tolist(), range(hybrid.LAYERS + 1)
    session, found = model.open_session(), []
    session.collect_features(layers, lambda _, rows: found.append(rows.copy()))
    session.prefill(tokens[:9])
    for kept in (1, 4, 2, 4):
        at = session.length
        right = tokens[at + 1 : at + kept]
        out = session.forward(TokenTree.chain(tokens[at], [*right, 7, 8, 9]))
        assert out.features is not None
        found.append(out.features[:kept].copy())
        expected = computed["streams"][at : at + kept, -1] @ hybrid.tensors()["output.weight"].T
        np.testing.assert_allclose(out.logits[:kept], expected, atol=TOLERANCE, rtol=0)
        session.commit(range(kept))
    model.close()
    np.testing.assert_allclose(np.concatenate(found), computed["streams"], atol=TOLERANCE, rtol=0)


def test_scores_of_the_layer_are_those_of_transformers(
    head: Path, target: Path, backend: HeadBackend, computed: dict[str, np.ndarray]
) -> None:
    info = open_model_info(target)
    assert isinstance(info, GgufModelInfo)
    scores = scores_of_layer(network_of(head, info, backend), computed)
    np.testing.assert_allclose(scores, computed["logits"], atol=TOLERANCE, rtol=0)


def scores_of_layer(network: Recording, computed: dict[str, np.ndarray]) -> np.ndarray:
    """[rows, vocab] of the layer's rows after all tokens but the first."""
    tokens = computed["tokens"]
    count, sizes = len(tokens) - 1, (1, 2, hybrid.KV_HEADS, len(tokens) - 1, hybrid.HEAD_DIM)
    rows = EntryRows(
        embedded=network.embed(tokens[1:]),
        found=computed["streams"][:, -1],
        states=np.empty((0, hybrid.HIDDEN), np.float32),
        order=np.arange(count),
        positions=np.arange(count),
        start=0,
        sees=np.tri(count, dtype=bool),
        scored=np.arange(count),
    )
    return network.bound_to(np.zeros(sizes, np.float32))(rows)[1]


@pytest.fixture(scope="module")
def plain(target: Path) -> list[int]:
    with edge_spec.load(str(target), drafter="none", threads=1) as engine:
        return [token.id for token in engine.generate(PROMPT, max_tokens=40).tokens]


@pytest.fixture
def obliging(monkeypatch: pytest.MonkeyPatch, plain: list[int]) -> None:
    oblige(monkeypatch, PROMPT, plain)


@pytest.mark.parametrize("drafter", ["auto", "eagle"])
@pytest.mark.usefixtures("fixed_policy", "obliging")
def test_greedy_texts_are_those_of_plain_decoding(
    drafter: str, plain: list[int], target: Path, head: Path
) -> None:
    with edge_spec.load(str(target), drafter=drafter, draft=str(head), threads=1) as engine:
        result = engine.generate(PROMPT, max_tokens=40)
        again = engine.generate([*PROMPT, *plain[:7]], max_tokens=33)
    assert [token.id for token in result.tokens] == plain
    assert [token.id for token in again.tokens] == plain[7:]
    found = result.stats.drafters["eagle"]
    assert 0 < found.draft_n_accepted < found.draft_n


def _few_likely(tensors: dict[str, np.ndarray]) -> None:
    """So that the model and its layer mostly choose among the same tokens."""
    tensors["output.weight"][8:] *= np.float32(1e-3)


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_target(tmp_path: Path) -> None:
    path = hybrid.write_qwen35(tmp_path / "model.gguf", mtp=True, changed=_few_likely)
    info, model = model_of(path)
    drafter = EagleDrafter(network_of(path, info))
    params = SamplingParams(temperature=2.0, top_k=4)
    session, scorer, prompt = model.open_session(), model.open_session(), (1, 2, 3, 4)

    drafter.attach(model, session)
    seeded = SamplingParams(temperature=2.0, top_k=4, seed=5)
    sampler = Sampler(seeded, prompt, sampled_drafts=True)
    found = text.sampled_texts(drafter, session, prompt, sampler, CHAIN, 2000)
    assert 500 < found.num_accepted < found.num_drafted - 500  # otherwise nothing was tried
    expected = text.joint(text.logits_of(scorer), prompt, params)
    assert text.p_value(found.counts, expected) > text.SMALLEST_P
    model.close()


def test_the_layer_is_no_part_of_the_model(target: Path, has_experts: bool, tmp_path: Path) -> None:
    """Which computes the same without it."""
    _, model = model_of(target)
    _, other = model_of(hybrid.write_qwen35(tmp_path / "without.gguf", experts=has_experts))
    assert model.config.num_layers == other.config.num_layers == hybrid.LAYERS
    found = []
    for each in (model, other):
        session = each.open_session()
        session.prefill(PROMPT)
        found.append(session.forward(TokenTree.chain(5)).logits.copy())
        each.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_a_file_with_the_layer_is_a_head_for_itself_alone(target: Path, tmp_path: Path) -> None:
    """For others it is a draft like any: a smaller model of the family."""
    assert is_head(target, is_targets=True) and not is_head(target)
    assert is_head(hybrid.write_qwen35(tmp_path / "mtp.gguf", only_mtp=True))
    without = hybrid.write_qwen35(tmp_path / "without.gguf")
    assert not is_head(without, is_targets=True)


@pytest.mark.parametrize("each_apart", [False, True])
def test_both_forms_hold_the_same_layer(
    each_apart: bool, target: Path, has_experts: bool, tmp_path: Path
) -> None:
    config = open_model_info(target).config
    written = hybrid.write_mtp_directory(
        tmp_path / "model", experts=has_experts, each_apart=each_apart and has_experts
    )
    stored, read = open_head(target, config), open_head(written, config)
    assert isinstance(stored, EagleHead) and isinstance(read, EagleHead)
    epsilon = stored.config.norm_epsilon  # which GGUF keeps in float32
    assert stored.config == replace(read.config, norm_epsilon=epsilon)
    assert epsilon == np.float32(hybrid.EPSILON) and read.config.rotary_dim == hybrid.ROTATED
    assert stored.tensors.keys() == read.tensors.keys()
    for name, values in read.tensors.items():  # in float32, 1 is taken away and added again
        np.testing.assert_allclose(values, stored.tensors[name], atol=1e-6, rtol=0)


def test_of_several_layers_the_first_one_drafts(target: Path, tmp_path: Path) -> None:
    def with_second(tensors: dict[str, np.ndarray]) -> None:
        second = {n.replace("layers.0", "layers.1"): each + 1 for n, each in tensors.items()}
        tensors.update({name: each for name, each in second.items() if "layers.1" in name})

    config = open_model_info(target).config
    one = open_head(hybrid.write_mtp_directory(tmp_path / "one"), config)
    two = open_head(hybrid.write_mtp_directory(tmp_path / "two", with_second), config)
    assert isinstance(one, EagleHead) and isinstance(two, EagleHead)
    assert one.tensors.keys() == two.tensors.keys() and two.config.num_layers == 1


def test_the_layer_of_another_model_is_refused(target: Path, head: Path) -> None:
    config = open_model_info(target).config
    with pytest.raises(EdgeSpecError, match="its model has 4 layers, this target 5"):
        open_head(head, replace(config, num_layers=5), has_weights=False)


def test_doctor_says_what_it_is(target: Path, head: Path) -> None:
    places = LoadOptions(runtime="llamacpp")
    report = diagnose(
        DiagnosisRequest(str(target), str(head), places=places), lambda *_: None, list
    )
    found = next(each for each in report.findings if each.check == "head")
    assert found.level is Severity.OK
    assert found.found == "MTP from features 4, scores 265 of 265 tokens"


def _drop(name: str) -> hybrid.Changed:
    return lambda tensors: tensors.pop(name)


def _set(name: str, *shape: int) -> hybrid.Changed:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


IN_DIRECTORY: dict[str, tuple[hybrid.Changed, dict[str, object], str]] = {
    "norm": (_drop("mtp.norm.weight"), {}, "tensor mtp.norm.weight is missing"),
    "state norm": (_drop("mtp.pre_fc_norm_hidden.weight"), {}, "mtp.pre_fc_norm_hidden.weight is"),
    "fc": (_drop("mtp.fc.weight"), {}, "tensor mtp.fc.weight is missing"),
    "queries": (_drop("mtp.layers.0.self_attn.q_proj.weight"), {}, "self_attn.q_proj.weight is mi"),
    "no gates": (
        _set("mtp.layers.0.self_attn.q_proj.weight", 128, 64),
        {},
        "mtp.layers.0.self_attn.q_proj.weight has the shape [128, 64], expected [256, 64]",
    ),
    "experts": (_set("mtp.layers.0.mlp.experts.0.up_proj.weight", 2, 2), {}, "mlp.experts.0.up"),
    "width": (_set("mtp.fc.weight", 64, 96), {}, "a head for another target: it reads 96"),
    "vocabulary": (id, {"vocab_size": 248320}, "another target: its vocabulary has 248320"),
    "narrow": (id, {"hidden_size": 32}, "it shares tables of 32 numbers a row"),
    "rotated": (
        id,
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.1}},
        "no usable partial_rotary_factor",
    ),
}


@pytest.mark.parametrize("case", IN_DIRECTORY)
def test_a_directory_that_does_not_fit_is_refused(case: str, target: Path, tmp_path: Path) -> None:
    breaks, changes, told = IN_DIRECTORY[case]
    path = hybrid.write_mtp_directory(tmp_path / "model", breaks, **changes)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(target), draft=str(path), threads=1)
    assert told in caught.value.message and "\n" not in str(caught.value)


def _keep_rows(name: str, count: int) -> hybrid.Changed:
    return lambda tensors: tensors.update({name: tensors[name][:count]})


WITH_EXPERTS: dict[str, tuple[hybrid.Changed, dict[str, object], str]] = {
    "router": (
        _drop("mtp.layers.0.mlp.gate.weight"),
        {},
        "mtp.layers.0.mlp.gate.weight is missing",
    ),
    "gate": (
        _drop("mtp.layers.0.mlp.shared_expert_gate.weight"),
        {},
        "mtp.layers.0.mlp.shared_expert_gate.weight is missing",
    ),
    "one expert": (
        _drop("mtp.layers.0.mlp.experts.3.up_proj.weight"),
        {},
        "mtp.layers.0.mlp.experts.3.up_proj.weight is missing",
    ),
    "all experts": (_keep_rows("mtp.layers.0.mlp.experts.down_proj", 5), {}, "expected 6 of them"),
    "count": (id, {"num_experts": 7}, "expected 7 of them"),
    "used": (id, {"num_experts_per_tok": 7}, "takes 7 of 6 experts"),
    "no number": (id, {"num_experts": "6"}, "no usable num_experts"),
    "unstated": (id, {"moe_intermediate_size": None}, "no usable moe_intermediate_size"),
    "shared": (id, {"shared_expert_intermediate_size": 32}, "shared_expert.gate_proj.weight has"),
}


@pytest.mark.parametrize("case", WITH_EXPERTS)
def test_experts_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    breaks, changes, told = WITH_EXPERTS[case]
    target = hybrid.write_qwen35(tmp_path / "model.gguf", experts=True)
    path = hybrid.write_mtp_directory(
        tmp_path / "model", breaks, experts=True, each_apart=case == "one expert", **changes
    )
    with pytest.raises(EdgeSpecError) as caught:
        open_head(path, open_model_info(target).config)
    assert told in caught.value.message and "\n" not in str(caught.value)


@pytest.mark.parametrize("bits", [4, 8])
def test_rounded_experts_are_near_those_in_floats(
    bits: int, target: Path, computed: dict[str, np.ndarray]
) -> None:
    """Of a mistake in how they are stored, scores would be as far apart as those of others."""
    info = open_model_info(target)
    assert isinstance(info, GgufModelInfo)
    runtime = runtimes.load_runtime("ort")
    assert isinstance(runtime, ComputesHeads)
    network = network_of(target, info, StoredBackend(runtime, bits))
    scores = scores_of_layer(network, computed)
    assert np.abs(scores - computed["logits"]).mean() < {4: 0.12, 8: 0.012}[bits]


IN_FILE: dict[str, tuple[hybrid.Changed, str]] = {
    "norm": (_drop(LAYER + "nextn.enorm.weight"), "blk.4.nextn.enorm.weight is missing"),
    "queries": (_drop(LAYER + "attn_q.weight"), "blk.4.attn_q.weight is missing"),
    "experts": (_set(LAYER + "ffn_gate_inp.weight", 2, 2), "blk.4.ffn_gate_inp.weight"),
    "none": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(LAYER)],
        "has no layer for multi-token prediction",
    ),
}


@pytest.mark.parametrize("case", IN_FILE)
def test_a_file_that_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    breaks, told = IN_FILE[case]
    path = hybrid.write_qwen35(tmp_path / "model.gguf", mtp=True, changed=breaks)
    with pytest.raises(EdgeSpecError) as caught:
        edge_spec.load(str(path), draft=str(path), threads=1)
    assert told in caught.value.message and "\n" not in str(caught.value)


def test_a_stretched_rotary_embedding_is_refused(tmp_path: Path) -> None:
    path = hybrid.write_qwen35(tmp_path / "model.gguf", mtp=True, rope_scaling="yarn")
    with pytest.raises(UnsupportedModelError, match="rotary embedding by 'yarn'") as caught:
        edge_spec.load(str(path), draft=str(path), threads=1)
    assert "\n" not in str(caught.value)


def test_a_file_of_the_layer_alone_is_no_model(tmp_path: Path) -> None:
    path = hybrid.write_qwen35(tmp_path / "mtp.gguf", only_mtp=True)
    with pytest.raises(UnsupportedModelError, match="the layer for multi-token prediction alone"):
        edge_spec.load(str(path), runtime="llamacpp")


def test_counts_that_no_model_has_are_refused(tmp_path: Path) -> None:
    path = hybrid.write_qwen35(tmp_path / "model.gguf", mtp=True)
    stored = path.read_bytes()
    key = b"qwen35.nextn_predict_layers" + (4).to_bytes(4, "little")  # uint32
    assert key in stored
    path.write_bytes(stored.replace(key + b"\x01", key + b"\x05"))
    with pytest.raises(ModelFileError, match="states 5 layers for multi-token prediction among 5"):
        edge_spec.load(str(path), runtime="llamacpp")
    assert not is_head(path, is_targets=True)


def test_that_of_qwen3_next_is_refused_by_name(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build(num_hidden_layers=1)
    model.config.update({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]})
    model.weights["mtp.fc.weight"] = np.zeros((64, 128), np.float32)
    path = Path(tiny.write_hf(model, tmp_path / "model"))
    assert is_head(path)
    others: Callable[..., Path] = hybrid.write_qwen35
    with pytest.raises(UnsupportedModelError) as caught:
        edge_spec.load(str(others(tmp_path / "target.gguf")), draft=str(path), threads=1)
    assert "multi-token prediction (mtp.fc.weight) of a qwen3_next model" in caught.value.message
    assert "does not take back" in caught.value.message and "\n" not in str(caught.value)
