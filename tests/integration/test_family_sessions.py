"""Families whose caches or layers are of several kinds: what their sessions keep, and who does not
run or write them.

That they score right is shown with all families (test_families.py).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, Restorable, RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort import OrtRuntime, opening
from fixtures import families

Family = Callable[[str], StoredCheckpoint]
Bundles = Callable[..., Bundle]
TEXT = families.texts()[0].tolist()
# The parts of a session's state, and the features that other devices and writers refuse by name.
PARTS = {
    "lfm2": ["kv", "gated"],
    "gemma4": ["kv", "kv.1"],
    "gemma4-dense": ["kv", "kv.1"],
}
FEATURES = {
    "lfm2": "short convolutions",
    "gemma4": "layers with the keys and values of others",
    "gemma4-dense": "several sizes",
    "gemma4-experts": "layers with the keys and values of others",
}
UNWRITTEN = {  # by exporters but onnx
    "lfm2": ("layer kinds",),
    "gemma4": ("value norm, layer scale, kv sources", "layer embeddings"),
}


@pytest.fixture
def opened(family: Family, family_bundle: Bundles) -> Callable[[str, str], Model]:
    def model(name: str, runtime: str) -> Model:
        source = family(name) if runtime == "reference" else family_bundle(name)
        made: Model = runtimes.load_runtime(runtime).open(source, RuntimeOptions())
        return made

    return model


@pytest.mark.parametrize("runtime", ["reference", "ort"])
@pytest.mark.parametrize("name", PARTS)
def test_a_state_has_all_parts_and_goes_on_elsewhere(
    name: str, runtime: str, opened: Callable[[str, str], Model]
) -> None:
    model = opened(name, runtime)
    first, second = model.open_session(), model.open_session()
    assert isinstance(first, Restorable) and isinstance(second, Restorable)
    first.prefill(TEXT[:9])
    state = first.state()
    assert list(state) == PARTS[name]
    own, other = (state[part] for part in PARTS[name])
    second.prefill(TEXT[3:20])
    second.restore(state, 9)
    tree = TokenTree.chain(TEXT[9], TEXT[10:14])
    expected = first.forward(tree).logits.copy()
    np.testing.assert_array_equal(second.forward(tree).logits, expected)
    wrong: list[dict[str, Any]] = [
        {PARTS[name][0]: own},
        {PARTS[name][0]: own, PARTS[name][1]: other[..., :8, :]},
        {PARTS[name][0]: own, PARTS[name][1]: other.astype(np.float64)},
        {PARTS[name][0]: other, PARTS[name][1]: own},
    ]
    for each in wrong:
        with pytest.raises(ValueError, match=r"kv|gated"):
            second.restore(each, 9)
        np.testing.assert_array_equal(second.forward(tree).logits, expected)
    model.close()


@pytest.mark.parametrize("name", FEATURES)
def test_a_cache_that_grows_with_its_text_scores_as_a_whole_one(
    name: str, opened: Callable[[str, str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers find keys and values of others, and convolutions their zeros, where they moved to."""
    model = opened(name, "ort")
    whole = model.open_session()
    whole.prefill(TEXT[:20])
    monkeypatch.setattr("edge_spec.runtimes.kv_cache.GROWTH_TOKENS", 4)
    session = model.open_session()
    for token in TEXT[:20]:
        session.forward(TokenTree.chain(token))
        session.commit([0])
    tree = TokenTree(np.array(TEXT[20:24]), np.array([-1, 0, 0, 1]), np.ones(4))
    found, expected = session.forward(tree).logits, whole.forward(tree).logits
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", FEATURES)
def test_other_devices_than_the_cpu_are_refused(
    name: str, family_bundle: Bundles, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(name="cuda0", provider="CUDAExecutionProvider", kind="gpu")
    monkeypatch.setattr(opening, "choose_device", lambda providers: device)
    with pytest.raises(UsageError, match=f"{FEATURES[name]}, which ort computes on the CPU"):
        OrtRuntime().open(family_bundle(name), RuntimeOptions(providers=("cuda0",)))


@pytest.mark.parametrize("format", ["gguf", "coreai", "coreml", "onnx-static"])
@pytest.mark.parametrize("name", UNWRITTEN)
def test_other_writers_name_what_they_do_not_write(
    name: str, format: str, family: Family, tmp_path: Any
) -> None:
    exporter: Any = runtimes.load_exporter(format)
    with pytest.raises(UnsupportedModelError) as refused:
        exporter.export(family(name), tmp_path / "out", ExportOptions(), lambda *_: None)
    assert all(feature in str(refused.value) for feature in UNWRITTEN[name])
    assert "\n" not in str(refused.value) and not (tmp_path / "out").exists()
