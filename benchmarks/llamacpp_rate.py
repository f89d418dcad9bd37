"""Plain decoding on the llama.cpp runtime against llama_cpp.Llama's own loop, interleaved.

    python benchmarks/llamacpp_rate.py [--model FILE.gguf]

The other loop is what `Llama.generate` does for a token, without its sampler: fill the batch,
decode, take the argmax of the logits. Same file, threads, context and flash attention. The
engine's time is wall-clock after the prompt, turning tokens into text included.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import median

import llama_cpp
import numpy as np
from common import open_engine, report

from edge_spec.sources import Source

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Write a long story about a lighthouse keeper.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    bare_ms, plain_ms, overhead_ms = [], [], []
    with open_engine(
        arguments.model,
        runtime="llamacpp",
        drafter="none",
        threads=arguments.threads,
        context_length=CONTEXT_TOKENS,
    ) as engine:
        llama = llama_cpp.Llama(
            str(Source(arguments.model, lambda what, fraction: None).path),
            n_ctx=CONTEXT_TOKENS,
            n_threads=arguments.threads,
            n_threads_batch=arguments.threads,
            flash_attn=True,
            verbose=False,
        )
        prompt = engine.chat_prompt(arguments.prompt)
        for _ in range(arguments.repetitions):
            start = time.perf_counter()
            result = engine.generate(prompt, max_tokens=arguments.tokens)
            wall_ms = (time.perf_counter() - start) * 1e3 - result.stats.prompt_ms
            tokens, seconds = bare_decode(llama, prompt, len(result.tokens))
            assert tokens == [token.id for token in result.tokens], "the loops disagree"
            bare_ms.append(seconds / len(tokens) * 1e3)
            plain_ms.append(wall_ms / len(tokens))
            overhead_ms.append(result.stats.overhead_ms / result.stats.rounds)
    ratios = [bare / plain for bare, plain in zip(bare_ms, plain_ms, strict=True)]
    print(f"llama_cpp.Llama    {median(bare_ms):.3f} ms a token")
    print(f"plain decoding     {median(plain_ms):.3f} ms a token: {median(ratios):.1%} of its rate")
    print(f"outside the model  {median(overhead_ms):.3f} ms a round")
    results = {"bare_ms": bare_ms, "plain_ms": plain_ms, "overhead_ms": overhead_ms}
    report({"ratio": median(ratios), **results}, arguments.json)


if __name__ == "__main__":
    main()
