"""Texts on processors that this machine is not: benchmarks/processors.py on a tiny model.

Needs qemu-x86_64 and qemu-aarch64 (apt-get install qemu-user), and for the latter the directory
that `python benchmarks/arm64_root.py DIRECTORY` makes, in EDGE_SPEC_ARM64_ROOT.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixtures import tiny_models

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "processors.py"
ARM64 = os.environ.get("EDGE_SPEC_ARM64_ROOT")
BOTH = ("ort int4", "reference")


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("processors")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = tiny_models.build("llama", max_position_embeddings=512)
    return tiny_models.write_hf(tiny, tmp_path_factory.mktemp("processors") / "model")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processor", "cases"),
    [("Nehalem", BOTH), ("Haswell", BOTH[:1]), ("cortex-a72", BOTH[:1]), ("arm64-max", BOTH)],
)
def test_drafts_change_no_text(
    processor: str, cases: tuple[str, ...], processors: ModuleType, model: Path, tmp_path: Path
) -> None:
    """Where rows of other widths have other scores, as on each of these with the libraries' own
    kernels, that takes care."""
    arm64 = Path(ARM64) if ARM64 else None
    missing = processors.Interpreters(sys.executable, arm64, tmp_path).missing(processor)
    if missing is not None:
        pytest.skip(missing)
    out = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--cpu", processor, "--case", *cases]
    command += ["--model", str(model), "--json", str(out)]
    command += ["--arm64", ARM64] if ARM64 else []
    env = {**os.environ, "EDGE_SPEC_ROWS": "off"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=900, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text("utf-8"))["results"]
    assert [result["case"] for result in results] == list(cases)
    for result in results:
        assert ("I8MM" in result["features"]) == (processor == "arm64-max")  # kernels differ by it
        assert result["widths"][0] > 1 and result["noise"] > 0  # else nothing here was at stake
        for mode in result["modes"].values():
            assert mode["differing"] == 0 and mode["accepted"] > 0, result


def found(promise: str, differing: int, drafted: int = 9) -> dict[str, Any]:
    mode = {"promise": promise, "differing": differing, "drafted": drafted, "texts": 4}
    modes = {"auto": mode, "always": {**mode, "differing": 0}}
    head = {"processor": "Haswell", "case": "ort int4", "features": ["AVX2"]}
    return {**head, "widths": [2, 3, 4], "noise": 0.25, "modes": modes}
