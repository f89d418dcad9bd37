"""Bundles for Qualcomm's NPU: the form that the compiler gets, what it must not leave out, and
where the result runs. The compiler itself is tried in tests/e2e/test_qnn_wheel.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import (
    DeviceError,
    EdgeSpecError,
    ExportError,
    MissingDependencyError,
    UsageError,
)
from edge_spec.exporters import qnn as export
from edge_spec.exporters.onnx import StaticOnnxExporter
from edge_spec.exporters.qnn import HtpGraphs, QnnExporter
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime, static
from fixtures.silence import quiet

WIDE = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}
ASKED = ExportOptions("int4", compute="sm8650", context_length=64, check=False)
# Processes that stand for the compiler's: what they leave behind is what it could.
COMPILERS = """
import json, os, sys

import onnx

def copies(request, left=None):
    asked = json.loads(request)
    for function, path in asked["graphs"].items():
        onnx.save(onnx.load(path), asked["out"] + f"/{function}.onnx")  # with its weights
    with open(asked["out"] + "/prefill_64_qnn.bin", "wb") as file:
        file.write(b"binary")
    outside = {name: left or {"Gather": 1} for name in asked["graphs"]}
    return {"versions": {"onnxruntime-qnn": "2.7.0"}, "outside": outside}

def leaves_matrices(request):
    return copies(request, {"Gather": 1, "MatMulNBits": 2})

def crashes(request):
    print("while it compiled rows_4", file=sys.stderr, flush=True)
    os.abort()

def hangs(request):
    import time
    time.sleep(1000)

def writes_nothing(request):
    found = copies(request)
    os.remove(json.loads(request)["out"] + "/prefill_64_qnn.bin")
    return found
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "stubs"
    folder.mkdir()
    (folder / "htp_compilers.py").write_text(COMPILERS)
    monkeypatch.setenv("PYTHONPATH", str(folder))  # of the other process
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(export, "require_compiler", lambda: None)
    return import_module("htp_compilers")


