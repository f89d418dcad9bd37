"""ONNX Runtime's devices: their names, those of packages, and whether they really work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, UsageError
from edge_spec.models.bundle import Bundle, open_bundle
from edge_spec.runtimes.ort import OrtRuntime, devices, listing, model, trial
from edge_spec.runtimes.ort.devices import (
    ProviderChoice,
    add_providers,
    choices,
    choose,
    require_started,
)

onnxruntime: Any = pytest.importorskip("onnxruntime")
Exported = Callable[..., Bundle]
CUDA = ProviderChoice("cuda", "CUDAExecutionProvider", "gpu", "a card", None)


def ep_device(provider: str, kind: str, **metadata: str) -> Any:
    """As onnxruntime describes one."""
    hardware = SimpleNamespace(type=SimpleNamespace(name=kind), vendor="Acme", metadata={})
    return SimpleNamespace(ep_name=provider, ep_metadata=metadata, device=hardware)


class Pretended:
    """onnxruntime on a machine with more devices than this one."""

    def __init__(self, *devices: Any) -> None:
        self._devices = devices

    def get_available_providers(self) -> list[str]:
        found = {device.ep_name: None for device in self._devices}
        return ["CUDAExecutionProvider", "AzureExecutionProvider", *found, "CPUExecutionProvider"]

    def get_ep_devices(self) -> Any:
        return self._devices


@pytest.fixture(autouse=True)
def packages_are_loaded_anew() -> Iterator[None]:
    devices.load_packages.cache_clear()
    yield
    devices.load_packages.cache_clear()


def test_a_provider_with_several_kinds_has_a_name_for_each() -> None:
    path = "library_path"
    pretended = Pretended(
        ep_device("OpenVINOExecutionProvider", "CPU", **{path: "x", "FULL_DEVICE_NAME": "a core"}),
        ep_device("OpenVINOExecutionProvider", "NPU", **{path: "x"}),
        ep_device("OpenVINOExecutionProvider", "NPU", **{path: "x", "FULL_DEVICE_NAME": "second"}),
        ep_device("WebGpuExecutionProvider", "GPU", **{path: "x"}),
    )
    found = choices(pretended)
    assert list(found) == ["cuda", "openvino-cpu", "openvino-npu", "webgpu", "cpu"]
    assert found["openvino-cpu"].description == "a core"
    assert found["openvino-npu"].description == "Acme NPU"  # the first of two
    assert [found[name].kind for name in found] == ["gpu", "cpu", "npu", "gpu", "cpu"]
    chosen = choose(pretended, ["OpenVINO-NPU", "cuda", "CUDAExecutionProvider", "cpu"])
    assert [choice.name for choice in chosen] == ["openvino-npu", "cuda", "cpu"]
    assert [choice.from_package for choice in chosen] == [True, False, False]


def test_no_name_stands_for_the_cpu_and_loads_no_package() -> None:
    assert [choice.name for choice in choose(onnxruntime, [])] == ["cpu"]
    assert devices.load_packages.cache_info().currsize == 0


@pytest.mark.parametrize("name", ["abacus", "azure", "AzureExecutionProvider", "gpu", ""])
def test_a_name_that_is_no_device_lists_those_there_are(name: str) -> None:
    """Azure is a provider that onnxruntime calls available: it would call a service."""
    with pytest.raises(UsageError, match="onnxruntime has no device") as caught:
        choose(onnxruntime, ["cpu", name])
    assert "There are: cpu" in caught.value.remedy


class OnMac:
    """onnxruntime's macOS wheel, which has Core ML's provider built in and no device of it."""

    def get_available_providers(self) -> list[str]:
        return ["CoreMLExecutionProvider", "AzureExecutionProvider", "CPUExecutionProvider"]

    def get_ep_devices(self) -> Any:
        return (ep_device("CPUExecutionProvider", "CPU"),)


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("coreml", "ALL"),
        ("CoreMLExecutionProvider", "ALL"),
        ("coreml-ane", "CPUAndNeuralEngine"),
        ("CoreML-GPU", "CPUAndGPU"),
        ("coreml-cpu", "CPUOnly"),
    ],
)
def test_core_ml_has_a_name_for_each_set_of_units(tmp_path: Path, name: str, units: str) -> None:
    """Option names and values: coreml_provider_factory.h and coreml_options.cc of onnxruntime."""
    chosen = choose(OnMac(), [name, "cpu"])
    options = {"ModelFormat": "MLProgram", "MLComputeUnits": units}
    assert add_providers(None, chosen) == [
        ("CoreMLExecutionProvider", options),
        "CPUExecutionProvider",
    ]
    kept = options | {"ModelCacheDirectory": str(tmp_path / "kept")}
    assert add_providers(None, chosen, tmp_path / "kept") == [
        ("CoreMLExecutionProvider", kept),
        "CPUExecutionProvider",
    ]
    assert (tmp_path / "kept").is_dir()


def test_core_mls_names_tell_their_kinds() -> None:
    found = choices(OnMac())
    assert {name: choice.kind for name, choice in found.items()} == {
        "coreml": None,
        "coreml-ane": "npu",
        "coreml-gpu": "gpu",
        "coreml-cpu": "cpu",
        "cpu": "cpu",
    }


def test_two_sets_of_core_mls_units_are_refused() -> None:
    """onnxruntime would ignore the second."""
    with pytest.raises(UsageError, match="once in a session, not as coreml-ane and coreml-gpu"):
        choose(OnMac(), ["coreml-ane", "coreml-gpu"])


@pytest.mark.skipif(
    "CoreMLExecutionProvider" in onnxruntime.get_available_providers(), reason="Core ML is here"
)
def test_core_ml_where_there_is_none_is_one_line(exported: Exported) -> None:
    """Also where it is listed and does not start: onnxruntime warns and takes the CPU."""
    with pytest.raises(UsageError, match="no device 'coreml-ane'") as caught:
        OrtRuntime().open(exported(), RuntimeOptions(providers=("coreml-ane",)))
    assert "\n" not in str(caught.value)
    chosen = choose(OnMac(), ["coreml-ane"])
    with pytest.warns(UserWarning, match="not in available provider names"):
        session = onnxruntime.InferenceSession(
            exported().file("model.onnx"), providers=add_providers(None, chosen)
        )
    with pytest.raises(DeviceError, match="cannot start coreml-ane, and would run on the CPU"):
        require_started(session, chosen)


def test_what_a_provider_compiles_belongs_to_one_state_of_the_files(exported: Exported) -> None:
    """Core ML's provider goes by the path, and would run an older export's graph."""
    int4, fp32 = exported(quantization="int4"), exported(quantization="fp32")
    assert model._compiled(int4) != model._compiled(fp32)
    assert model._compiled(int4) == model._compiled(open_bundle(int4.path))


def test_devices_of_packages_are_added_in_order() -> None:
    npu, cpu = (ep_device(f"{name}ExecutionProvider", name) for name in ("NPU", "CPU"))
    npu.ep_metadata["library_path"] = "x"
    chosen = [
        ProviderChoice("npu", npu.ep_name, "npu", "", npu),
        ProviderChoice("cpu", cpu.ep_name, "cpu", "", cpu),
    ]
    added: list[Any] = []
    settings = SimpleNamespace(add_provider_for_devices=lambda found, how: added.extend(found))
    assert add_providers(settings, chosen) is None
    assert added == [npu, cpu]
    assert add_providers(settings, [CUDA, chosen[1]]) == ["CUDAExecutionProvider", cpu.ep_name]
    with pytest.raises(UsageError, match="cannot use cuda beside"):
        add_providers(settings, [chosen[0], CUDA])


def test_a_device_that_is_gone_when_it_is_added_is_one_line() -> None:
    npu = ep_device("NPUExecutionProvider", "NPU", library_path="x")
    with pytest.raises(DeviceError, match="cannot start npu") as caught:
        # The real one, for what is no OrtEpDevice.
        add_providers(
            onnxruntime.SessionOptions(), [ProviderChoice("npu", npu.ep_name, "npu", "", npu)]
        )
    assert "\n" not in str(caught.value)


def test_a_session_that_runs_on_the_cpu_instead_is_refused(exported: Exported) -> None:
    """onnxruntime only warns where CUDA does not start."""
    graph = exported().file("model.onnx")
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    require_started(session, choose(onnxruntime, ["cpu"]))
    with pytest.raises(DeviceError, match="cannot start cuda, and would run on the CPU"):
        require_started(session, [CUDA])


def test_a_package_that_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered with the real onnxruntime."""
    for package, library in (("onnxruntime-ep-gone", "/no/such/library"), ("onnxruntime_qnn", 0)):
        module = tmp_path / f"{package.replace('-', '_')}.py"
        module.write_text(
            "def get_ep_name():\n    return 'GoneExecutionProvider'\n"
            f"def get_library_path():\n    return {library!r}\n"
        )
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    faults = devices.load_packages()
    assert {"onnxruntime-ep-gone", "onnxruntime_qnn"} <= set(faults)
    assert all("it does not load: " in faults[name] for name in faults if "gone" in name)
    listed = {device.name: device for device in OrtRuntime().devices(RuntimeOptions())}
    assert "/no/such/library" in (listed["onnxruntime-ep-gone"].fault or "")
    assert listed["cpu"].fault is None
    json.dumps([device.fault for device in listed.values()])


