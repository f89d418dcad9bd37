"""Greedy text with suffix lookup against greedy text without it.

    python benchmarks/lossless.py                          # the demo model, int4
    python benchmarks/lossless.py --exact                  # bit for bit
    python benchmarks/lossless.py --quant fp32

Where they differ, the first differing token and the margin between the two candidates in the
plain run are printed: a margin within the model's measured noise is a near tie (design: a kernel
may give one row other logits than the same row in a wider pass).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from common import OWN_PROMPTS, open_engines, read_prompts, report

from edge_spec.engine import Engine
from edge_spec.tree import TokenTree


def margin(engine: Engine, tokens: list[int], first: int, second: int) -> float:
    """Difference of two tokens' logits after `tokens`, scored as plain decoding scores them."""
    session = engine.parts.model.open_session()
    try:
        session.prefill(tokens[:-1])
        logits = session.forward(TokenTree.chain(tokens[-1])).logits[0]
        return float(abs(logits[first] - logits[second]))
    finally:
        session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--quant")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    prompts = read_prompts(arguments.prompts)[: arguments.count]
    differing, num_tokens, speculative = [], 0, 0
    with open_engines(
        arguments.model,
        ["none", "suffix"],
        runtime=arguments.runtime,
        quantization=arguments.quant,
        exact=arguments.exact,
    ) as (plain, drafted):
        noise = plain.parts.numerics.tie_margin
        for entry in prompts:
            texts = []
            for engine in (plain, drafted):
                result = engine.chat(entry["prompt"], max_tokens=arguments.tokens)
                texts.append([token.id for token in result.tokens])
            num_tokens += len(texts[0])
            speculative += drafted.last.stats.draft_n_accepted if drafted.last else 0
            if texts[0] == texts[1]:
                continue
            at = int(np.argmin([a == b for a, b in zip(*texts, strict=False)]))
            before = plain.chat_prompt(entry["prompt"]) + texts[0][:at]
            gap = margin(plain, before, texts[0][at], texts[1][at])
            differing.append({"id": entry["id"], "token": at, "margin": gap})
            print(f"prompt {entry['id']}: differs at token {at}, margin {gap:.4f}")
    print(
        f"{len(prompts) - len(differing)} of {len(prompts)} texts equal, {num_tokens} tokens, "
        f"{speculative} of them accepted guesses; noise measured at load {noise:.4f}"
    )
    report(
        {
            "num_prompts": len(prompts),
            "num_tokens": num_tokens,
            "num_accepted": speculative,
            "noise": noise,
            "differing": differing,
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
