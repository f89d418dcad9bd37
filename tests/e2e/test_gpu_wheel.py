"""onnxruntime-gpu on a machine without a driver: what a user is told, and what stdout holds.

The wheel (about 250 MB) is installed into an environment of its own, which sees the packages of
this one behind it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from ctypes import CDLL
from pathlib import Path
from typing import Any

import pytest

from fixtures.other_models import GROWING
from fixtures.wheels import environment_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stubs of drivers are Linux libraries"),
]

MODEL = str(GROWING / "gpt2")
MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
# As much of the driver as is asked before CUDA's own libraries are loaded.
DRIVER = r"""
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strcpy(name, "A card"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8UL << 30; return 0; }
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with onnxruntime-gpu, without NVIDIA's packages."""
    try:
        CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("a driver is here")
    return environment_with(tmp_path_factory.mktemp("gpu"), "onnxruntime-gpu>=1.31")


def run(python: Path, *arguments: str, libraries: Path | None = None) -> Any:
    """libraries: where the linker looks first. The input stays open, so that --stdio goes on."""
    ends = os.pipe()
    try:
        return subprocess.run(
            [str(python), "-c", MAIN, *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(libraries or "")},
            stdin=ends[0],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        for end in ends:
            os.close(end)


def driver(folder: Path, version: int) -> Path:
    command = ["cc", "-shared", "-fPIC", f"-DVERSION={version}", "-x", "c", "-"]
    target = ["-o", str(folder / "libcuda.so.1")]
    try:
        subprocess.run([*command, *target], input=DRIVER, text=True, check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return folder


def test_each_command_says_that_there_is_no_driver(python: Path) -> None:
    asked = ("--runtime", "ort", "--device", "cuda")
    for command in (("generate", MODEL, "Hi", "--json"), ("serve", MODEL, "--stdio")):
        done = run(python, *command, *asked)
        assert (done.returncode, done.stdout) == (1, ""), done
        (line,) = done.stderr.splitlines()
        assert "no NVIDIA driver is here (libcuda.so.1: cannot open shared object" in line
        assert "Install NVIDIA's driver" in line
    done = run(python, "generate", MODEL, "Hi", "--runtime", "ort", "--device", "cuda:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no device 'cuda:1' here. There are: cpu, cuda" in done.stderr


def test_devices_are_listed_with_their_faults_and_the_cpu_works(python: Path) -> None:
    done = run(python, "devices", "--json")
    assert done.returncode == 0, done
    listed = {each["name"]: each for each in json.loads(done.stdout)["devices"]}
    assert "no NVIDIA driver is here" in listed["cuda"]["fault"]
    assert "tensorrt" not in listed  # cuda runs on the same devices
    asked = ("--runtime", "ort", "--max-tokens", "2", "--json")
    answered = run(python, "generate", MODEL, "Hi", *asked)
    assert answered.returncode == 0, answered
    assert len(json.loads(answered.stdout)["tokens"]) == 2


def test_a_driver_without_cudas_libraries_and_an_old_one(python: Path, tmp_path: Path) -> None:
    """Two cards; the driver is a library that answers, onnxruntime's refusal is its own."""
    asked = ("generate", MODEL, "Hi", "--runtime", "ort", "--json", "--device", "cuda:1")
    done = run(python, *asked, libraries=driver(tmp_path, 13000))
    assert (done.returncode, done.stdout) == (1, ""), done
    (line,) = done.stderr.splitlines()
    assert "onnxruntime cannot start cuda:1: CUDA's or cuDNN's libraries are missing" in line
    assert "(libcublasLt.so.13: cannot open shared object file" in line
    assert 'pip install -e ".[gpu]"' in line
    done = run(python, *asked, libraries=driver(tmp_path, 12040))
    assert (done.returncode, done.stdout) == (1, "")
    assert "NVIDIA's driver is too old for this onnxruntime (it runs CUDA 12.4" in done.stderr
