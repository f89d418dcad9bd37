"""Memory forecast before a model or pair is loaded, against what then is resident.

    python benchmarks/memory.py                                    # the demo model, and pairs of it
    python benchmarks/memory.py --case ort+llamacpp                # TARGET[+DRAFT]
    python benchmarks/memory.py --case ort=BUNDLE+llamacpp=FILE
    python benchmarks/memory.py --case llamacpp=coder-1.5b+llamacpp=coder-0.5b

Each case has a process of its own. Resident is the growth from before the first model is opened to
after a text that fills --context, its end generated, both with the heap's free pages given back;
forecast is what was said before. Library code is in both.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import real_models
from common import open_engine, report

from edge_spec.core.model import Model
from edge_spec.models.devices import format_bytes, resident_bytes
from edge_spec.models.memory import forecast
from edge_spec.models.model_plan import PreparedModel, prepare_model
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source

CASES = (
    *("ort", "ort:int8", "ort:fp16", "llamacpp", "llamacpp:Q4_0", "llamacpp:Q8_0"),
    *("ort+ort", "ort+llamacpp", "llamacpp+ort", "llamacpp+llamacpp"),
)
GENERATED_TOKENS = 48
TEXT = "The moon pulls the sea towards itself, and so there are tides twice a day. "


def measure(case: str, context: int, threads: int | None) -> dict[str, Any]:
    """Measures in this process, which must not have opened a model before."""
    target, _, draft = case.partition("+")
    (model, runtime, quantization), (draft_model, draft_runtime, _) = parsed(target), parsed(draft)
    options: dict[str, Any] = {
        "runtime": runtime,
        "quantization": quantization,
        "context_length": context,
        "threads": threads,
        "drafter": "draft-model" if draft else "suffix",
    }
    if draft:
        options |= {"draft": draft_model, "draft_runtime": draft_runtime}
    before: list[int] = []
    opened = PreparedModel.open

    def measured(self: PreparedModel) -> Model:
        if not before:
            before.append(_resident_without_free_heap())
        return opened(self)

    PreparedModel.open = measured  # type: ignore[method-assign]
    loaded = LoadOptions(**options)

    def silent(what: str, fraction: float) -> None:
        pass

    sides = [(model, runtime, loaded.runtime_options)]
    if draft:
        sides.append((draft_model, draft_runtime, loaded.draft_runtime_options))
    prepared = [
        prepare_model(Source(name, silent), on, silent, how, loaded.export)
        for name, on, how in sides
    ]
    said = forecast(prepared[0], prepared[1:])
    assert said is not None
    del prepared
    with open_engine(model, **options) as engine:
        # Or a draft that does not pay would not be asked, and its cache would stay empty.
        speculation_factory = replace(engine.parts.speculation_factory, costs=None)
        engine._drafting._parts = replace(engine.parts, speculation_factory=speculation_factory)
        engine.set_drafter(loaded.drafter)
        text = engine.parts.text.tokenizer.encode(TEXT * (context // 8))
        stats = engine.generate(
            text[: context - GENERATED_TOKENS - 8], max_tokens=GENERATED_TOKENS
        ).stats
        resident = _resident_without_free_heap()
    return {
        "forecast": said.total,
        "resident": resident - before[0],
        "said": str(said),
        "draft_n": stats.draft_n,
    }


def parsed(side: str) -> tuple[str, str, str | None]:
    """RUNTIME[:QUANTIZATION] of the demo model or RUNTIME=MODEL: model, runtime, quantization."""
    runtime, _, path = side.partition("=")
    runtime, _, quantization = runtime.partition(":")
    return real_models.named(path or "smollm2"), runtime, quantization or None


def _resident_without_free_heap() -> int:
    """Heap that is free, but not given back, is nobody's: before, models would take it and not be
    seen to grow; after, it is what sessions that are closed have left."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    resident = resident_bytes()
    assert resident is not None
    return resident


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", dest="cases")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        found = measure(arguments.cases[0], arguments.contexts[0], arguments.threads)
        return print(json.dumps(found))
    cases = arguments.cases or CASES
    results: dict[str, Any] = {}
    print("context  forecast  resident  ratio  case")
    for case in cases:
        for context in arguments.contexts:
            command = [sys.executable, __file__, "--worker", "--case", case]
            command += ["--contexts", str(context)]
            command += ["--threads", str(arguments.threads)] if arguments.threads else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            results.setdefault(case, {})[context] = found
            ratio = found["forecast"] / found["resident"]
            sizes = "  ".join(f"{format_bytes(found[k]):>8s}" for k in ("forecast", "resident"))
            print(f"{context:7d}  {sizes}  {ratio:5.2f}  {found['said']}", flush=True)
    report({"memory": results}, arguments.json)
    return None


if __name__ == "__main__":
    main()