def test_a_device_that_works_has_no_fault_and_one_that_is_not_there_has() -> None:
    assert listing.fault("cpu") is None
    assert "no device 'cuda'" in (listing.fault("cuda") or "") or "cuda" in choices(onnxruntime)


def test_wrong_numbers_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph has other weights than those that its product is compared with."""
    right = listing._matrix_product
    listing._probe("cpu")
    monkeypatch.setattr(listing, "_matrix_product", lambda weights: right(weights * 1.1))
    with pytest.raises(ValueError, match=r"off by 10\.0%"):
        listing._probe("cpu")


def test_scores_of_another_model_are_refused_and_those_of_a_coarser_one_taken(
    exported: Exported,
) -> None:
    whole = trial.scores(OrtRuntime().open(exported("llama", "fp32"), RuntimeOptions()))
    coarse = trial.scores(OrtRuntime().open(exported("llama", "int8"), RuntimeOptions()))
    trial.require_same(whole, whole, "odd")
    trial.require_same(coarse, whole, "odd")
    for wrong in (np.roll(whole, 1, axis=1), whole * 0, whole * np.nan, whole[::-1]):
        with pytest.raises(DeviceError, match="computes this model wrong on odd"):
            trial.require_same(wrong, whole, "odd")


@pytest.mark.parametrize("context_length", [None, 4, 7])
def test_a_model_is_tried_on_another_device_before_it_is_used(
    context_length: int | None, exported: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device is the CPU under another name, its first scores right, the second time wrong."""
    cpu = choose(onnxruntime, ["cpu"])[0]
    names = {"odd": cpu._replace(name="odd"), "cpu": cpu}
    monkeypatch.setattr(
        model, "choose", lambda library, wanted: [names[name] for name in wanted or ("cpu",)]
    )
    options = RuntimeOptions(providers=("odd",), context_length=context_length)
    OrtRuntime().open(exported(), options).close()
    right, calls = trial.scores, []

    def scores(opened: Any) -> np.ndarray:
        calls.append(opened)
        return right(opened) * (-1 if len(calls) == 2 else 1)

    monkeypatch.setattr(trial, "scores", scores)
    with pytest.raises(DeviceError, match="wrong on odd"):
        OrtRuntime().open(exported(), options)
    OrtRuntime().open(exported(), RuntimeOptions(context_length=context_length)).close()
    assert len(calls) == 2  # the CPU is not compared with itself
