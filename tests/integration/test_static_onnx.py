"""Static ONNX bundles: the graphs score as the reference does, what they store is what they stand
for, and sessions on them keep their promises and draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from edge_spec import load
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Interruptible, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import (
    BundleError,
    EdgeSpecError,
    SessionError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.exporters.onnx.static_activations import affine
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle, write_manifest
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.static.interruption import Interruption
from edge_spec.testing import check_session
from fixtures import families, tiny_models, tolerance
from fixtures.silence import quiet

CONTEXT = 100  # tokens, in 128 slots
FUNCTIONS = ["prefill_64", "rows_1", "rows_4", "rows_8"]
# Of logits whose standard deviation is 2 to 3. Keys and values as float16 make 0.015 of it, where
# all else is float32; a wrong level, scale or nibble moves them by 0.3 and more.
HALF_STATES = 0.05

Export = Callable[..., Bundle]
Tokens = Callable[..., list[int]]
RandomTree = Callable[..., TokenTree]


def export(checkpoint: Any, out: Path, quantization: str = "fp32", **options: Any) -> Bundle:
    asked = ExportOptions(quantization, **{"context_length": CONTEXT, "check": False} | options)
    StaticOnnxExporter().export(checkpoint, out, asked, quiet)
    return open_bundle(out)


@pytest.fixture(scope="module")
def exported(checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Export:
    """exported(quantization="fp32", variant="llama"): a bundle, written once."""
    made: dict[tuple[str, str], Bundle] = {}

    def of(quantization: str = "fp32", variant: str = "llama") -> Bundle:
        key = (quantization, variant)
        if key not in made:
            out = tmp_path_factory.mktemp("static") / "bundle"
            made[key] = export(checkpoint(variant), out, quantization)
        return made[key]

    return of


def opened(bundle: Bundle, **options: Any) -> Any:
    return OrtRuntime().open(bundle, RuntimeOptions(threads=1, **options))


@pytest.mark.parametrize("variant", tiny_models.VARIANTS)
def test_the_graphs_score_as_the_reference_does(
    variant: str,
    checkpoint: Callable[..., Any],
    tmp_path: Path,
    tokens: Tokens,
    random_tree: RandomTree,
) -> None:
    """In float32: after a prefill of a wide and a narrow pass, a plain step, a tree, and a chain
    after one of its branches."""
    source = checkpoint(variant)
    model = opened(export(source, tmp_path / "out", hidden_states=True, context_length=96))
    assert model.capabilities.hidden_states
    sessions = (model.open_session(), ReferenceModel(source).open_session())
    for session in sessions:
        session.prefill(tokens(70))
    for each in (TokenTree.chain(7), random_tree(7, seed=3), TokenTree.chain(1, [2, 3])):
        found, expected = (session.forward(each) for session in sessions)
        positions = sessions[0].length + len(each)
        for one, other in ((found.logits, expected.logits), (found.hidden, expected.hidden)):
            tolerance.require_float32(one, other, source.config, positions)
        for session in sessions:
            session.commit(each.path(len(each) - 1))


@pytest.mark.parametrize(("quantization", "allowed"), [("fp32", 1e-3), ("int4", HALF_STATES)])
def test_the_conformance_suite_passes(quantization: str, allowed: float, exported: Export) -> None:
    model = opened(exported(quantization), context_length=48)
    assert check_session(model, allowed).max_difference > 0


def test_rounded_inputs_score_like_those_that_are_not(exported: Export, tokens: Tokens) -> None:
    """Random tokens leave the ranges that were measured on prompts, which moves scores by 0.15 of
    their deviation; a zero point that is left out moves them by all of it."""
    scores = []
    for quantization in ("w8a16", "int8"):
        session = opened(exported(quantization)).open_session()
        session.prefill(tokens(20))
        scores.append(session.forward(TokenTree.chain(7, [3, 5])).logits.copy())
    assert 0 < np.abs(scores[0] - scores[1]).max() < 0.4 * scores[1].std()


def test_each_input_of_matrices_is_rounded_once(exported: Export) -> None:
    bundle = exported("w8a16")
    graph = onnx.load(bundle.file("rows_4.onnx"), load_external_data=False).graph
    made = {output: node for node in graph.node for output in node.output}
    products = [
        node
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm") and made[node.input[1]].op_type == "DequantizeLinear"
    ]
    layers = bundle.config.num_layers
    assert len(products) == 7 * layers + 1
    assert all(node.input[0].endswith(".rounded") for node in products)
    # Of attention and MLP two inputs each, and the head's.
    assert sum(node.op_type == "QuantizeLinear" for node in graph.node) == 4 * layers + 1


@pytest.mark.parametrize(("low", "high"), [(-2.0, 6.0), (1.0, 3.0), (-3.0, -1.0), (0.0, 0.0)])
def test_levels_cover_a_range_and_zero(low: float, high: float) -> None:
    scale, zero = affine(low, high)
    assert scale > 0 and zero.dtype == np.uint16
    for value in (low, high, 0.0):
        level = np.clip(np.rint(value / scale) + zero, 0, np.iinfo(np.uint16).max)
        assert abs((level - float(zero)) * scale - value) <= scale / 2 + 1e-6 * abs(value)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_score_as_the_weights_that_they_stand_for(
    quantization: str, exported: Export, tmp_path: Path, side_by_side: ModuleType, tokens: Tokens
) -> None:
    """The reference is given what the bundle's numbers stand for, put together here."""
    bundle = exported(quantization)
    tiny = tiny_models.build("llama")
    stored = stored_weights(bundle)
    assert all(np.abs(stored[name] - tiny.weights[name]).max() > 0 for name in stored)
    held = tiny_models.TinyModel(tiny.config, tiny.weights | stored)
    source = open_checkpoint(tiny_models.write_hf(held, tmp_path / "model"))
    sessions = (opened(bundle).open_session(), ReferenceModel(source).open_session())
    both = side_by_side.Both(sessions, HALF_STATES)
    both.prefill(tokens(20))
    both.chain(tokens(5, seed=1))