@pytest.fixture(scope="module")
def wide(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return runtimes.open_checkpoint(tiny.write_gguf(tiny.build("llama-tied", **WIDE), path, "Q8_0"))


@pytest.fixture
def compiled(
    wide: Any, stubs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Bundle]:
    """Exports with one of COMPILERS in the compiler's place."""

    def made(work: str = "copies", timeout_s: float = 60.0) -> Bundle:
        compile_graphs = partial(
            export.compile_graphs, work=getattr(stubs, work), timeout_s=timeout_s
        )
        monkeypatch.setattr(export, "compile_graphs", compile_graphs)
        QnnExporter().export(wide, tmp_path / "out", ASKED, quiet)
        return open_bundle(tmp_path / "out")

    return made


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp16"])
def test_the_compilers_form_scores_as_the_static_graph_does(
    quantization: str, wide: Any, tmp_path: Path
) -> None:
    """Without DequantizeLinear, which the compiler would leave to the CPU."""
    import onnxruntime

    options = ExportOptions(quantization, context_length=64, check=False)
    StaticOnnxExporter().export(wide, tmp_path / "static", options, quiet)
    HtpGraphs().export(wide, tmp_path / "formed", options, quiet)
    source, formed = (tmp_path / each / "rows_4.onnx" for each in ("static", "formed"))
    random = np.random.default_rng(0)
    scores = []
    for path in (source, formed):
        settings = onnxruntime.SessionOptions()
        # Else it multiplies by int8 activations in one form and not in the other.
        settings.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
        session = onnxruntime.InferenceSession(path, settings)
        random = np.random.default_rng(0)
        given = {}
        for each in session.get_inputs():
            values = random.standard_normal(each.shape)
            kind = {"int32": np.int32, "float16": np.float16}.get(each.type[7:-1], np.float32)
            given[each.name] = np.abs(values * 9 if kind is np.int32 else values).astype(kind)
        scores.append(session.run(["logits"], given)[0])
    # Sums in another order, of values about 1.
    assert np.abs(scores[0] - scores[1]).max() < 1e-3 * scores[0].std()
    operators = {node.op_type for node in import_module("onnx").load(formed).graph.node}
    assert "DequantizeLinear" not in operators
    assert "SimplifiedLayerNormalization" in operators and "Pow" not in operators
    assert ("MatMulNBits" in operators) == (quantization != "fp16")


def test_the_manifest_binds_the_binary_to_its_processor(compiled: Callable[..., Bundle]) -> None:
    bundle = compiled()
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["format"] == "qnn"
    bound = manifest["compiled"]
    assert (bound["soc"], bound["htp_arch"]) == ("SM8650", 75)
    assert bound["versions"] == {"onnxruntime-qnn": "2.7.0"}
    assert bound["outside"]["rows_8"] == {"Gather": 1}
    assert "prefill_64_qnn.bin" in manifest["files"] and "tokenizer.json" in manifest["files"]
    found = {path.name for path in bundle.path.iterdir()}
    assert found == {*manifest["files"], "manifest.json"}  # no trace of what it was compiled from
    load = partial(import_module("onnx").load, load_external_data=False)
    graphs = [load(bundle.path / f"rows_{rows}.onnx").graph for rows in (4, 8)]
    places = [
        {each.name: [item.value for item in each.external_data] for each in graph.initializer}
        for graph in graphs
    ]
    stored = {name for name in places[0].keys() & places[1].keys() if places[0][name]}
    assert stored and all(places[0][name] == places[1][name] for name in stored)  # once


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        ("crashes", r"failed for SM8650: the library ended .*while it compiled rows_4"),
        ("leaves_matrices", r"leaves 2 MatMulNBits of prefill_64 to the CPU"),
        ("writes_nothing", "ended without a binary"),
    ],
)
def test_a_compiler_that_fails_is_one_line_and_nothing_is_written(
    work: str, reason: str, compiled: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=reason) as caught:
        compiled(work)
    assert "\n" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"stubs"}


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"compute": None}, UsageError, r"none is named\. Add --soc with one of SM8550"),
        ({"compute": "SM1"}, UsageError, r"unknown processor 'SM1'\. Choose one of SM8550"),
        ({"quantization": "Q4_0"}, UsageError, "unknown quantization 'Q4_0'"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    options: dict[str, Any],
    kind: type[EdgeSpecError],
    reason: str,
    wide: Any,
    stubs: Any,
    tmp_path: Path,
) -> None:
    given = {"quantization": "int4", "compute": "SM8650", "check": False, **options}
    with pytest.raises(kind, match=reason):
        QnnExporter().export(wide, tmp_path / "out", ExportOptions(**given), quiet)
    assert not (tmp_path / "out").exists()


def test_without_a_compiler_it_says_what_to_install(
    wide: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.sys, "platform", "linux")
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r'pip install -e "\.\[qnn\]"'):
        QnnExporter().export(wide, tmp_path / "out", ASKED, quiet)
    monkeypatch.setattr(export.sys, "platform", "darwin")
    with pytest.raises(MissingDependencyError, match="Export on Linux or Windows"):
        QnnExporter().export(wide, tmp_path / "out", ASKED, quiet)
    assert not (tmp_path / "out").exists()


def test_elsewhere_it_is_refused_in_one_line(
    compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = compiled()
    runtime = OrtRuntime()
    with pytest.raises(UsageError, match=r"SM8650 \(HTP v75\) and does not run on cpu"):
        runtime.open(bundle, RuntimeOptions(providers=("cpu",)))
    monkeypatch.setattr(static, "find_devices", lambda onnxruntime: {"cpu": None})
    with pytest.raises(
        DeviceError, match=r"SM8650 .*this machine has no NPU .*--compile"
    ) as caught:
        runtime.open(bundle, RuntimeOptions())
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(static, "find_devices", lambda onnxruntime: {"qnn": None})
    monkeypatch.setattr(static, "_soc", lambda: "SM8550")
    with pytest.raises(DeviceError, match=r"compiled for SM8650 .*, this machine has SM8550"):
        runtime.open(bundle, RuntimeOptions())
    assert runtime.memory(bundle, RuntimeOptions()).weights == bundle.num_bytes
