"""No library that we import speaks to the network or leaves files of its own, and ours do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge_spec.core.isolated import isolated

ROOT = Path(__file__).parents[2]
# What each dependency of pyproject.toml is imported as.
MODULES = {
    "filelock": "filelock",
    "gguf": "gguf",
    "huggingface-hub": "huggingface_hub",
    "jinja2": "jinja2",
    "numpy": "numpy",
    "onnx": "onnx",
    "platformdirs": "platformdirs",
    "prompt_toolkit": "prompt_toolkit",
    "pydantic": "pydantic",
    "rich": "rich",
    "threadpoolctl": "threadpoolctl",
    "tokenizers": "tokenizers",
    "typer": "typer",
    "onnxruntime": "onnxruntime",
    "onnxruntime-gpu": "onnxruntime",
    "onnxruntime-qnn": "onnxruntime_qnn",
    "llama-cpp-python": "llama_cpp",
    "openvino": "edge_spec.runtimes.openvino",
    "torch": "torch",
    "ray": "ray",
    "coreai-core": "coreai.authoring",
    "coremltools": "coremltools",
    "onnx-ir": "onnx_ir",
    "optimum": "optimum",
    "optimum-onnx": "optimum.exporters.onnx",
    "transformers": "transformers",
    "llguidance": "llguidance",
    "fastapi": "fastapi",
    "prometheus-client": "prometheus_client",
    "starlette": "starlette",
    "uvicorn": "uvicorn",
    "pywebview": "webview",
    "pyside6-webengine": "PySide6.QtWebEngineCore",
    "qtpy": "qtpy",
}
NOT_OURS = {"docs", "fuzz", "test"}  # extras that no user's process imports


def _traced(code: str, tmp_path: Path) -> tuple[str, list[str]]:
    """Return the calls that reach for a network, and the files that appeared in a fresh home."""
    home, calls = tmp_path / "home", tmp_path / "calls"
    home.mkdir()
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DO_NOT_TRACK", "HF_", "ORT_", "RAY_", "XDG_"))
    } | {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-qq",
        "-e",
        "trace=connect,sendto,sendmsg",
        "-o",
        str(calls),
    ]
    done = subprocess.run(
        ["unshare", "-r", "-n", *strace, sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    reached = [line for line in calls.read_text().splitlines() if "AF_INET" in line]
    return "\n".join(reached), [str(path.relative_to(home)) for path in home.rglob("*")]


def _can_trace() -> bool:
    if not (shutil.which("strace") and shutil.which("unshare")):
        return False
    return (
        subprocess.run(
            ["unshare", "-r", "-n", "strace", "-f", "--seccomp-bpf", "true"], capture_output=True
        ).returncode
        == 0
    )


traced = pytest.mark.skipif(not _can_trace(), reason="no strace in a namespace without a network")


def test_every_dependency_is_looked_at() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"]]
    asked += [each for name in extras if name not in NOT_OURS for each in extras[name]]
    names = {re.match(r"[\w-]+", each)[0] for each in asked}  # type: ignore[index]
    assert names - {"edge-spec"} == MODULES.keys()


@traced
@pytest.mark.parametrize("module", sorted(set(MODULES.values())))
def test_importing_a_dependency_reaches_nobody(module: str, tmp_path: Path) -> None:
    try:
        if find_spec(module) is None:
            pytest.skip("not installed")
    except ModuleNotFoundError:
        pytest.skip("not installed")
    calls, files = _traced(f"import edge_spec, {module}", tmp_path)
    assert calls == ""
    assert files == []


@traced
@pytest.mark.parametrize("runtime", ["llamacpp", "openvino", "ort"])
def test_an_answer_reaches_nobody(runtime: str, tmp_path: Path, gguf: Callable[..., Path]) -> None:
    code = (
        "import edge_spec\n"
        f"with edge_spec.load({str(gguf('llama', 'F16'))!r}, runtime={runtime!r}) as llm:\n"
        "    assert llm.generate('Once', max_tokens=2).tokens"
    )
    calls, files = _traced(code, tmp_path)
    assert calls == ""
    assert files == []  # ours are in $EDGE_SPEC_CACHE


def test_processes_that_we_start_are_quiet() -> None:
    assert isolated(os.getenv, "ORT_DISABLE_TELEMETRY", timeout_s=60) == "1"
