"""How Core ML bundles are opened, and which are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("coremltools")

from edge_spec.cli.main import run
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import BundleError, DeviceError, EdgeSpecError, UsageError
from edge_spec.models import runtimes
from edge_spec.models.bundle import MANIFEST, Bundle, open_bundle, write_manifest
from edge_spec.runtimes.coreml import native as native_module
from edge_spec.runtimes.coreml.native import (
    package_of,
    read_specification,
    require_core_ml,
    signatures_of_spec,
)
from edge_spec.runtimes.static.session import Signature, read_layout
from fixtures.coreml_in_numpy import open_in_numpy


def refused(error: type[EdgeSpecError], call: Callable[[], Any], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        call()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("system", "macos", "text"),
    [
        ("linux", "", "Core ML runs on macOS 15 or newer only"),
        ("win32", "", "Core ML runs on macOS 15 or newer only"),
        ("darwin", "14.7.1", "this is macOS 14.7.1"),
    ],
)
def test_other_systems_are_refused_with_what_works_there(
    system: str, macos: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_module, "this_system", lambda: (system, macos))
    refused(DeviceError, require_core_ml, f"{text}.*--runtime ort")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run on a Mac."""
    monkeypatch.setattr(native_module, "this_system", lambda: ("linux", ""))


@pytest.mark.usefixtures("elsewhere")
def test_nothing_is_converted_where_core_ml_cannot_run_it(
    hf: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    assert run(["generate", str(hf("llama")), "Hello", "--runtime", "coreml"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "macOS 15" in err
    assert not list(tmp_path.rglob("*.mlpackage"))


@pytest.mark.parametrize(
    ("runtime", "options", "text"),
    [
        ("coreml", {"kv_type": "f16"}, "coreml has no option kv-type"),
        ("coreml", {"providers": ("cuda",)}, "coreml has no device 'cuda'.*cpu, gpu, ane, all"),
        (
            "coreml",
            {"providers": ("gpu", "ane")},
            "on one device, not on gpu and ane",
        ),
        ("coreml", {"context_length": 101}, "holds 100 tokens, not 101"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    runtime: str, options: Any, text: str, packaged: Callable[..., Bundle]
) -> None:
    opened = runtimes.load_runtime(runtime)
    refused(UsageError, lambda: opened.open(packaged(), RuntimeOptions(**options)), text)


@pytest.fixture
def damaged(packaged: Callable[..., Bundle], tmp_path: Path) -> Callable[..., Bundle]:
    """damaged(file, change): a bundle whose manifest agrees with what is left of it."""

    def make(file: str, change: Callable[[bytes], bytes | None]) -> Bundle:
        source = packaged()
        shutil.copytree(source.path, tmp_path / "bundle")
        path = tmp_path / "bundle" / file
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)
        (tmp_path / "bundle" / MANIFEST).unlink()
        write_manifest(tmp_path / "bundle", **dict(source.manifest))
        return open_bundle(tmp_path / "bundle")

    return make


MODEL = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (MODEL, lambda content: content[: len(content) // 2]),
        (MODEL, lambda content: b""),
        (MODEL, lambda content: None),
        (MODEL, lambda content: b"\xff" * 100),
        ("model.mlpackage/Manifest.json", lambda content: b"{}"),
        ("model.mlpackage/Manifest.json", lambda content: None),
    ],
)
def test_a_damaged_package_is_named(
    file: str, change: Callable[[bytes], bytes | None], damaged: Callable[..., Bundle]
) -> None:
    bundle = damaged(file, change)

    def use() -> None:
        model = open_in_numpy(bundle)
        model.open_session().forward(TokenTree.chain(0))

    refused(BundleError, use, str(bundle.path))


def changed(
    signatures: dict[str, Signature], part: str, name: str, shape: tuple[int, ...] | None
) -> dict[str, Signature]:
    """With one shape of all functions replaced, or left out."""
    found = {}
    for function, signature in signatures.items():
        parts = {key: dict(getattr(signature, key)) for key in ("inputs", "outputs", "states")}
        if shape is None:
            parts[part].pop(name, None)
        else:
            parts[part][name] = shape
        found[function] = Signature(**parts)
    return found


@pytest.mark.parametrize(
    ("part", "name", "shape", "text"),
    [
        ("inputs", "mask", None, "function rows_1 takes input_ids, position_ids, write_slot"),
        ("inputs", "more", (1,), "function rows_1 takes"),
        ("inputs", "input_ids", (), "index out of range"),
        ("inputs", "input_ids", (2, 4), "inputs of its function rows_1 have the shapes"),
        ("outputs", "logits", None, "no function with an output called logits"),
        ("outputs", "logits", (1, 7), "output logits of its function rows_4 has the shape"),
        ("states", "keys", (2, 2, 64, 16), "masks and states differ in their number of slots"),
        ("states", "keys", (2,), "masks and states differ in their number of slots"),
    ],
)
def test_functions_of_another_form_are_refused(
    part: str, name: str, shape: Any, text: str, packaged: Callable[..., Bundle]
) -> None:
    bundle = packaged()
    signatures = signatures_of_spec(read_specification(package_of(bundle)))
    call = lambda: read_layout(  # noqa: E731
        changed(signatures, part, name, shape), bundle.config, "the package"
    )
    refused(BundleError, call, f"the package is no model of edge-spec: .*{text}")
