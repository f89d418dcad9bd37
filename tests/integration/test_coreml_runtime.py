"""How Core ML bundles are opened and refused, and Core ML itself with only its own calls faked."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("coremltools")

from edge_spec import plugins
from edge_spec.bundle import MANIFEST, Bundle, open_bundle, write_manifest
from edge_spec.cli.main import run
from edge_spec.errors import BundleError, DeviceError, EdgeSpecError, SessionError, UsageError
from edge_spec.load_options import LoadOptions
from edge_spec.model import RuntimeOptions
from edge_spec.placement.devices import devices_of
from edge_spec.placement.operations import placements_of
from edge_spec.preparation import compute_for, is_prepared
from edge_spec.runtimes.coreml import CoreMlRuntime, MilRuntime
from edge_spec.runtimes.coreml import library as library_module
from edge_spec.runtimes.coreml import native as native_module
from edge_spec.runtimes.coreml.layout import (
    Signature,
    read_layout,
    signatures_of_program,
    signatures_of_spec,
)
from edge_spec.runtimes.coreml.library import import_coremltools, require_core_ml
from edge_spec.runtimes.coreml.package import package_of, read_function, read_specification
from edge_spec.runtimes.coreml.program import NumpyProgram
from edge_spec.sources import Source
from edge_spec.testing import check_session
from edge_spec.tree import TokenTree

OWN_TOLERANCE = 0.05  # as in test_coreml_session.py


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
    monkeypatch.setattr(library_module, "this_system", lambda: (system, macos))
    refused(DeviceError, require_core_ml, f"{text}.*--runtime mil")


@pytest.mark.parametrize("macos", ["15.0", "26.1"])
def test_newer_systems_are_not_refused(macos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "this_system", lambda: ("darwin", macos))
    require_core_ml()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the tests themselves run on a Mac."""
    monkeypatch.setattr(library_module, "this_system", lambda: ("linux", ""))


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


@pytest.mark.usefixtures("elsewhere")
def test_the_list_of_devices_says_why_core_ml_has_none() -> None:
    (device,) = devices_of("coreml")
    assert device["name"] is None and "macOS 15" in device["fault"]
    (device,) = devices_of("mil")
    assert (device["name"], device["kind"], device["fault"]) == ("cpu", "cpu", None)


@pytest.mark.usefixtures("elsewhere")
def test_where_operations_run_is_told_on_macos_only(
    packaged: Callable[..., Bundle], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["devices", "--model", str(packaged().path)]) == 1
    assert "macOS 15" in capsys.readouterr().err


def test_no_runtime_tells_where_operations_of_other_bundles_run(
    exported: Callable[..., Bundle], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["devices", "--model", str(exported("llama").path)]) == 2
    assert "bundle of format onnx" in capsys.readouterr().err
    assert run(["devices", "--model", "x", "--rpc", "a:1"]) == 2


@pytest.mark.parametrize(
    ("runtime", "options", "text"),
    [
        ("mil", {"providers": ("ane",)}, "mil has no device ane"),
        ("mil", {"gpu_layers": 1}, "mil has no option gpu-layers"),
        ("mil", {"context_length": 101}, "holds 100 tokens, not 101.*--context 101"),
        ("coreml", {"kv_type": "f16"}, "coreml has no option kv-type"),
        ("coreml", {"providers": ("cuda",)}, "coreml has no device cuda.*cpu, gpu, ane, all"),
        ("coreml", {"providers": ("gpu", "ane")}, "coreml has no device gpu, ane"),
        ("coreml", {"context_length": 101}, "holds 100 tokens, not 101"),
    ],
)
@pytest.mark.usefixtures("native")
def test_options_that_mean_nothing_are_refused(
    runtime: str, options: Any, text: str, packaged: Callable[..., Bundle]
) -> None:
    opened = plugins.load_runtime(runtime)
    refused(UsageError, lambda: opened.open(packaged(), RuntimeOptions(**options)), text)


