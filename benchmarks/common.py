"""Holds what every benchmark shares: prompts, paired engines, the machine, and the report."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import real_models

from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.machine import describe_machine
from edge_spec.text import prompt_files as prompts

OWN_PROMPTS = Path(__file__).with_name("prompts.jsonl")


def read_prompts(path: Path, per_category: int | None = None) -> list[dict[str, str]]:
    """`id`, `category` and `prompt` of each."""
    return [
        {"id": prompt.id, "category": prompt.category, "prompt": prompt.text}
        for prompt in prompts.read_prompts(path, per_category)
    ]


def open_engine(model: str, **options: Any) -> Engine:
    """model: a MODEL, or a name of real_models.py; so is `draft` among the options."""
    drafts = options.get("draft")
    if isinstance(drafts, str):
        options["draft"] = real_models.named(drafts)
    return load_engine(real_models.named(model), LoadOptions(**options), _say)


def compose_by(engine: Engine, factory: SpeculationFactory) -> None:
    """Has `engine.set_drafter` compose what it is given the names of by another factory."""
    engine.parts = replace(engine.parts, speculation_factory=factory)
    engine._drafting._parts = engine.parts  # which is no interface: nobody else exchanges a factory


def machine() -> dict[str, Any]:
    """Describes where and with what a figure was measured."""
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
        **describe_machine(),
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
