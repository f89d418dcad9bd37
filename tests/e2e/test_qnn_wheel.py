"""Qualcomm's compiler itself, on a machine without an NPU: what it makes of a tiny model, and that
its emulator scores as the CPU does.

The wheel (about 240 MB) is installed into an environment of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures import tiny_models
from fixtures.wheels import environment_with

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="the emulator is part of the wheel for Linux on x86-64",
    ),
]

MAIN = "import sys; from edge_spec.cli.start import main; sys.argv[0] = 'edge-spec'; main()"
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "htp_binary.py"
WIDE = {"head_dim": 32, "hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment_with(tmp_path_factory.mktemp("qnn"), "onnxruntime-qnn>=2.7,<3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    return str(tiny_models.write_gguf(tiny_models.build("llama-tied", **WIDE), path, "Q8_0"))


def run(python: Path, *arguments: str) -> Any:
    return subprocess.run(
        [str(python), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp16"])
def test_a_model_is_compiled_whole_and_bound_to_its_processor(
    quantization: str, python: Path, model: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    asked = ("--format", "qnn", "--soc", "SM8650", "--quant", quantization, "--context", "64")
    done = run(python, "-c", MAIN, "export", model, str(out), *asked, "--no-check", "--json")
    assert done.returncode == 0, done
    manifest = json.loads((out / "manifest.json").read_text())
    bound = manifest["compiled"]
    assert (bound["soc"], bound["htp_arch"], bound["shares_weights"]) == ("SM8650", 75, True)
    assert set(bound["outside"]) == {"prefill_64", "rows_1", "rows_4", "rows_8"}
    # Rows of an embedding of integers are looked up outside; nothing else is.
    expected = {} if quantization == "fp16" else {"Cast": 1, "Gather": 1}
    assert all(outside == expected for outside in bound["outside"].values())
    assert [name for name in manifest["files"] if name.endswith(".bin")] == ["prefill_64_qnn.bin"]
    opened = run(python, "-c", MAIN, "generate", str(out), "Hi")
    assert opened.returncode == 1
    (line,) = opened.stderr.splitlines()
    assert "compiled for SM8650 (HTP v75), this machine has no NPU" in line


def test_the_emulator_scores_as_the_cpu_does(python: Path, model: str) -> None:
    """float16 against float32: within a tenth of the scores' deviation, where a wrong matrix, mask
    or order of bits is off by about 1."""
    for quantization in ("int4", "int8"):
        asked = ("--quant", quantization, "--context", "64", "--emulate")
        done = run(python, str(BENCHMARK), model, *asked)
        assert done.returncode == 0, done
        assert json.loads(done.stdout.splitlines()[-1])["of_deviation"] < 0.1


def test_the_compiler_is_no_device_to_run_on(python: Path) -> None:
    done = run(python, "-c", MAIN, "devices", "--json")
    listed = {each["name"]: each for each in json.loads(done.stdout)["devices"]}
    assert "no NPU of Qualcomm's is here" in listed["onnxruntime-qnn"]["fault"]
    assert listed["onnxruntime-qnn"]["kind"] is None and "qnn" not in listed
