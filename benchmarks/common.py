"""What every benchmark shares: prompts, paired engines, the machine, and the report."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from edge_spec.engine import Engine
from edge_spec.load_options import LoadOptions
from edge_spec.loading import load_engine

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Lines with `category` and `prompt`, or Spec-Bench's `turns`, of which the first is taken."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "id": str(entry["id"]),
            "category": entry["category"],
            "prompt": entry["prompt"] if "prompt" in entry else entry["turns"][0],
        }
        for entry in entries
    ]


def open_engine(model: str, **options: Any) -> Engine:
    return load_engine(model, LoadOptions(**options), _say)


def machine() -> dict[str, Any]:
    """Where and with what a figure was measured."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    versions = {}
    for package in ("edge-spec", "onnxruntime", "numpy", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    ).stdout.strip()
    return {
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit,
        "cpu": model,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
    }


def report(results: dict[str, Any], out: Path | None) -> None:
    """Writes the results with the machine as JSON, where asked for."""
    if out is not None:
        out.write_text(json.dumps({"machine": machine(), **results}, indent=2) + "\n")
        _say(f"written to {out}", 1.0)


def medians(values: dict[Any, list[float]]) -> dict[Any, float]:
    return {key: median(times) for key, times in values.items()}


def _say(what: str, fraction: float) -> None:
    if fraction in (0.0, 1.0):
        print(what, file=sys.stderr)
