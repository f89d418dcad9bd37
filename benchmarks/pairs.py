"""A draft on one runtime, a target on another: is the greedy text the target's own?

    python benchmarks/pairs.py [--draft DRAFT] [--target TARGET]

By default the demo model drafts for itself, quantized: ONNX int4 for GGUF Q4_0 and the reverse.
Prints for each pair how many texts are equal, the acceptance rate and the live rates. Where texts
differ, the first token and the margin of the target's plain choice.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report
from lossless import margin

PAIRS = (("ort", "llamacpp"), ("llamacpp", "ort"))  # draft, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft", default="smollm2")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--draft-n-max", type=int, default=4)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    prompts = read_prompts(arguments.prompts)[: arguments.count]
    results: list[dict[str, Any]] = []
    for draft, target in PAIRS:
        differing, rates, accepted, proposed = [], [], 0, 0
        with (
            open_engine(
                arguments.target, runtime=target, drafter="none", exact=arguments.exact
            ) as plain,
            open_engine(
                arguments.target,
                runtime=target,
                drafts=(arguments.draft,),
                draft_runtime=draft,
                draft_n_max=arguments.draft_n_max,
                exact=arguments.exact,
            ) as pair,
        ):
            for entry in prompts:
                texts = []
                for engine in (plain, pair):
                    result = engine.chat(entry["prompt"], max_tokens=arguments.tokens)
                    texts.append([token.id for token in result.tokens])
                    rates.append(result.stats.predicted_per_second)
                accepted += result.stats.draft_n_accepted
                proposed += result.stats.draft_n
                if texts[0] != texts[1]:
                    at = int(np.argmin([a == b for a, b in zip(*texts, strict=False)]))
                    before = plain.chat_prompt(entry["prompt"]) + texts[0][:at]
                    gap = margin(plain, before, texts[0][at], texts[1][at])
                    differing.append({"id": entry["id"], "token": at, "margin": gap})
                    print(f"prompt {entry['id']}: differs at token {at}, margin {gap:.4f}")
            noise = plain.parts.numerics.tie_margin
        print(
            f"{draft} drafts for {target}: {len(prompts) - len(differing)} of {len(prompts)} texts "
            f"equal, {accepted} of {proposed} guesses accepted, median "
            f"{median(rates[::2]):.0f} -> {median(rates[1::2]):.0f} tokens/s, noise {noise:.3f}"
        )
        results.append({"draft": draft, "target": target, "differing": differing})
    report({"pairs": results}, arguments.json)


if __name__ == "__main__":
    main()
