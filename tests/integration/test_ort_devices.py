"""ONNX Runtime's devices: their names, those of packages, and whether they really work."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.core.isolated import IsolatedError
from edge_spec.core.model import RuntimeOptions
from edge_spec.errors import DeviceError, MissingDependencyError, UsageError
from edge_spec.models.bundle import Bundle
from edge_spec.runtimes.ort import OrtRuntime, devices, listing
from edge_spec.runtimes.ort.cuda import CudaDevice, CudaDriver
from edge_spec.runtimes.ort.devices import (
    ProviderChoice,
    add_providers,
    choices,
    choose,
    require_started,
)
from edge_spec.runtimes.ort.library import import_onnxruntime

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


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU this machine has is not asked."""

    def missing() -> CudaDriver:
        raise DeviceError("no driver", remedy="None.")

    monkeypatch.setattr(devices, "cuda_driver", missing)


def test_each_device_of_a_package_has_a_name_those_of_its_kind_first() -> None:
    path = "library_path"
    pretended = Pretended(
        ep_device("WebGpuExecutionProvider", "CPU", **{path: "x", "FULL_DEVICE_NAME": "a core"}),
        ep_device("WebGpuExecutionProvider", "GPU", **{path: "x"}),
        ep_device("WebGpuExecutionProvider", "GPU", **{path: "x", "FULL_DEVICE_NAME": "second"}),
    )
    found = choices(pretended)
    assert [(name, choice.kind, choice.description) for name, choice in found.items()] == [
        ("cuda", "gpu", "CUDAExecutionProvider"),
        ("webgpu", "gpu", "Acme GPU"),
        ("webgpu:1", "gpu", "second"),
        ("webgpu:2", "gpu", "a core"),
        ("cpu", "cpu", "CPUExecutionProvider"),
    ]
    chosen = choose(pretended, ["WebGPU:0", "cuda", "CUDAExecutionProvider", "cpu"])
    assert [choice.name for choice in chosen] == ["webgpu", "cuda", "cpu"]
    assert [choice.from_package for choice in chosen] == [True, False, False]


def test_each_cuda_device_has_a_name_and_its_number_reaches_the_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = tuple(CudaDevice(name, 2**30, b"0000:01:00.0") for name in ("Large", "Small"))
    monkeypatch.setattr(devices, "cuda_driver", lambda: CudaDriver((13, 0), cards))
    found = choices(Pretended())
    assert [(name, choice.description) for name, choice in found.items()] == [
        ("cuda", "Large"),
        ("cuda:1", "Small"),
        ("cpu", "CPUExecutionProvider"),
    ]
    first, second = (choose(Pretended(), [name]) for name in ("cuda:0", "CUDA:1"))
    assert add_providers(None, first) == ["CUDAExecutionProvider"]
    assert add_providers(None, second) == [("CUDAExecutionProvider", {"device_id": "1"})]
    listed = listing._described(second[0], None)
    assert (listed.name, listed.total_bytes, listed.free_bytes) == ("cuda:1", 2**30, None)
    with pytest.raises(UsageError, match=r"no device 'cuda:2' here\. There are: cpu, cuda, cuda:1"):
        choose(Pretended(), ["cuda:2"])
    with pytest.raises(UsageError, match="once in a session, not as cuda and cuda:1"):
        choose(Pretended(), ["cuda", "cuda:1"])


@pytest.mark.parametrize(
    ("source", "said"),
    [("", "installed in part"), ("raise ImportError('DLL load failed')", "DLL load failed")],
)
def test_a_damaged_onnxruntime_is_not_called_missing(
    source: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after one of its two packages, which install the same module, was uninstalled."""
    (tmp_path / "onnxruntime.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime")
    with pytest.raises(MissingDependencyError, match=said) as caught:
        import_onnxruntime()
    assert "uninstall both" in caught.value.remedy


@pytest.mark.parametrize("name", ["abacus", "AzureExecutionProvider", "tensorrt", "gpu", ""])
def test_a_name_that_is_no_device_lists_those_there_are(name: str) -> None:
    """Azure is a provider that onnxruntime calls available: it would call a service."""
    pretended = Pretended(ep_device("TensorrtExecutionProvider", "GPU"))
    with pytest.raises(UsageError, match="onnxruntime has no device") as caught:
        choose(pretended, ["cpu", name])
    assert "There are: cpu, cuda;" in caught.value.remedy


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
    for package, library in (("onnxruntime_ep_webgpu", "/no/such/library"), ("onnxruntime_qnn", 0)):
        module = tmp_path / f"{package}.py"
        module.write_text(
            "def get_ep_name():\n    return 'GoneExecutionProvider'\n"
            f"def get_library_path():\n    return {library!r}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    faults = devices.load_packages()
    assert {"onnxruntime-ep-webgpu", "onnxruntime-qnn"} <= set(faults)
    assert all("it does not load: " in faults[name] for name in faults if "webgpu" in name)
    listed = {device.name: device for device in OrtRuntime().devices(RuntimeOptions())}
    assert "/no/such/library" in (listed["onnxruntime-ep-webgpu"].fault or "")
    assert listed["cpu"].fault is None
    json.dumps([device.fault for device in listed.values()])


def test_the_reason_that_a_library_prints_is_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that does not start leaves the session to the CPU, and says why in a log alone."""

    def lost(*arguments: object, **how: object) -> None:
        raise IsolatedError("cannot start cuda, and would run on the CPU", printed)

    printed = "with error: libcudnn.so.9: cannot open shared object file: No such file\n"
    monkeypatch.setattr(listing, "isolated", lost)
    fault = listing.fault("cuda") or ""
    assert "libraries are missing" in fault and "libcudnn.so.9" in fault
    printed = "something else"
    assert listing.fault("cuda") == "cannot start cuda, and would run on the CPU"
    with pytest.raises(DeviceError, match=r"cannot start cuda: because\. Choose"):
        require_started(SimpleNamespace(get_providers=list), [CUDA], lambda name: "because.")
