"""Reading a long prompt, and plain steps after it, beside llama-cpp-python.

    python benchmarks/long_context.py --model 1B --tokens 2000,8000 --repeat 3

--model: a size of the stand-ins of real_size.py, or a GGUF file. Each reading is a process of its
own, in turns; steps are timed after the last token, drafting off: the lower quartile of 24.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import report
from real_size import PEER, SHAPES, stand_in

_READING = """
import json, sys, time
import numpy as np
path, runtime, count, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokens = np.random.default_rng(0).integers(100, 40000, count + 32).tolist()
prompt, more = tokens[:count], tokens[count:]
room = count + 64
if runtime == "llama-cpp-python":
    import llama_cpp
    model = llama_cpp.Llama(path, n_ctx=room, verbose=False, n_threads=threads,
                            n_threads_batch=threads, n_batch=512)
    model.eval(tokens[:32]); model.reset()
    started = time.perf_counter()
    model.eval(prompt)
    read_s = time.perf_counter() - started
    def step(token):
        model.eval([token])
else:
    from edge_spec.core.model import RuntimeOptions
    from edge_spec.core.tree import TokenTree
    from edge_spec.models.options import LoadOptions
    from edge_spec.models.resolve import resolve_model
    from edge_spec.models.source import Source
    quiet = lambda what, fraction: None
    found = resolve_model(Source(path, quiet), runtime, LoadOptions(), quiet)
    model = found.open(RuntimeOptions(threads=threads, context_length=room))
    session = model.open_session()
    session.prefill(tokens[:32]); session.rollback(0)
    started = time.perf_counter()
    session.prefill(prompt)
    read_s = time.perf_counter() - started
    def step(token):
        session.forward(TokenTree.chain(token)); session.commit([0])
times = []
for token in more[:24]:
    started = time.perf_counter()
    step(token)
    times.append(time.perf_counter() - started)
print(json.dumps({"read_s": read_s, "step_s": float(np.quantile(times[2:], 0.25))}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1B")
    parser.add_argument("--runtimes", default=f"ort,llamacpp,{PEER}")
    parser.add_argument("--tokens", default="2000")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    is_size = arguments.model in SHAPES
    path = stand_in(arguments.model) if is_size else Path(arguments.model)
    found: dict[str, Any] = {}
    print("| tokens | runtime | tokens/s read | ms a step | of llama-cpp-python's |")
    print("|---|---|---|---|---|")
    for count in map(int, arguments.tokens.split(",")):
        made: dict[str, list[dict[str, float]]] = {}
        for _ in range(arguments.repeat):
            for runtime in arguments.runtimes.split(","):
                reading = _read(path, runtime, count, arguments.threads)
                made.setdefault(runtime, []).append(reading)
        for runtime, readings in made.items():
            print(_line(count, readings, runtime, made.get(PEER)), flush=True)
        found[str(count)] = made
    report(found, arguments.json)


def _read(path: Path, runtime: str, num_tokens: int, threads: int) -> dict[str, float]:
    command = [sys.executable, "-c", _READING, str(path), runtime, str(num_tokens), str(threads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    reading: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return reading


def _line(
    num_tokens: int,
    readings: list[dict[str, float]],
    runtime: str,
    peer: list[dict[str, float]] | None,
) -> str:
    read_s = median(each["read_s"] for each in readings)
    step_s = median(each["step_s"] for each in readings)
    ratios = ""
    if peer is not None:  # each beside the one of its turn
        pairs = list(zip(readings, peer, strict=True))
        read = median(other["read_s"] / own["read_s"] for own, other in pairs)
        step = median(own["step_s"] / other["step_s"] for own, other in pairs)
        ratios = f"{read:.2f} times its rate, {step:.2f} of its time"
    return (
        f"| {num_tokens} | {runtime} | {num_tokens / read_s:.0f} | {step_s * 1000:.1f} | {ratios} |"
    )


if __name__ == "__main__":
    main()