def stored_weights(bundle: Bundle) -> dict[str, np.ndarray]:
    """Every matrix of a bundle as [out, in] float32, under the name that it had."""
    graph = onnx.load(str(bundle.path / "rows_1.onnx")).graph
    arrays = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    found = {}
    for name in arrays:
        if name + ".scales" not in arrays:
            continue
        levels, scales = arrays[name].astype(np.float32), arrays[name + ".scales"]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):  # [out, in], [out]
            found[name] = levels * scales[:, None]
        elif scales.ndim == 1:
            found[name] = (levels * scales).T
        else:
            found[name] = (levels * np.repeat(scales, 32, axis=0)).T
    return found


@pytest.mark.parametrize(("quantization", "bits"), [("fp16", 16), ("int8", 8), ("int4", 4)])
def test_all_functions_share_one_file_of_weights_in_standard_operators(
    quantization: str, bits: int, exported: Export
) -> None:
    """bits: of a weight of a layer."""
    bundle = exported(quantization)
    paths = sorted(bundle.path.glob("*.onnx"))
    graphs = {path.stem: onnx.load(path, load_external_data=False) for path in paths}
    assert sorted(graphs) == FUNCTIONS
    places: dict[str, set[tuple[str, ...]]] = {}
    for path, model in zip(paths, graphs.values(), strict=True):
        onnx.checker.check_model(path)
        assert {node.domain for node in model.graph.node} == {""}
        shapes = [each.type.tensor_type.shape.dim for each in model.graph.input]
        assert all(size.dim_value > 0 for shape in shapes for size in shape)
        for each in model.graph.initializer:
            if each.data_location == TensorProto.EXTERNAL:
                place = tuple(entry.value for entry in each.external_data)
                places.setdefault(each.name, set()).add(place)
    assert {len(each) for each in places.values()} == {1}
    assert {place[0] for each in places.values() for place in each} == {"model.onnx.data"}
    ((_, _, length),) = places["model.layers.0.mlp.up_proj.weight"]
    assert int(length) == 64 * 96 * bits // 8


def test_the_written_bundle_was_compared_with_the_reference(
    checkpoint: Callable[..., Any], tmp_path: Path
) -> None:
    bundle = export(checkpoint("qwen3"), tmp_path / "out", check=True)
    assert 0 < bundle.manifest.parity["max_logit_difference"] < 1e-3
    assert (bundle.manifest.format, bundle.config.context_length) == ("onnx-static", CONTEXT)
    assert runtimes.load_runtime("auto", {"onnx-static"}).name == "ort"


def test_a_session_that_was_interrupted_scores_no_more_and_others_go_on(exported: Export) -> None:
    model = runtimes.load_runtime("ort").open(exported("fp16"), RuntimeOptions(threads=1))
    interrupted, other = model.open_session(), model.open_session()
    for session in (interrupted, other):
        session.prefill([5, 6, 7])
    assert isinstance(interrupted, Interruptible)
    interrupted.interrupt()
    for call in (partial(interrupted.prefill, [8]), partial(interrupted.forward, chain(8))):
        with pytest.raises(SessionError, match="was interrupted"):
            call()
    assert interrupted.length == 3
    assert len(other.forward(chain(8)).logits) == 1


