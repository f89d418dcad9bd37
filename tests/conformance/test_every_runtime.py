"""Every installed runtime keeps the promises of a session, on the demo model."""

from __future__ import annotations

import pytest

from edge_spec import plugins
from edge_spec.loading import LoadOptions, load_engine
from edge_spec.testing import check_session


@pytest.mark.model
@pytest.mark.parametrize("runtime", plugins.names("runtimes"))
def test_a_runtime_passes_the_conformance_suite(runtime, demo_gguf):
    # Long enough for the suite, short enough to fill: the last check runs into its end.
    options = LoadOptions(runtime=runtime, quantization="fp32", context_length=48)
    with load_engine("smollm2", options, lambda what, fraction: None) as engine:
        # float32 sums in another order; logits of this model are of the size of 10.
        report = check_session(engine.parts.model, tolerance=2e-3)
    assert report.max_difference > 0 or report.numerics.tie_margin == 0
