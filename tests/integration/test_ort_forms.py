"""Forms of a bundle's graph that are made for other devices, on the CPU, which runs them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Forward, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime, devices, graph_loader
from edge_spec.runtimes.ort.devices import PROCESSOR
from edge_spec.runtimes.ort.graph_forms import FLOAT32, GraphForm
from edge_spec.runtimes.ort.model import OrtModel
from edge_spec.testing import check_session
from fixtures import families, tiny_generation
from fixtures import tiny_models as tiny

onnxruntime: Any = pytest.importorskip("onnxruntime")
CONTEXT = 48  # tokens: enough for windows of 8, and short for the session's check, which fills it
HALF = GraphForm(is_half=True)
WIDE = GraphForm(is_half=True, has_wide_stream=True)
# Scores of these models deviate by 0.3 to 2, and float16 has three digits: errors of up to 1.1 % of
# their deviation were seen. A wrong mask or position is off by more than all of it.
HALF_ERROR = 0.05
# In a logit of up to 8, between passes of other widths: float16 has steps of 0.004 there.
HALF_TOLERANCE = 0.05

Opened = Callable[..., Bundle]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """bundle(name, quantization): of a family, or of a shape with two forms of attention."""

    @cache
    def exported(name: str, quantization: str = "fp32") -> Bundle:
        directory = tmp_path_factory.mktemp("forms")
        if name == "stacked":
            shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
            source = tiny.write_hf(tiny.build("qwen3", **shape), directory / "model")
        else:
            source = families.write_hf(name, directory / "model")
        return export(source, directory / "out", quantization)

    return exported


def export(source: Path, out: Path, quantization: str = "fp32") -> Bundle:
    how = ExportOptions(quantization, check=False)
    OnnxExporter().export(open_checkpoint(source), out, how, lambda what, done: None)
    return open_bundle(out)


def opened(bundle: Bundle, form: GraphForm | None) -> OrtModel:
    return OrtModel(bundle, RuntimeOptions(threads=1, context_length=CONTEXT), form)


def chain_of(found: OrtModel) -> Forward:
    """A chain that is farther from the begin of the text than any window."""
    text = np.random.RandomState(3).randint(0, 262, 30).tolist()
    session = found.open_session()
    session.prefill(text[:20])
    out = session.forward(TokenTree.chain(text[20], text[21:]))
    assert out.hidden is not None
    copied = Forward(out.logits.copy(), out.hidden.copy())
    session.close()
    return copied


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Of scores, as a part of their deviation."""
    return float(np.std(found - expected, axis=1).max() / np.std(expected, axis=1).min())


@pytest.mark.parametrize(
    ("name", "quantization", "form"),
    [
        ("gemma3", "fp32", WIDE),
        ("stacked", "fp16", HALF),
        ("phi3", "fp16", HALF),
        ("gpt-oss", "fp16", HALF),
    ],
)
def test_float16_keeps_the_promises_of_a_session(
    name: str, quantization: str, form: GraphForm, bundle: Opened
) -> None:
    """Windows and a wide stream; normed heads, two forms of attention and stored float16; windows
    and heads that are rotated in part; experts and sinks."""
    found = opened(bundle(name, quantization), form)
    check_session(found, HALF_TOLERANCE)
    exact, half = chain_of(opened(bundle(name, quantization), None)), chain_of(found)
    assert half.logits.dtype == half.hidden.dtype == np.float32
    assert 0 < error(half.logits, exact.logits) < HALF_ERROR
    assert 0 < error(half.hidden, exact.hidden) < HALF_ERROR


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "gpt-oss", "stacked"])
def test_a_graph_for_devices_scores_chains_as_the_one_that_is_stored(
    name: str, bundle: Opened
) -> None:
    """Windows stay, soft caps and sinks too; the operator's own mask stands for the bias."""
    trees = opened(bundle(name), None)
    chains = opened(bundle(name), FLOAT32)
    assert trees.capabilities.trees
    assert not chains.capabilities.trees
    check_session(chains, 1e-3)  # as test_every_runtime.py has it for float32
    np.testing.assert_allclose(chain_of(chains).logits, chain_of(trees).logits, atol=1e-4)
    session = chains.open_session()
    session.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="chains alone"):
        session.forward(TokenTree(np.array([4, 5, 6]), np.array([-1, 0, 0]), np.ones(3)))


