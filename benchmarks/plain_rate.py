"""Plain decoding against bare `session.run` calls with bound buffers, interleaved.

    python benchmarks/plain_rate.py

Both decode the same prompt greedily with the same InferenceSession; the bare loop does nothing
but update its inputs, run, and take the argmax. The engine's time is wall-clock after the prompt,
turning tokens into text included. Prints medians over the repetitions, and the engine's time a
round outside the model.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
from common import open_engine, report

from edge_spec.engine.engine import Engine


def bare_decode(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], float]:
    """Tokens and seconds of a minimal loop over the engine's own InferenceSession."""
    inference, config = engine.parts.model._inference, engine.parts.model.config
    session = engine.parts.model.open_session()
    session.prefill(prompt[:-1])
    session._reserve(count + 2)  # no growth while it is timed
    length = session.length
    binding = inference.io_binding()
    session._cache.bind(binding)
    token, position = np.array([[prompt[-1]]]), np.zeros((1, 2), np.int64)  # attended twice
    last, total = np.zeros(1, np.int32), np.zeros((), np.int32)
    zeros = np.zeros(2 * session._cache.capacity, np.float32)
    logits = np.empty((1, config.vocab_size), np.float32)
    for name, array in (
        ("input_ids", token),
        ("attention_rows", np.zeros(2, np.int64)),
        ("kept_rows", np.zeros(1, np.int64)),
        ("position_ids", position),
        ("seqlens_k", last),
        ("total_sequence_length", total),
        ("logit_rows", np.zeros(1, np.int64)),
    ):
        binding.bind_cpu_input(name, array)
    binding.bind_ortvalue_output("logits", onnxruntime.OrtValue.ortvalue_from_numpy(logits))
    tokens = []
    start = time.perf_counter()
    for i in range(count):
        position[...] = length + i
        last[...] = length + i + 1
        total[...] = length + i + 2
        bias = zeros[: 2 * (length + i + 2)].reshape(1, 1, 2, -1)
        binding.bind_cpu_input("attention_bias", bias)
        inference.run_with_iobinding(binding)
        token[...] = logits.argmax()
        tokens.append(int(token[0, 0]))
    seconds = time.perf_counter() - start
    session.close()
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="Write a long story about a lighthouse keeper.")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    bare_ms, plain_ms, overhead_ms, draft_ms = [], [], [], []
    with open_engine(arguments.model, drafter="none") as engine:
        prompt = engine.chat_prompt(arguments.prompt)
        for _ in range(arguments.repetitions):
            start = time.perf_counter()
            result = engine.generate(prompt, max_tokens=arguments.tokens)
            wall_ms = (time.perf_counter() - start) * 1e3 - result.stats.prompt_ms
            tokens, seconds = bare_decode(engine, prompt, len(result.tokens))
            assert tokens == [token.id for token in result.tokens], "the loops disagree"
            bare_ms.append(seconds / len(tokens) * 1e3)
            plain_ms.append(wall_ms / len(tokens))
            overhead_ms.append(result.stats.overhead_ms / result.stats.rounds)
        engine.set_drafter("suffix")
        for _ in range(arguments.repetitions):
            stats = engine.generate(prompt, max_tokens=arguments.tokens).stats
            draft_ms.append(stats.draft_ms / stats.rounds)
    ratio = median(b / p for b, p in zip(bare_ms, plain_ms, strict=True))
    print(f"bare loop          {median(bare_ms):.3f} ms a token")
    print(f"plain decoding     {median(plain_ms):.3f} ms a token: {ratio:.1%} of the bare rate")
    print(f"outside the model  {median(overhead_ms):.3f} ms a round")
    print(f"suffix drafting    {median(draft_ms):.3f} ms a round")
    report(
        {
            "bare_ms": bare_ms,
            "plain_ms": plain_ms,
            "ratio": ratio,
            "overhead_ms": overhead_ms,
            "draft_ms": draft_ms,
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
