"""t(k): the time to score k rows, all of them through the head, for several runtimes in one run.

    python benchmarks/rows.py                                # every installed runtime
    python benchmarks/rows.py --model FILE.gguf --case ort:int4 --case llamacpp:Q4_0
    python benchmarks/rows.py --case llamacpp@avx2 --case llamacpp@off --prompts 512

A case is RUNTIME[:QUANTIZATION[:BLOCK SIZE]][@TABLE]: TABLE is one of our kernels for few rows, or
"off". Each case has a process of its own, since libraries and their idle threads would disturb each
other; cases and widths are interleaved, and each block of passes begins with some that are not
counted. Prints medians in milliseconds and as multiples of one row, and the tokens a second with
which prompts are read. Nothing is padded: as --lossless ties.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import real_models
from common import medians, open_engine, report

from edge_spec.core.export import ExportOptions
from edge_spec.core.tree import TokenTree
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.source import Source

SETTLE_S = 0.2  # the threads of the process before spin on for a while
WARM_UP_PASSES = 3
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
DEFAULT_CASES = {
    "ort:int4": "onnxruntime",
    "llamacpp:Q4_0": "llama_cpp",
}


def _pass_over(what: str, fraction: float) -> None: ...


def work(model: str, case: str) -> None:
    """Answers each line {"context"} on stdin with the seconds of a pass of each width, and each
    line {"prompt"} with those of a prompt of this length."""
    runtime, _, quantization = case.partition("@")[0].partition(":")
    export = ExportOptions(quantization or None)
    source = Source(real_models.named(model), _pass_over)
    prepared = ModelPlan(source, runtime, export=export).prepare(_pass_over)
    with open_engine(str(prepared.source.path), runtime=runtime, lossless="ties") as engine:
        model_ = engine.parts.model
        tokens = np.random.default_rng(0).integers(0, model_.config.vocab_size, 1 << 16).tolist()
        session = model_.open_session()
        for line in sys.stdin:
            asked = json.loads(line)
            if "prompt" in asked:
                session.rollback(0)
                start = time.perf_counter()
                session.prefill(tokens[: asked["prompt"]])
                print(json.dumps([time.perf_counter() - start]), flush=True)
                continue
            context = asked["context"]
            session.rollback(min(context, session.length))
            session.prefill(tokens[session.length : context])
            for _ in range(WARM_UP_PASSES):
                session.forward(TokenTree.chain(tokens[context]))
            seconds = []
            for width in WIDTHS:
                tree = TokenTree.chain(tokens[context], tokens[context + 1 : context + width])
                start = time.perf_counter()
                session.forward(tree)
                seconds.append(time.perf_counter() - start)
            print(json.dumps(seconds), flush=True)
        session.close()


def start(model: str, case: str) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--model", model, "--case", case, "--worker"]
    environment = dict(os.environ)
    table = case.partition("@")[2]
    if table == "off":
        environment["EDGE_SPEC_ROWS"] = "off"
    elif table:
        environment["EDGE_SPEC_ROWS_KERNELS"] = table
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )


def ask(worker: subprocess.Popen[str], **what: int) -> list[float]:
    assert worker.stdin is not None and worker.stdout is not None
    time.sleep(SETTLE_S)
    worker.stdin.write(json.dumps(what) + "\n")
    worker.stdin.flush()
    seconds: list[float] = json.loads(worker.stdout.readline())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--case", action="append", dest="cases")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256])
    parser.add_argument("--prompts", type=int, nargs="+", default=[])
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.model, arguments.cases[0])

    installed = [case for case, module in DEFAULT_CASES.items() if find_spec(module)]
    workers = {case: start(arguments.model, case) for case in arguments.cases or installed}
    results: dict[str, Any] = {}
    for context in arguments.contexts:
        seconds: dict[str, dict[int, list[float]]] = {case: defaultdict(list) for case in workers}
        for repetition in range(arguments.repetitions + 2):
            for case, worker in workers.items():
                for width, taken in zip(WIDTHS, ask(worker, context=context), strict=True):
                    if repetition >= 2:  # the first passes bind their buffers
                        seconds[case][width].append(taken)
        print(f"\ncontext {context:6d}" + "".join(f"{width:>14d}" for width in WIDTHS))
        for case in workers:
            ms = {width: time_s * 1e3 for width, time_s in medians(seconds[case]).items()}
            cells = (f"{ms[width]:7.2f} ({ms[width] / ms[1]:4.2f})" for width in WIDTHS)
            print(f"{Path(case).name[-14:]:14s}" + "".join(cells), flush=True)
            results.setdefault(case, {})[context] = ms
    for length in arguments.prompts:
        taken_s: dict[str, list[float]] = {case: [] for case in workers}
        for _ in range(3):
            for case, worker in workers.items():
                taken_s[case] += ask(worker, prompt=length)
        rates = {case: length / median(all_s) for case, all_s in taken_s.items()}
        said = "".join(f"  {Path(case).name} {rate:.0f}" for case, rate in rates.items())
        print(f"\nprompt of {length}, tokens/s:{said}", flush=True)
        results.setdefault("prompt", {})[length] = rates
    for worker in workers.values():
        worker.communicate()
    report({"t_ms": results}, arguments.json)
    return None


if __name__ == "__main__":
    main()
