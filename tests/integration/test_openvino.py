"""OpenVINO's sessions do what the reference session does; its library is loaded silently."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import MissingDependencyError, UsageError
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.openvino import OpenVinoRuntime
from edge_spec.runtimes.openvino import library as own_library
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import families, tolerance

pytest.importorskip("openvino", reason="no wheel of openvino here")

CONTEXT = 128
STACKED = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def exported(directory: Path, quantization: str = "fp32") -> Bundle:
    source = open_checkpoint(directory / "model")
    options = ExportOptions(quantization, check=False)
    OnnxExporter().export(source, directory / "out", options, lambda what, part: None)
    return open_bundle(directory / "out")


@pytest.fixture(scope="module", params=[{}, STACKED], ids=["grouped", "stacked"])
def bundle(
    request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    directory = tmp_path_factory.mktemp("openvino")
    tiny.write_hf(
        tiny.build("llama-llama3", max_position_embeddings=CONTEXT, **request.param),
        directory / "model",
    )
    return exported(directory)


def require_like_reference(bundle: Bundle, text: np.ndarray) -> None:
    """A prefill, a tree of which a branch is kept, and a chain after it. text: 14 tokens."""
    reference = ReferenceModel(open_checkpoint(bundle.path.with_name("model")))
    model = OpenVinoRuntime().open(bundle, RuntimeOptions(threads=1))
    parents = np.array([-1, 0, 0, 2], np.int32)
    tree = TokenTree(text[6:10].astype(np.int32), parents, np.ones(4, np.float32))
    found, expected = model.open_session(), reference.open_session()
    for session in (found, expected):
        session.prefill(text[:6].tolist())
    for scored in (tree, TokenTree.chain(int(text[10]), text[11:14].tolist())):
        one, other = found.forward(scored), expected.forward(scored)
        for left, right in ((one.logits, other.logits), (one.hidden, other.hidden)):
            tolerance.require_float32(left, right, reference.config, found.length + len(scored))
        for session in (found, expected):
            session.commit([0, 2, 3])
        assert found.state()["kv"].shape[-2] == found.length
    model.close()


@pytest.mark.parametrize("family", ["gemma3", "gemma2"])
def test_windows_norms_and_caps(family: str, tmp_path: Path) -> None:
    families.write_hf(family, tmp_path / "model")
    require_like_reference(exported(tmp_path), np.arange(1, 15))


def test_integer_weights_score_like_their_float_activations(
    tiny: ModuleType, tmp_path: Path
) -> None:
    """int4 with zero points and an int8 embedding: where a zero point or a scale is taken wrong,
    scores have nothing to do with onnxruntime's."""
    from edge_spec.runtimes.ort.graph_forms import REFERENCE
    from edge_spec.runtimes.ort.model import OrtModel

    tiny.write_hf(tiny.build("llama-llama3"), tmp_path / "model")
    bundle = exported(tmp_path, "int4")
    scores = []
    for model in (
        OpenVinoRuntime().open(bundle, RuntimeOptions(threads=1)),
        OrtModel(bundle, RuntimeOptions(threads=1), REFERENCE),
    ):
        session = model.open_session()
        session.prefill([5, 6, 7])
        scores.append(session.forward(TokenTree.chain(1, [2, 3])).logits.copy())
        session.close()
        model.close()
    deviation = float(np.std(scores[1]))
    # Both compute in float32, in another order: 1e-5 of the deviation was seen.
    assert float(np.abs(scores[0] - scores[1]).max()) < 1e-3 * deviation


def test_a_device_that_is_not_here(bundle: Bundle) -> None:
    with pytest.raises(UsageError, match="openvino has no device 'gpu:7' here"):
        OpenVinoRuntime().open(bundle, RuntimeOptions(providers=("gpu:7",)))


def test_nothing_is_reported() -> None:
    """Importing openvino loads openvino_telemetry and sends an event, where it is not kept away."""
    code = (
        "import json, sys\n"
        "from edge_spec.runtimes.openvino.library import import_openvino\n"
        "import_openvino()\n"
        "print(json.dumps([n for n, m in sys.modules.items()"
        " if n.startswith('openvino_telemetry') and m]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert json.loads(done.stdout) == []


def test_without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingDependencyError, match=r'pip install "edge-spec\[openvino\]"'):
        own_library.import_openvino()
