"""Static ONNX bundles: the graphs score as the reference does, what they store is what they stand
for, and sessions on them keep their promises and draft."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edge_spec import load
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import (
    BundleError,
    EdgeSpecError,
    UnsupportedModelError,
    UsageError,
)
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle, write_manifest
from edge_spec.runtimes.ort import OrtRuntime
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import tiny_models
from fixtures.silence import quiet

CONTEXT = 100  # tokens, in 128 slots
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
    side_by_side: ModuleType,
) -> None:
    source = checkpoint(variant)
    model = opened(export(source, tmp_path / "out", hidden_states=True, context_length=96))
    assert model.capabilities.hidden_states
    side_by_side.require_static_scores(model, source, tokens(70), random_tree(7, seed=3))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integers_score_as_the_weights_that_they_stand_for(
    quantization: str, exported: Export, tmp_path: Path, side_by_side: ModuleType, tokens: Tokens
) -> None:
    """The reference is given what the bundle's numbers stand for, put together here."""
    bundle = exported(quantization)
    tiny = tiny_models.build("llama")
    stored = stored_weights(bundle)
    for name, values in stored.items():
        error = np.linalg.norm(values - tiny.weights[name]) / np.linalg.norm(values)
        # Of random weights rounding takes 9 % at 4 bits and 0.5 % at 8.
        assert 0 < error < (0.01 if quantization == "int8" or "layers" not in name else 0.15)
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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"quantization": "lut4"}, UsageError, "unknown quantization 'lut4'"),
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


def test_weights_beyond_float16_are_refused(tmp_path: Path) -> None:
    model = tiny_models.build("llama")
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    source = open_checkpoint(tiny_models.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has values beyond float16"):
        export(source, tmp_path / "out", "fp16")
    assert not (tmp_path / "out").exists()


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
