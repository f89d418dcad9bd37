"""Models whose layers are short convolutions in part: what they keep, and where they do not run.

That they score right is shown with the other families (test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, Restorable, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime
from fixtures import families

RUNTIMES = ("reference", "ort")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> StoredCheckpoint:
    return open_checkpoint(families.write_hf("lfm2", tmp_path_factory.mktemp("hf") / "lfm2"))


@pytest.fixture(scope="module")
def bundle(checkpoint: StoredCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    out = tmp_path_factory.mktemp("bundle") / "lfm2"
    how = ExportOptions(quantization="int8", check=False)
    OnnxExporter().export(checkpoint, out, how, lambda what, done: None)
    return open_bundle(out)


@pytest.fixture(scope="module")
def opened(checkpoint: StoredCheckpoint, bundle: Bundle) -> Callable[[str], Model]:
    sources = {"reference": checkpoint, "ort": bundle}

    def model(runtime: str) -> Model:
        made: Model = runtimes.load_runtime(runtime).open(sources[runtime], RuntimeOptions())
        return made

    return model


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_state_has_what_convolutions_take_in(
    runtime: str, opened: Callable[[str], Model]
) -> None:
    """Without it, the first rows after it would take in zeros."""
    text = families.texts()[0].tolist()
    model = opened(runtime)
    first, second = model.open_session(), model.open_session()
    assert isinstance(first, Restorable) and isinstance(second, Restorable)
    first.prefill(text[:9])
    state = first.state()
    assert state.keys() == {"kv", "gated"}
    assert (len(state["kv"]), len(state["gated"])) == (2, 4)  # layers of each kind
    second.prefill(text[3:20])
    second.restore(state, 9)
    tree = TokenTree.chain(text[9], text[10:14])
    np.testing.assert_array_equal(second.forward(tree).logits, first.forward(tree).logits)
    second.rollback(0)
    second.restore({**state, "gated": np.zeros_like(state["gated"])}, 9)
    without = second.forward(tree).logits[:2]
    assert np.abs(without - first.forward(tree).logits[:2]).max() > 1e-3


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("change", ["missing", "shorter", "of another type"])
def test_a_state_that_is_none_of_it_changes_nothing(
    change: str, runtime: str, opened: Callable[[str], Model]
) -> None:
    text = families.texts()[0].tolist()
    session = opened(runtime).open_session()
    assert isinstance(session, Restorable)
    session.prefill(text[:9])
    state = session.state()
    wrong: dict[str, dict[str, Any]] = {
        "missing": {"kv": state["kv"]},
        "shorter": {**state, "gated": state["gated"][..., :8, :]},
        "of another type": {**state, "gated": state["gated"].astype(np.float64)},
    }
    tree = TokenTree.chain(text[9], text[10:14])
    expected = session.forward(tree).logits.copy()
    with pytest.raises(ValueError, match="gated"):
        session.restore(wrong[change], 9)
    np.testing.assert_array_equal(session.forward(tree).logits, expected)


def test_rows_of_a_graph_that_grows_take_in_what_stands_before_them(
    opened: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot of zeros moves with the end of the cache."""
    text = families.texts()[0].tolist()
    model = opened("ort")
    whole = model.open_session()
    whole.prefill(text[:20])
    monkeypatch.setattr("edge_spec.runtimes.ort.cache.GROWTH_TOKENS", 4)
    session = model.open_session()
    for token in text[:20]:
        session.forward(TokenTree.chain(token))
        session.commit([0])
    tree = TokenTree(np.array(text[20:24]), np.array([-1, 0, 0, 1]), np.ones(4))
    found, expected = session.forward(tree).logits, whole.forward(tree).logits
    np.testing.assert_allclose(found, expected, atol=0.05)  # int8: a step reads as a prompt does


def test_other_devices_than_the_cpu_are_refused(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="cuda0", provider="CUDAExecutionProvider")
    monkeypatch.setattr(OrtRuntime, "_devices", lambda self, providers: [device])
    with pytest.raises(UsageError, match="short convolutions, which ort computes on the CPU"):
        OrtRuntime().open(bundle, RuntimeOptions(providers=("cuda0",)))


def test_openvino_is_not_given_them(bundle: Bundle) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(UnsupportedModelError, match="short convolutions"):
        runtimes.load_runtime("openvino").open(bundle, RuntimeOptions())


@pytest.mark.parametrize("format", ["gguf", "coreml", "onnx-static"])
def test_other_writers_name_what_they_do_not_write(
    format: str, checkpoint: StoredCheckpoint, tmp_path: Path
) -> None:
    exporter: Any = runtimes.load_exporter(format)
    with pytest.raises(UnsupportedModelError, match="layer kinds"):
        exporter.export(checkpoint, tmp_path / "out", ExportOptions(), lambda what, done: None)
    assert not (tmp_path / "out").exists()