def test_drafting_in_float16_changes_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, wrong tokens and plain rounds, against plain rounds alone; of this model each
    choice is clear by far more than rows of other widths differ."""
    chains = [
        each for each in tiny_generation.PATTERNS if each[0] == tuple(range(-1, len(each[0]) - 1))
    ]
    monkeypatch.setattr(tiny_generation, "PATTERNS", chains)
    source = tiny_generation.write_model(tmp_path / "model")
    found = OrtModel(export(source, tmp_path / "out"), RuntimeOptions(threads=1), HALF)
    prompt = np.random.RandomState(5).randint(0, 262, tiny_generation.PROMPT_TOKENS).tolist()
    written = tiny_generation.generation(found, prompt, tiny_generation.MAX_TOKENS, frozenset())
    assert len(written["text"]) == tiny_generation.MAX_TOKENS
    assert len(written["rounds"]) < tiny_generation.MAX_TOKENS  # several tokens in some


@pytest.fixture
def large(tmp_path: Path) -> Bundle:
    """A model whose residual stream is beyond float16's 65504, and nothing else of it: ten layers
    that each add a third of that at most."""
    source = tiny.build("llama", num_hidden_layers=10)
    for name, values in source.weights.items():
        if name == "model.embed_tokens.weight":
            values *= 4e4
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            values *= 2e3
    return export(tiny.write_hf(source, tmp_path / "model"), tmp_path / "out")


def test_scores_that_float16_cannot_hold_are_a_fault_and_a_wide_stream_holds_them(
    large: Bundle,
) -> None:
    with pytest.raises(SessionError, match="float16 cannot hold") as caught:
        chain_of(opened(large, HALF))
    assert "\n" not in str(caught.value)
    assert "--device cpu" in caught.value.remedy
    exact, wide = (chain_of(opened(large, form)).logits for form in (None, WIDE))
    assert error(wide, exact) < HALF_ERROR


def test_a_weight_that_float16_cannot_hold_is_refused_in_one_line(tmp_path: Path) -> None:
    source = tiny.build("llama")
    source.weights["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    large = export(tiny.write_hf(source, tmp_path / "model"), tmp_path / "out")
    for form in (HALF, WIDE):
        with pytest.raises(SessionError, match="float16 cannot hold") as caught:
            chain_of(opened(large, form))
        assert "\n" not in str(caught.value)


def test_weights_become_float16_as_the_graph_is_loaded(bundle: Opened) -> None:
    """No pass rounds them again."""
    whole = devices.count_nodes(opened(bundle("stacked"), HALF).graphs.whole)[
        "CPUExecutionProvider"
    ]
    assert "Cast" not in whole


def test_a_device_gets_its_form_and_another_one_where_the_first_overflows(
    large: Bundle, bundle: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU under another name."""
    names = {"odd": PROCESSOR._replace(name="odd", kind="gpu"), "cpu": PROCESSOR}
    monkeypatch.setattr(devices, "choose", lambda library, wanted: names[(*wanted, "cpu")[0]])
    monkeypatch.setattr(graph_loader, "require_on_device", lambda session, device: None)
    odd = RuntimeOptions(providers=("odd",), context_length=CONTEXT)
    narrow, wide = (OrtRuntime().open(each, odd) for each in (bundle("stacked"), large))
    assert isinstance(narrow, OrtModel)
    assert isinstance(wide, OrtModel)
    assert narrow.graphs.form == HALF
    assert wide.graphs.form == WIDE
    exact = OrtRuntime().open(large, RuntimeOptions(context_length=CONTEXT))
    assert isinstance(exact, OrtModel)
    assert exact.graphs.form is None
    assert error(chain_of(wide).logits, chain_of(exact).logits) < HALF_ERROR