def test_a_pass_that_runs_is_ended(exported: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    """By onnxruntime, before its next operation; nothing of it counts."""
    session = runtimes.load_runtime("ort").open(exported("fp16"), RuntimeOptions()).open_session()
    session.prefill([5, 6, 7])
    expected = session.forward(chain(8)).logits
    ended_by = Interruption.ended_by

    @contextmanager
    def at_once(own: Interruption, end: Callable[[], None]) -> Iterator[None]:
        with ended_by(own, end):
            end()
            yield

    with monkeypatch.context() as patched:
        patched.setattr(Interruption, "ended_by", at_once)
        with pytest.raises(SessionError, match="failed to run rows_1"):
            session.forward(chain(8))
    assert np.array_equal(session.forward(chain(8)).logits, expected)


def chain(token: int) -> TokenTree:
    return TokenTree.chain(token, [])


@pytest.mark.parametrize("context", [None, 90])
@pytest.mark.usefixtures("fixed_policy")
def test_a_static_draft_changes_no_text_and_the_answer_goes_on_without_it(
    hf: Callable[..., Path],
    checkpoint: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: Any,
    caplog: pytest.LogCaptureFixture,
    context: int | None,
) -> None:
    """Its cache has 40 tokens, the answer has more, also where so long a context is asked for;
    target and draft run on ort."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    bundle = export(checkpoint("llama"), tmp_path / "draft", "fp16", context_length=40)
    answers = []
    for draft in (str(bundle.path), "none"):
        drafter = "none" if draft == "none" else "draft-model"
        with load(
            str(hf()),
            runtime="ort",
            draft=draft,
            drafter=drafter,
            exact=True,
            threads=1,
            context_length=context,
        ) as llm:
            result = llm.generate("the", max_tokens=80)
        answers.append([token.id for token in result.tokens])
        if draft != "none":
            assert result.stats.drafters["draft-model"].draft_n_accepted > 0
            told = [line for line in caplog.messages if "context of 40 tokens is full" in line]
            assert len(told) == 1
    assert len(answers[0]) > 50
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("fixed_policy")
def test_a_static_target_writes_the_same_with_a_draft(
    hf: Callable[..., Path], exported: Export, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    target = str(exported("fp16").path)
    answers = []
    for drafter, draft in (("draft-model", str(hf())), ("none", "none")):
        with load(target, draft=draft, drafter=drafter, exact=True, threads=1) as llm:
            assert llm.parts.runtime == "ort"
            result = llm.generate("the", max_tokens=40)
        answers.append([token.id for token in result.tokens])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantization": "lut4"}, UsageError, "unknown quantization 'lut4'"),
        ({"block_size": 64}, UsageError, "block size 64"),
        ({"context_length": 0}, UsageError, "context of 0 tokens"),
        ({"context_length": 129}, UsageError, "Choose 1 to 128"),
        ({"num_layers": 3}, UsageError, "2 layers"),
        ({"compute": "ane"}, UsageError, "no option compute"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    options: dict[str, Any],
    error: type[EdgeSpecError],
    message: str,
    checkpoint: Callable[..., Any],
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as caught:
        export(checkpoint("llama"), tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_what_llama_does_not_have_is_refused_by_its_name(tmp_path: Path) -> None:
    source = open_checkpoint(families.write_hf("gemma3", tmp_path / "model"))
    (tmp_path / "model" / "model.safetensors").unlink()  # nothing reads it
    with pytest.raises(UnsupportedModelError, match=r"static ONNX .* layer kinds, .*activation"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    source = open_checkpoint(tiny_models.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has values beyond float16"):
        export(source, tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


def test_a_context_beyond_the_slots_and_another_device_are_refused(exported: Export) -> None:
    with pytest.raises(UsageError, match=r"holds 100 tokens, not 101\..*--context 101"):
        opened(exported(), context_length=101)
    with pytest.raises(UsageError, match="on the cpu, not on cuda"):
        opened(exported(), providers=("cuda",))


@pytest.mark.parametrize("damage", ["states", "graph", "masks"])
def test_graphs_that_are_not_the_manifests_are_refused_before_they_run(
    damage: str, exported: Export, tmp_path: Path
) -> None:
    source = exported()
    for path in (each for each in source.path.iterdir() if each.name != "manifest.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    graph = tmp_path / "rows_4.onnx"
    described = source.manifest.model_dump(exclude={"files", "schema_version", "tokenizer_sha256"})
    if damage == "states":
        described["architecture"]["num_kv_heads"] = 4
    elif damage == "graph":
        graph.write_bytes(b"no graph")
    else:
        model = onnx.load(str(graph), load_external_data=False)
        (mask,) = (each for each in model.graph.input if each.name == "own_mask")
        mask.type.tensor_type.shape.dim[2].dim_value = 5
        graph.write_bytes(model.SerializeToString())
    write_manifest(tmp_path, **described)
    with pytest.raises(BundleError, match="is no model of edge-spec") as caught:
        opened(open_bundle(tmp_path))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
