"""Every installed runtime keeps the promises of a session, at the sizes of the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.core import entry_points
from edge_spec.core.export import ExportOptions
from edge_spec.errors import DeviceError, MissingDependencyError
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.testing import check_session

CONTEXT = 48  # tokens: long enough for the suite, short enough to fill, as its last check does

# Logits of this model are of the size of 10. With float32 throughout, only the order of sums
# differs: 1e-4 was seen. Keys and values in half precision (llama.cpp's flash attention rounds
# them) make 1e-2 of that, where a sum falls on the other side of a rounding.
# Core ML computes in half precision throughout, logits too: of 32 and more in steps of 0.03.
CASES = {
    "coreai": ({"quantization": "fp32"}, 1e-3),  # on Linux: no Mac was at hand
    "coreml": ({"quantization": "fp16"}, 0.5),  # not tried: no Mac was at hand
    "reference": ({}, 1e-3),
    "ort": ({"quantization": "fp32"}, 1e-3),
    "llamacpp": ({"kv_type": "f32", "flash_attention": False}, 1e-3),
    "llamacpp-flash": ({}, 5e-2),
    # Its passes of 1, 4, 8 and 64 rows are compiled apart, and sum in another order.
    "openvino": ({}, 5e-3),
}

# In which format and with which weights those get the first of the 30 layers.
SHORT = {
    "coreai": ("coreai", "fp32"),
    "ort": ("onnx", "fp32"),
    "openvino": ("onnx-static", "int4"),
    "reference": ("gguf", "F32"),
    "llamacpp": ("gguf", "F32"),
    "llamacpp-flash": ("gguf", "F32"),
}
NUM_LAYERS = 2

# By default `ort` alone; tiny models of all others pass the suite in tests/integration.
OTHERS = sorted((CASES.keys() | set(entry_points.names("runtimes"))) - {"ort"})


@pytest.mark.model
@pytest.mark.parametrize(
    "case", ["ort", *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_a_runtime_passes_the_conformance_suite(case, demo_gguf, tmp_path):
    choices, tolerance = CASES.get(case, ({}, 1e-3))
    options = LoadOptions(runtime=case.partition("-")[0], context_length=CONTEXT, **choices)
    try:
        model = "smollm2"
        if case in SHORT:
            model = first_layers(demo_gguf, tmp_path / "model", *SHORT[case])
        engine = load_engine(model, options, lambda what, fraction: None)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    except DeviceError as error:
        refusals = {"coreml": "runs on macOS", "coreai": "Core AI runs no programs here"}
        if case not in refusals or refusals[case] not in str(error):
            raise
        pytest.skip(str(error))
    with engine:
        report = check_session(engine.parts.model, tolerance)
    assert report.max_difference > 0 or report.batch_invariance.tie_margin == 0


def first_layers(demo_gguf: Path, out: Path, form: str, quantization: str) -> str:
    """The suite takes hundreds of passes, and each layer after the second computes what that one
    does: cells of another layer, or another head's, show with two."""
    fixed = {"context_length": CONTEXT} if form in ("coreai", "coreml", "onnx-static") else {}
    options = ExportOptions(quantization, num_layers=NUM_LAYERS, check=False, **fixed)
    exporter = runtimes.load_exporter(form)
    path = out.with_suffix(".gguf") if form == "gguf" else out
    exporter.export(runtimes.open_checkpoint(demo_gguf), path, options, lambda what, fraction: None)
    return str(path)
