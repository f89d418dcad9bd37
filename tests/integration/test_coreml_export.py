"""Core ML packages: the graph is the reference's, and what cannot be written is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.coreml import CoreMlExporter, graph
from edge_spec.exporters.coreml.graph import AnePass, GpuPass, build_program
from edge_spec.exporters.coreml.weights import CoreMlWeights, dense
from edge_spec.exporters.requests import StaticShape
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.coreml.native import package_of, read_specification
from edge_spec.runtimes.reference import ReferenceModel
from edge_spec.runtimes.static.session import StaticSession, read_layout
from fixtures import axes, tolerance
from fixtures.coreml_in_numpy import NumpyProgram, signatures_of_program
from fixtures.mil_in_numpy import read_function
from fixtures.silence import quiet

CONTEXT = 64
LAYOUTS = {"gpu": GpuPass, "ane": AnePass}
# Rows of whole blocks.
WIDE = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}

Open = Callable[..., Any]


def export(checkpoint: Any, out: Path, **options: Any) -> Bundle:
    CoreMlExporter().export(checkpoint, out, ExportOptions(**options), quiet)
    return open_bundle(out)


def float32_session(checkpoint: Any, unit: str, hidden: bool = False) -> StaticSession:
    weights = CoreMlWeights(checkpoint, dense(np.float32), dense(np.float32), np.float32)
    config = replace(checkpoint.config, context_length=CONTEXT)
    shape = StaticShape.of(CONTEXT)
    program = build_program(weights, LAYOUTS[unit], config, shape, hidden, lambda done: None)
    signatures = signatures_of_program(program)
    layout = read_layout(signatures, config, "the graph")
    return StaticSession(NumpyProgram(signatures, program.functions.__getitem__), layout, CONTEXT)


@pytest.mark.parametrize(
    ("variant", "unit"),
    axes.each(["llama", "llama-tied", "llama-bias", "llama-llama3", "qwen3"], list(LAYOUTS)),
)
def test_the_graph_scores_as_the_reference_does(
    variant: str,
    unit: str,
    checkpoint: Open,
    random_tree: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In float32: prefill, a plain step, a tree, and a chain after a branch was committed."""
    monkeypatch.setattr(graph, "ANE_MAX_SIZE", 100)  # the head in three parts
    source = checkpoint(variant)
    sessions = (float32_session(source, unit, True), ReferenceModel(source).open_session())
    tree = random_tree(7, seed=3)
    passes = (TokenTree.chain(7), tree, TokenTree.chain(1, [2, 3]))
    for session in sessions:
        session.prefill([5, 9, 100, 33, 261])
    for each in passes:
        (found, expected) = (session.forward(each) for session in sessions)
        assert found.logits.shape == expected.logits.shape
        positions = sessions[0].length + len(each)
        for one, other in ((found.logits, expected.logits), (found.hidden, expected.hidden)):
            tolerance.require_float32(one, other, source.config, positions)
        for session in sessions:
            session.commit(each.path(len(each) - 1))


@pytest.mark.parametrize(("kind", "name"), [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_blocks_of_a_gguf_file_are_carried_bit_for_bit(
    kind: str, name: str, tiny: ModuleType, tmp_path: Path
) -> None:
    path = tiny.write_gguf(tiny.build("llama", **WIDE), tmp_path / "model.gguf", kind)
    source = runtimes.open_checkpoint(path)
    bundle = export(source, tmp_path / "out", quantization=name, check=False)
    function = read_function(package_of(bundle), read_specification(package_of(bundle)), "rows_1")
    found = {
        operation.name: operation
        for operation in function.operations
        if operation.op_type == "constexpr_blockwise_shift_scale"
    }
    tensor = "model.layers.1.mlp.down_proj.weight"
    stored = found["model_layers_1_mlp_down_proj_weight_0"]
    levels, scales = stored.data.val.astype(np.float32), stored.scale.val.astype(np.float32)
    rows, columns = levels.shape
    blocks = levels.reshape(rows, columns // 32, 32) * scales[..., None]
    assert source.tensors[tensor].kind.name == kind
    assert np.array_equal(blocks.reshape(rows, columns), source.float32(tensor))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"compute": "npu"}, UsageError, "unknown compute unit 'npu'"),
        ({"quantization": "lut4"}, UsageError, "unknown quantization 'lut4' for the gpu"),
        ({"quantization": "int4", "compute": "ane"}, UsageError, "'int4' for the ane"),
        ({"context_length": 0}, UsageError, "context of 0 tokens"),
        ({"context_length": 129}, UsageError, "Choose 1 to 128"),
        ({"num_layers": 3}, UsageError, "2 layers"),
        ({"compute": "ane"}, UnsupportedModelError, "head size that is a multiple of 32"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    checkpoint: Open,
    tmp_path: Path,
) -> None:
    with pytest.raises(error, match=message) as caught:
        export(checkpoint("llama"), tmp_path / "out", **options)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML runs here")
def test_a_package_is_compared_only_where_core_ml_runs(checkpoint: Open, tmp_path: Path) -> None:
    options = ExportOptions("fp16", context_length=CONTEXT)
    report = CoreMlExporter().export(checkpoint("llama"), tmp_path / "out", options, quiet)
    assert report.parity == open_bundle(tmp_path / "out").manifest.parity == {}
    assert len(report.notes) == 1 and "macOS 15" in report.notes[0]


def test_weights_beyond_float16_are_refused(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.build("llama")
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = 70000.0
    source = runtimes.open_checkpoint(tiny.write_hf(model, tmp_path / "model"))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight has values beyond float16"):
        export(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_with_something_else_is_left_alone(
    packaged: Callable[..., Bundle], checkpoint: Open, tmp_path: Path
) -> None:
    source, out = checkpoint("llama"), tmp_path / "out"
    shutil.copytree(packaged("llama").path, out)
    # A bundle may be replaced.
    replaced = export(source, out, quantization="fp16", context_length=CONTEXT, check=False)
    assert replaced.config.context_length == CONTEXT != packaged("llama").config.context_length
    (out / "model.mlpackage" / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists and is not a bundle"):
        export(source, out)
    assert (out / "model.mlpackage" / "mine.txt").read_text() == "mine"