@pytest.mark.usefixtures("elsewhere")
def test_a_bundle_of_another_format_is_refused(exported: Callable[..., Bundle]) -> None:
    call = lambda: MilRuntime().open(exported("llama"), RuntimeOptions())  # noqa: E731
    refused(UsageError, call, "is a bundle of format onnx, not coreml")


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
WEIGHTS = "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (MODEL, lambda content: content[: len(content) // 2]),
        (MODEL, lambda content: b""),
        (MODEL, lambda content: None),
        (MODEL, lambda content: b"\xff" * 100),
        (WEIGHTS, lambda content: content[:100]),
        (WEIGHTS, lambda content: None),
        ("model.mlpackage/Manifest.json", lambda content: b"{}"),
        ("model.mlpackage/Manifest.json", lambda content: None),
    ],
)
def test_a_damaged_package_is_named(
    file: str, change: Callable[[bytes], bytes | None], damaged: Callable[..., Bundle]
) -> None:
    bundle = damaged(file, change)

    def use() -> None:
        model = MilRuntime().open(bundle, RuntimeOptions())
        model.open_session().forward(TokenTree.chain(0))

    refused(BundleError, use, str(bundle.path))


def test_a_program_tells_of_its_functions_what_a_package_does(
    packaged: Callable[..., Bundle],
) -> None:
    package = package_of(packaged())
    spec = read_specification(package)
    told = signatures_of_spec(spec)
    functions = {name: read_function(package, spec, name) for name in told}
    assert signatures_of_program(SimpleNamespace(functions=functions)) == told
    assert sorted(told) == ["prefill_64", "rows_1", "rows_4", "rows_8"]


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [({"vocab_size": 9}, "scores 265 tokens, the model has 9"), ({"context_length": 122}, "129")],
)
def test_a_package_that_does_not_fit_its_manifest_is_refused(
    changes: Any, text: str, packaged: Callable[..., Bundle]
) -> None:
    bundle = packaged()
    signatures = signatures_of_spec(read_specification(package_of(bundle)))
    config = replace(bundle.config, **changes)
    refused(BundleError, lambda: read_layout(signatures, config, "it"), text)


class PretendedModel:
    """What coremltools' CompiledMLModel does on a Mac, in numpy; its state is shared by all
    functions, as Core ML's is hoped to be."""

    loaded: list[tuple[str, str]] = []  # noqa: RUF012
    fault = ""

    def __init__(self, path: str, compute_units: Any, function_name: str) -> None:
        if self.fault == "load":
            raise RuntimeError("the framework\nsays no")
        self.loaded.append((function_name, compute_units.name))
        package = Path(path)
        spec = read_specification(package)
        signatures = signatures_of_spec(spec)
        self._function = function_name
        self._program = NumpyProgram(signatures, lambda name: read_function(package, spec, name))

    def make_state(self) -> Any:
        return PretendedState(self._program)

    def predict(self, data: Any, state: Any) -> Any:
        if self.fault == "predict":
            raise RuntimeError("the unit\nis busy")
        data["mask"] = data["mask"].astype(np.float32)  # as coremltools does, in place
        return self._program.predict(self._function, data, state.arrays)


class PretendedState:
    def __init__(self, program: NumpyProgram) -> None:
        self.arrays = program.make_state()

    def read_state(self, name: str) -> np.ndarray:
        return self.arrays[name].astype(np.float16)

    def write_state(self, name: str, value: np.ndarray) -> None:
        assert value.dtype == np.float16
        self.arrays[name][...] = value


class MLGPUComputeDevice:
    """By its name, as coremltools has it."""


class MLNeuralEngineComputeDevice:
    pass


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[PretendedModel]:
    """A Mac with macOS 15, of which only Core ML's own calls are pretended."""
    coremltools = import_coremltools()
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    for module in (library_module, native_module):
        monkeypatch.setattr(module, "this_system", lambda: ("darwin", "15.5"))
    monkeypatch.setattr(coremltools.models, "CompiledMLModel", PretendedModel)
    monkeypatch.setattr(coremltools.models.utils, "compile_model", shutil.copytree)
    monkeypatch.setattr(PretendedModel, "loaded", [])
    monkeypatch.setattr(PretendedModel, "fault", "")
    devices = [MLGPUComputeDevice(), MLNeuralEngineComputeDevice()]
    monkeypatch.setattr(
        coremltools.models.MLModel, "get_available_compute_devices", lambda: devices
    )
    return PretendedModel


