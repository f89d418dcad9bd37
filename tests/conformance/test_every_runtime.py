"""Every installed runtime keeps the promises of a session, on the demo model."""

from __future__ import annotations

import pytest

from edge_spec import plugins
from edge_spec.errors import MissingDependencyError
from edge_spec.load_options import LoadOptions
from edge_spec.loading import load_engine
from edge_spec.testing import check_session

# Logits of this model are of the size of 10. With float32 throughout, only the order of sums
# differs: 1e-4 was seen. Keys and values in half precision (llama.cpp's flash attention rounds
# them, ik has no other) make 1e-2 of that, where a sum falls on the other side of a rounding.
CASES = {
    "reference": ({}, 1e-3),
    "ort": ({"quantization": "fp32"}, 1e-3),
    "llamacpp": ({"quantization": "F32", "kv_type": "f32", "flash_attention": False}, 1e-3),
    "llamacpp-flash": ({"quantization": "F32"}, 5e-2),
    "ik": ({"quantization": "F32"}, 5e-2),
}


@pytest.mark.model
@pytest.mark.parametrize("case", sorted(CASES.keys() | set(plugins.names("runtimes"))))
def test_a_runtime_passes_the_conformance_suite(case, demo_gguf):
    choices, tolerance = CASES.get(case, ({}, 1e-3))
    # Long enough for the suite, short enough to fill: the last check runs into its end.
    options = LoadOptions(runtime=case.partition("-")[0], context_length=48, **choices)
    try:
        engine = load_engine("smollm2", options, lambda what, fraction: None)
    except MissingDependencyError as missing:
        pytest.skip(str(missing))
    with engine:
        report = check_session(engine.parts.model, tolerance)
    assert report.max_difference > 0 or report.numerics.tie_margin == 0
