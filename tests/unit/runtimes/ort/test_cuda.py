"""NVIDIA's driver, played by a library of the same functions: no machine with a GPU has
run these tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from edge_spec.errors import DeviceError
from edge_spec.runtimes.ort import cuda
from edge_spec.runtimes.ort.cuda import require_driver

STUB = r"""
#include <stdlib.h>
#include <string.h>
static int set(const char *name, int otherwise) {
  const char *value = getenv(name);
  return value ? atoi(value) : otherwise;
}
int cuInit(unsigned flags) { return set("STUB_INIT", 0); }
int cuGetErrorString(int code, const char **text) { *text = "as the driver says"; return 0; }
int cuDriverGetVersion(int *version) { *version = set("STUB_VERSION", 13020); return 0; }
int cuDeviceGetCount(int *count) { *count = set("STUB_DEVICES", 2); return 0; }
int cuDeviceGet(int *device, int number) { *device = 40 + number; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device == 40 ? "Large" : "Small", size); return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = (size_t)(device == 40 ? 24 : 8) << 30; return 0;
}
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("stub") / "driver.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(command, input=STUB, text=True, check=True)
    return library


@pytest.fixture(autouse=True)
def driver(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", str(stub))


def test_devices_have_the_drivers_numbers_names_and_memory() -> None:
    found = cuda.cuda_driver()
    assert found.version == (13, 2)
    assert [device.name for device in found.devices] == ["Large", "Small"]
    assert [device.total_bytes >> 30 for device in found.devices] == [24, 8]


@pytest.mark.parametrize(
    ("settings", "said", "remedy"),
    [
        ({"STUB_INIT": "100"}, "shows no device (cuInit: as the driver says)", "nvidia-smi"),
        ({"STUB_INIT": "803"}, "not the one that is installed", "Restart"),
        ({"STUB_INIT": "999"}, "does not start (cuInit: as the driver says)", "nvidia-smi"),
        ({"STUB_DEVICES": "0"}, "shows no device", "CUDA_VISIBLE_DEVICES"),
        ({"STUB_VERSION": "12080"}, "too old for this onnxruntime (it runs CUDA 12.8", "Update"),
    ],
)
def test_a_driver_that_runs_no_device_is_one_line_with_a_remedy(
    settings: dict[str, str], said: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    onnxruntime = SimpleNamespace(cuda_version="13.0")
    with pytest.raises(DeviceError) as caught:
        require_driver(onnxruntime, "CUDAExecutionProvider")
    assert said in caught.value.message
    assert remedy in caught.value.remedy
    require_driver(onnxruntime, "CPUExecutionProvider")


def test_no_driver_is_one_line_with_the_linkers_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_DRIVER", "libno-such-driver.so.1")
    with pytest.raises(
        DeviceError, match=r"no NVIDIA driver is here \(libno-such-driver"
    ) as caught:
        require_driver(SimpleNamespace(cuda_version=None), "CUDAExecutionProvider")
    assert "\n" not in str(caught.value)