@pytest.mark.usefixtures("native")
def test_core_ml_passes_the_conformance_suite_but_for_its_own_calls(
    packaged: Callable[..., Bundle],
) -> None:
    model = CoreMlRuntime().open(packaged(), RuntimeOptions(context_length=48))
    assert check_session(model, OWN_TOLERANCE).max_difference > 0


@pytest.mark.parametrize(
    ("variant", "compute", "device", "units"),
    [
        ("llama", "gpu", (), "CPU_AND_GPU"),
        ("qwen3", "ane", (), "CPU_AND_NE"),
        ("llama", "gpu", ("ANE",), "CPU_AND_NE"),
        ("llama", "gpu", ("cpu",), "CPU_ONLY"),
        ("llama", "gpu", ("all",), "ALL"),
    ],
)
def test_functions_are_loaded_once_when_they_are_used_on_the_units_that_were_asked_for(
    variant: str,
    compute: str,
    device: tuple[str, ...],
    units: str,
    packaged: Callable[..., Bundle],
    native: type[PretendedModel],
) -> None:
    model = CoreMlRuntime().open(packaged(variant, compute), RuntimeOptions(providers=device))
    assert native.loaded == []
    for _ in range(2):
        session = model.open_session()
        session.prefill([1, 2])
        session.forward(TokenTree.chain(3))
    assert sorted(native.loaded) == [("rows_1", units), ("rows_4", units)]


@pytest.mark.usefixtures("native")
def test_a_package_is_compiled_once(packaged: Callable[..., Bundle], tmp_path: Path) -> None:
    for _ in range(2):
        CoreMlRuntime().open(packaged(), RuntimeOptions())
        (compiled,) = (tmp_path / "cache" / "compiled").iterdir()
        (compiled / "model.mlmodelc" / "mark").touch(exist_ok=True)
    assert (compiled / "model.mlmodelc" / "mark").exists()
    assert [path.name for path in compiled.iterdir()] == ["model.mlmodelc"]


def test_what_core_ml_raises_is_one_line_with_a_remedy(
    packaged: Callable[..., Bundle], native: type[PretendedModel]
) -> None:
    model = CoreMlRuntime().open(packaged(), RuntimeOptions())
    native.fault = "load"
    refused(DeviceError, model.open_session, "cannot load prefill_64|cannot load rows_1")
    native.fault = ""
    session = model.open_session()
    session.prefill([1, 2, 3])
    native.fault = "predict"
    refused(SessionError, lambda: session.prefill([4]), "failed to run rows_1: the unit is busy")
    native.fault = ""
    session.prefill([4])
    assert session.length == 4


@pytest.mark.usefixtures("native")
def test_the_devices_of_a_mac_are_listed() -> None:
    found = [(device.name, device.kind) for device in CoreMlRuntime().devices(RuntimeOptions())]
    assert found == [("gpu", "gpu"), ("ane", "npu")]


@pytest.mark.usefixtures("native")
def test_a_conversion_is_laid_out_for_the_device_that_will_run_it(
    hf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = CoreMlRuntime()
    assert compute_for(runtime, ("ane",)) == "ane"
    assert [compute_for(runtime, given) for given in ((), ("gpu",), ("all",))] == [None] * 3
    assert compute_for(MilRuntime(), ("cpu",)) is None
    asked = []
    monkeypatch.setattr(
        Source, "cached", lambda self, format, options: asked.append(options) or Path("none")
    )
    source = Source(str(hf("llama")), lambda what, fraction: None)
    for providers in ((), ("ane",)):
        assert not is_prepared(source, "coreml", LoadOptions(), providers)
    assert [options.compute for options in asked] == [None, "ane"]


@pytest.mark.usefixtures("native")
def test_where_operations_run_is_asked_of_the_compiled_package(
    packaged: Callable[..., Bundle],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from coremltools.models.compute_plan import MLComputePlan

    def fail(path: str, compute_units: Any) -> Any:
        assert path.endswith("model.mlmodelc")
        raise RuntimeError(f"no plan for {compute_units.name}")

    monkeypatch.setattr(MLComputePlan, "load_from_path", fail)
    refused(DeviceError, lambda: placements_of(packaged()), "no plan for CPU_AND_GPU")
