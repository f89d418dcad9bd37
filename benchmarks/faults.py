"""Faults of drafters, drafts, parts and targets, injected one by one, and how many are survived.

    python benchmarks/faults.py [--runtimes scripted reference ort llamacpp] [--json FILE]

On a tiny model of random weights, its own draft: what is held is the text, not the speed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import open_engine, report

from edge_spec.core.modes import DraftOverlap
from edge_spec.core.tree import TokenTree
from edge_spec.core.watchdog import WatchedModel
from edge_spec.engine.components import EngineComponents
from edge_spec.storage.atomic import CACHE_VARIABLE
from edge_spec.testing import ScriptedModel, random_logits

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))
from fixtures import tiny_models  # noqa: E402
from fixtures.fault_matrix import FaultReport, check_faults  # noqa: E402

RUNTIMES: dict[str, dict[str, Any]] = {
    "scripted": {"runtime": "reference"},
    "reference": {"runtime": "reference"},
    "ort": {
        "runtime": "ort",
        "quantization": "fp32",
        "drafter": "cascade,early-exit",
        "exit_layer": 1,
    },
    "llamacpp": {
        "runtime": "llamacpp",
        "quantization": "F32",
        "kv_type": "f32",
        "flash_attention": False,
    },
}
DRAFTERS = ["suffix,recycling", "lookahead", "jacobi", "draft-model", "cascade"]
PASSES = 2000


def tiny_model(folder: Path) -> Path:
    return tiny_models.write_hf(tiny_models.build("llama"), folder)


def parts_of(parts: EngineComponents, runtime: str) -> EngineComponents:
    """The draft drafts on while the target verifies, and for "scripted" both are."""
    speculation_factory = replace(parts.speculation_factory, draft_overlap=DraftOverlap.ON)
    if runtime != "scripted":
        return replace(parts, speculation_factory=speculation_factory)
    config = parts.model.config
    model = ScriptedModel(random_logits(config.vocab_size, scale=6.0), config.vocab_size)
    draft = type(parts.drafts[0])(model, config.vocab_size, anticipates=True)
    setting = replace(speculation_factory.setting, drafts=[draft])
    speculation_factory = replace(
        speculation_factory, setting=setting, capabilities=model.capabilities
    )
    return replace(parts, model=model, drafts=[draft], speculation_factory=speculation_factory)


def injected_into(runtime: str, model: Path, tokens: int) -> FaultReport:
    draws = np.random.default_rng(3)
    drafters = [*DRAFTERS, "early-exit"] if runtime == "ort" else DRAFTERS
    options = {"threads": 1, "draft_threads": 1, **RUNTIMES[runtime]}
    options["draft_runtime"] = options["runtime"]
    with open_engine(str(model), draft=str(model), **options) as engine:
        vocab_size = engine.parts.model.config.vocab_size
        prompts = [draws.integers(3, vocab_size, 6).tolist() * 2 for _ in range(2)]
        parts = parts_of(engine.parts, runtime)
        return check_faults(parts, prompts, drafters, max_tokens=tokens)


def handover_us() -> float:
    """Microseconds that a pass of a draft takes longer for being watched."""
    model = ScriptedModel(lambda tokens: np.zeros(1, np.float32), 1)
    tree, means = TokenTree.chain(0), []
    for opened in (model, WatchedModel(model)):
        with closing(opened.open_session()) as session:
            session.forward(tree)
            started = time.perf_counter()
            for _ in range(PASSES):
                session.forward(tree)
            means.append((time.perf_counter() - started) / PASSES)
    return (means[1] - means[0]) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runtimes", nargs="+", choices=RUNTIMES, default=list(RUNTIMES))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    logging.disable(logging.WARNING)  # of every drafter that is dropped
    by_kind: Counter[tuple[str, str]] = Counter()
    by_runtime = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_VARIABLE] = str(Path(folder) / "cache")
        model = tiny_model(Path(folder) / "tiny")
        for runtime in arguments.runtimes:
            found = injected_into(runtime, model, arguments.tokens)
            by_runtime[runtime] = {"injected": found.injected, "survived": found.survived}
            for kind, counts in found.by_kind().items():
                by_kind.update({(kind, name): count for name, count in counts.items()})
            for case in found.cases:
                if case.lost is not None:
                    print(f"{runtime}: {case}: {case.lost}")
    injected = sum(each["injected"] for each in by_runtime.values())
    survived = sum(each["survived"] for each in by_runtime.values())
    kinds = {kind: {} for kind, _ in by_kind}
    for (kind, name), count in by_kind.items():
        kinds[kind][name] = count
    watched_us = handover_us()
    print(
        f"{survived} of {injected} faults survived on {', '.join(by_runtime)}; a watched pass "
        f"takes {watched_us:.0f} us more"
    )
    report(
        {
            "injected": injected,
            "survived": survived,
            "by_kind": kinds,
            "by_runtime": by_runtime,
            "watched_pass_us": watched_us,
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
