"""Plain decoding on the llama.cpp runtime against llama_cpp.Llama's own loop, interleaved.

    python benchmarks/llamacpp_rate.py [--model FILE.gguf]

The other loop is what `Llama.generate` does for a token, without its sampler: fill the batch,
decode, take the argmax of the logits. Same file, threads, context and flash attention. The
engine's time is wall-clock after the prompt, turning tokens into text included.

Of two copies of the weights in one process the one loaded later was 2 to 5 % faster here, so half
of the processes load the engine first and half the other. Prints the median over all repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np
from common import open_engine, report

from edge_spec.models.source import Source

CONTEXT_TOKENS = 2048


def bare_decode(llama: llama_cpp.Llama, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Tokens and seconds of a loop that does nothing but decode."""
    llama.reset()
    llama.eval(prompt)
    tokens = []
    start = time.perf_counter()
    for _ in range(count):
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        token = int(np.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).argmax())
        tokens.append(token)
        llama._batch.set_batch([token], llama.n_tokens, False)
        llama._ctx.decode(llama._batch)
        llama.n_tokens += 1
    return tokens, time.perf_counter() - start


def compare(model: str, engine_first: bool, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a token of both, and of the engine outside the model, by repetition."""

    def open_llama() -> llama_cpp.Llama:
        return llama_cpp.Llama(
            str(Source(model, lambda what, fraction: None).path),
            n_ctx=CONTEXT_TOKENS,
            n_threads=options.threads,
            n_threads_batch=options.threads,
            flash_attn=True,
            verbose=False,
        )

    llama = None if engine_first else open_llama()
    results: dict[str, list[float]] = {"bare_ms": [], "plain_ms": [], "overhead_ms": []}
    with open_engine(
        model,
        runtime="llamacpp",
        drafter="none",
        threads=options.threads,
        context_length=CONTEXT_TOKENS,
        kv_type=options.kv_type,
    ) as engine:
        llama = llama or open_llama()
        prompt = engine.chat_prompt(options.prompt)
        for _ in range(options.repetitions):
            start = time.perf_counter()
            result = engine.generate(prompt, max_tokens=options.tokens)
            wall_ms = (time.perf_counter() - start) * 1e3 - result.stats.prompt_ms
            tokens, seconds = bare_decode(llama, prompt, len(result.tokens))
            if options.kv_type == "f16":
                assert tokens == [token.id for token in result.tokens], "the loops disagree"
            results["bare_ms"].append(seconds / len(tokens) * 1e3)
            results["plain_ms"].append(wall_ms / len(tokens))
            results["overhead_ms"].append(result.stats.overhead_ms / result.stats.rounds)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Write a long story about a lighthouse keeper.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--kv-type", help="f16 is what the other loop has")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=["engine", "llama"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        found = compare(arguments.model, arguments.worker == "engine", arguments)
        print(json.dumps(found))
        return

    results: dict[str, list[float]] = {}
    for process in range(arguments.processes):
        first = ("engine", "llama")[process % 2]
        command = [sys.executable, *sys.argv, "--worker", first]
        found = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        ratios = [
            bare / plain for bare, plain in zip(found["bare_ms"], found["plain_ms"], strict=True)
        ]
        print(f"{first} loaded first: {median(ratios):.1%}", flush=True)
        for name, values in {**found, "ratios": ratios}.items():
            results.setdefault(name, []).extend(values)
    print(f"llama_cpp.Llama    {median(results['bare_ms']):.3f} ms a token")
    print(
        f"plain decoding     {median(results['plain_ms']):.3f} ms a token: "
        f"{median(results['ratios']):.1%} of its rate"
    )
    print(f"outside the model  {median(results['overhead_ms']):.3f} ms a round")
    report(dict(results), arguments.json)


if __name__ == "__main__":
    main()
