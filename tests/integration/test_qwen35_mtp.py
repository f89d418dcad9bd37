"""Qwen 3.5's own layer for multi-token prediction drafts for it, on llama.cpp alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.core.heads import EagleHead, EntryRows
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.heads.drafting import RowScores
from edge_spec.drafters.heads.eagle import EagleDrafter
from edge_spec.drafters.heads.layers import LayersNetwork
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import EdgeSpecError
from edge_spec.exporters.gguf_model_info import GgufModelInfo, open_model_info
from edge_spec.exporters.heads import open_head
from edge_spec.loader.head import StoredTables
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel
from fixtures import hybrid_models as hybrid
from fixtures import text_distribution as text
from fixtures.head_drafting import float_backend, oblige
from fixtures.llamacpp_mtp import OwnMtp

pytest.importorskip("llama_cpp")

FLOAT32 = RuntimeOptions(context_length=256, kv_type="f32", flash_attention=False)
PROMPT = np.random.default_rng(0).integers(3, 250, 12).tolist()
CHAIN = Budget(num_draft_tokens=3, num_rows=4, branches=False)
ACCEPTED = (0, 2, 1, 3, 0)  # draft tokens of each round
TOLERANCE = 1e-4  # float32 of sums of about a hundred terms, in another order; logits are below 5
LAYER = hybrid.MTP


class Recording(EagleDrafter):
    """Keeps the last logits."""

    def _ranked(self, row: RowScores, path: Any) -> list[tuple[int, int]]:
        self.seen = row.logits.copy()
        return super()._ranked(row, path)


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


def network_of(head: Path, info: GgufModelInfo) -> LayersNetwork:
    read = open_head(head, info.config)
    assert isinstance(read, EagleHead)
    return LayersNetwork(read, StoredTables(info.shared_tables()), float_backend())


def final_states(model: LlamaCppModel, tokens: list[int]) -> np.ndarray:
    """[tokens, hidden], of a session that reads them all at once."""
    session, found = model.open_session(), []
    layers = (model.config.num_layers,)
    session.collect_features(layers, lambda _, rows: found.append(rows[:, 0].copy()))
    session.prefill(tokens)
    session.close()
    return np.concatenate(found)


def test_each_draft_token_is_that_of_llama_cpps_own_graph(
    head: Path, target: Path, own: OwnMtp
) -> None:
    """In rounds that accept some draft tokens and reject others, whose states are taken back."""
    info, model = model_of(target)
    network = network_of(head, info)
    drafter, session, written = Recording(network), model.open_session(), list(PROMPT)
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
        np.testing.assert_allclose(drafter.seen, expected, atol=TOLERANCE, rtol=0)
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
    head: Path, target: Path, computed: dict[str, np.ndarray]
) -> None:
    info = open_model_info(target)
    assert isinstance(info, GgufModelInfo)
    scores = scores_of_layer(network_of(head, info), computed)
    np.testing.assert_allclose(scores, computed["logits"], atol=TOLERANCE, rtol=0)


def scores_of_layer(network: LayersNetwork, computed: dict[str, np.ndarray]) -> np.ndarray:
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
    found = text.sampled_texts(drafter, session, prompt, sampler, CHAIN, 800)
    assert 200 < found.num_accepted < found.num_drafted - 200  # otherwise nothing was tried
    expected = text.joint(text.logits_of(scorer), prompt, params)
    assert text.p_value(found.counts, expected) > text.SMALLEST_P
    model.close()


def _drop(name: str) -> hybrid.Changed:
    return lambda tensors: tensors.pop(name)


def _set(name: str, *shape: int) -> hybrid.Changed:
    return lambda tensors: tensors.update({name: np.zeros(shape, np.float32)})


IN_DIRECTORY: dict[str, tuple[hybrid.Changed, dict[str, object], str]] = {
    "norm": (_drop("mtp.norm.weight"), {}, "tensor mtp.norm.weight is missing"),
    "no gates": (
        _set("mtp.layers.0.self_attn.q_proj.weight", 128, 64),
        {},
        "mtp.layers.0.self_attn.q_proj.weight has the shape [128, 64], expected [256, 64]",
    ),
    "width": (_set("mtp.fc.weight", 64, 96), {}, "a head for another target: it reads 96"),
    "router": (
        _set("mtp.layers.0.mlp.gate.weight", 2, 64),
        {},
        "tensor mtp.layers.0.mlp.gate.weight, which no known head has",
    ),
    "vocabulary": (id, {"vocab_size": 248320}, "another target: its vocabulary has 248320"),
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


IN_FILE: dict[str, tuple[hybrid.Changed, str]] = {
    "no gates": (
        _set(LAYER + "attn_q.weight", 128, 64),
        "blk.4.attn_q.weight has the shape [128, 64], expected [256, 64]",
    ),
    "width": (_set(LAYER + "nextn.eh_proj.weight", 64, 96), "another target: it reads 96"),
    "norm": (_drop(LAYER + "nextn.enorm.weight"), "blk.4.nextn.enorm.weight is missing"),
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


def _join(tensors: dict[str, np.ndarray]) -> None:
    parts = [tensors.pop(f"{LAYER}ffn_{part}_exps.weight") for part in ("gate", "up")]
    tensors[LAYER + "ffn_gate_up_exps.weight"] = np.concatenate(parts, axis=1)


def test_experts_may_be_one_tensor_or_apart(tmp_path: Path) -> None:
    """In GGUF files and in directories; layers after the first are left out."""
    apart = hybrid.write_qwen35(tmp_path / "apart.gguf", mtp=True, experts=True)
    joined = hybrid.write_qwen35(tmp_path / "joined.gguf", mtp=True, experts=True, changed=_join)
    directories = [
        hybrid.write_mtp_directory(
            tmp_path / str(each_apart),
            _set("mtp.layers.1.mlp.gate.weight", 2, 2),
            experts=True,
            each_apart=each_apart,
        )
        for each_apart in (False, True)
    ]
    target = open_model_info(apart).config
    opened = [open_head(path, target) for path in (apart, joined, *directories)]
    first, second, *others = (head.tensors for head in opened if isinstance(head, EagleHead))
    assert first.keys() == second.keys() == others[0].keys() == others[1].keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], name)
        np.testing.assert_array_equal(others[0][name], others[1][name], name)
        tolerance = 1e-6 if name.endswith("norm") else 0  # of which a directory has less by 1
        np.testing.assert_allclose(first[name], others[0][name], 0, tolerance, err_msg=name)


MISSING = {
    False: ("mlp.experts.down_proj", "mlp.experts.down_proj is missing"),
    True: ("mlp.experts.0.up_proj.weight", "mlp.experts.0.up_proj.weight is missing"),
}


@pytest.mark.parametrize("each_apart", MISSING)
def test_a_directory_without_some_of_its_experts_is_refused(
    each_apart: bool, target: Path, tmp_path: Path
) -> None:
    name, told = MISSING[each_apart]
    path = hybrid.write_mtp_directory(
        tmp_path / "model", _drop("mtp.layers.0." + name), experts=True, each_apart=each_apart
    )
    with pytest.raises(EdgeSpecError, match=re.escape(told)):
        open_head(path, open_model_info(target).config)
