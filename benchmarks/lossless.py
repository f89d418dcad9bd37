"""Greedy text with each drafter against greedy text without one.

    python benchmarks/lossless.py                          # the demo model, int4, default drafting
    python benchmarks/lossless.py --drafters suffix recycling lookahead jacobi
    python benchmarks/lossless.py --exact                  # bit for bit
    python benchmarks/lossless.py --quant fp32

Where they differ, the first differing token and the margin between the two candidates in the
plain run are printed: a margin within the model's measured noise is a near tie (design: a kernel
may give one row other logits than the same row in a wider pass).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.engine import Engine
from edge_spec.metrics import Stats
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
    parser.add_argument("--drafters", nargs="+", default=["auto"])
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--quant")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    prompts = read_prompts(arguments.prompts)[: arguments.count]
    results = {}
    with open_engine(
        arguments.model,
        runtime=arguments.runtime,
        quantization=arguments.quant,
        exact=arguments.exact,
        corpora=(arguments.corpus,) if arguments.corpus else (),
    ) as engine:
        plain = texts(engine, "none", prompts, arguments.tokens)
        num_tokens = sum(len(text) for text, _ in plain)
        for names in arguments.drafters:
            results[names] = compared(engine, prompts, plain, names, arguments.tokens)
            print(
                f"{names}: {len(prompts) - len(results[names]['differing'])} of {len(prompts)} "
                f"texts equal, {num_tokens} tokens, {results[names]['num_accepted']} accepted "
                f"guesses, {results[names]['near_ties']} near ties",
                flush=True,
            )
        noise = engine.parts.numerics
        print(
            f"noise measured at load: {noise.tie_margin:.4f} by width, "
            f"{noise.branch_margin:.4f} of branches"
        )
    report(
        {"num_prompts": len(prompts), "num_tokens": num_tokens, "drafters": results},
        arguments.json,
    )


def texts(
    engine: Engine, names: str, prompts: list[dict[str, str]], num_tokens: int
) -> list[tuple[list[int], Stats]]:
    engine.set_drafter(names)
    results = [engine.chat(entry["prompt"], max_tokens=num_tokens) for entry in prompts]
    return [([token.id for token in result.tokens], result.stats) for result in results]


def compared(
    engine: Engine,
    prompts: list[dict[str, str]],
    plain: list[tuple[list[int], Stats]],
    names: str,
    num_tokens: int,
) -> dict[str, Any]:
    """Where texts with these drafters leave the plain ones, and by which margin."""
    differing = []
    drafted = texts(engine, names, prompts, num_tokens)
    for entry, (expected, _), (text, _) in zip(prompts, plain, drafted, strict=True):
        if text == expected:
            continue
        at = int(np.argmin([a == b for a, b in zip(expected, text, strict=False)]))
        before = engine.chat_prompt(entry["prompt"]) + expected[:at]
        gap = margin(engine, before, expected[at], text[at])
        differing.append({"id": entry["id"], "token": at, "margin": gap})
        print(f"{names}, prompt {entry['id']}: differs at token {at}, margin {gap:.4f}")
    return {
        "num_accepted": sum(stats.draft_n_accepted for _, stats in drafted),
        "near_ties": sum(stats.near_ties for _, stats in drafted),
        "differing": differing,
    }


if __name__ == "__main__":
    main()
