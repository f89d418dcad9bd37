"""Probes one model on one processor: which widths agree, and whether drafts change the text.

    python benchmarks/processor_probe.py RUNTIME MODEL TOKENS

prints a line of JSON. benchmarks/processors.py runs it in the interpreter of a real or an emulated
processor. The model is converted before, since an emulated processor is a hundred times slower.
"""

from __future__ import annotations

import json
import platform
import sys
from typing import Any

from common import open_engine

from edge_spec.engine.engine import Engine
from edge_spec.scheduler.machine import cpu_features, describe_machine

CONTEXT = 512  # tokens
MODES = ("auto", "always")
PROMPTS = (
    "one two one two one two",
    "The quick brown fox jumps over the lazy dog. The quick brown",
    "a b c a b c a",
    "def f(x):\n    return x",
)


def probe(runtime: str, model: str, num_tokens: int) -> dict[str, Any]:
    """Returns what was found, as JSON has it; `modes` by the name of the lossless mode."""
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "features": cpu_features(),
        "runtime": runtime,
        "versions": describe_machine()["versions"],
        "modes": {},
    }
    for mode in MODES:
        options = {
            "runtime": runtime,
            "threads": 1,
            "context_length": CONTEXT,
            "lossless": mode,
        }
        with open_engine(model, **options) as engine:
            rows = engine.parts.batch_invariance
            found |= {
                "widths": rows.invariant_widths,
                "noise": rows.tie_margin,
                "branches_agree": rows.branch_invariant,
            }
            engine.set_drafter("none")
            plain = [_tokens(engine, prompt, num_tokens) for prompt in PROMPTS]
            engine.set_drafter("auto")
            found["modes"][mode] = _compare(engine, plain, num_tokens)
    return found


def _compare(engine: Engine, plain: list[list[int]], num_tokens: int) -> dict[str, Any]:
    """Every other text verifies all draft tokens, whether or not that pays; the others are answered
    as the engine is set up."""
    lossless = engine.parts.speculation_factory.lossless
    drafted = accepted = differing = 0
    for number, (prompt, expected) in enumerate(zip(PROMPTS, plain, strict=True)):
        if number % 2:
            text = _tokens(engine, prompt, num_tokens)
        else:
            with engine.verifying_all_draft_tokens():
                text = _tokens(engine, prompt, num_tokens)
        assert engine.last is not None  # it has answered
        drafted += engine.last.stats.draft_n
        accepted += engine.last.stats.draft_n_accepted
        differing += text != expected
    return {
        "promise": lossless.promise.name.lower(),
        "plain_width": lossless.plain_width,
        "texts": len(plain),
        "differing": differing,
        "drafted": drafted,
        "accepted": accepted,
    }


def _tokens(engine: Engine, prompt: str, num_tokens: int) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=num_tokens).tokens]


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
