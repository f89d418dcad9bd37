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
from edge_spec.runtimes.ort.devices import OrtDevice, choose, find_devices, require_started
from edge_spec.runtimes.ort.library import import_onnxruntime

onnxruntime: Any = pytest.importorskip("onnxruntime")
Exported = Callable[..., Bundle]
CUDA = OrtDevice("cuda", "CUDAExecutionProvider", "gpu", "a card")


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
def qnn_is_loaded_anew() -> Iterator[None]:
    devices.load_qnn.cache_clear()
    yield
    devices.load_qnn.cache_clear()


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU this machine has is not asked."""

    def missing() -> CudaDriver:
        raise DeviceError("no driver", remedy="None.")

    monkeypatch.setattr(devices, "cuda_driver", missing)


def test_the_npu_is_found_among_a_packages_devices_where_one_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretended = Pretended(
        ep_device("QNNExecutionProvider", "GPU", FULL_DEVICE_NAME="Adreno"),
        ep_device("QNNExecutionProvider", "NPU"),
    )
    names = {}
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setattr(devices.platform, "machine", lambda found=machine: found)
        names[machine] = list(find_devices(pretended))
    assert names == {"x86_64": ["cpu", "cuda"], "aarch64": ["cpu", "cuda", "qnn"]}
    found = choose(pretended, ["QNNExecutionProvider"])
    assert (found.kind, found.description) == ("npu", "Acme NPU")


def test_each_cuda_device_has_a_name_and_its_number_reaches_the_provider(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cards = tuple(CudaDevice(name, 2**30) for name in ("Large", "Small"))
    monkeypatch.setattr(devices, "cuda_driver", lambda: CudaDriver((13, 0), cards))
    found = find_devices(Pretended())
    assert [(name, device.description) for name, device in found.items()] == [
        ("cpu", "CPUExecutionProvider"),
        ("cuda", "Large"),
        ("cuda:1", "Small"),
    ]
    started: list[Any] = []

    def session(graph: str, settings: Any, providers: Any, **how: Any) -> Any:
        started.extend(providers)
        return SimpleNamespace(get_providers=lambda: ["CUDAExecutionProvider"])

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    for name in ("cuda:0", "CUDA:1", "CUDAExecutionProvider"):
        devices.start_session("", None, choose(Pretended(), [name]))
    numbers = [how["device_id"] for provider, how in started]
    assert numbers == ["0", "1", "0"]
    listed = listing._describe(found["cuda:1"], None)
    assert (listed.name, listed.total_bytes, listed.free_bytes) == ("cuda:1", 2**30, None)
    with pytest.raises(UsageError, match=r"no device 'cuda:2' here\. There are: cpu, cuda, cuda:1"):
        choose(Pretended(), ["cuda:2"])
    with pytest.raises(UsageError, match=r"on one device, not on cuda and cpu\. Name one"):
        choose(Pretended(), ["cuda", "cuda:0", "cpu"])


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
        choose(pretended, [name])
    assert "There are: cpu, cuda;" in caught.value.remedy


def test_a_session_that_runs_on_the_cpu_instead_is_refused(exported: Exported) -> None:
    """onnxruntime only warns where CUDA does not start."""
    graph = exported().file("model.onnx")
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    require_started(session, choose(onnxruntime, ["cpu"]))
    with pytest.raises(DeviceError, match="cannot start cuda, and would run on the CPU"):
        require_started(session, CUDA)


def test_a_package_that_does_not_load_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered with the real onnxruntime."""
    (tmp_path / "onnxruntime_qnn.py").write_text(
        "def get_ep_name():\n    return 'GoneExecutionProvider'\n"
        "def get_library_path():\n    return '/no/such/library'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    listed = {device.name: device for device in OrtRuntime().devices(RuntimeOptions())}
    fault = listed["onnxruntime-qnn"].fault or ""
    assert "it does not load: " in fault and "/no/such/library" in fault
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
        require_started(SimpleNamespace(get_providers=list), CUDA, lambda name: "because.")
