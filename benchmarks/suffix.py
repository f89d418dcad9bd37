"""Suffix lookup against plain decoding, prompt by prompt, interleaved in one process.

    python benchmarks/suffix.py                                  # the prompts in prompts.jsonl
    python benchmarks/suffix.py --prompts spec_bench.jsonl --per-category 5
    python benchmarks/suffix.py --acceptance                     # acceptance by match length

Speed is of decoding alone (prefill excluded), tokens/s of a category = its tokens / its time,
median over the repetitions.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.drafters.suffix import SuffixIndex
from edge_spec.engine import Engine
from edge_spec.metrics import Stats


def acceptance(engine: Engine, prompts: list[dict[str, str]], num_tokens: int) -> None:
    """Replays plain outputs: how often the copied token is right, by length of the match."""
    seen, right = Counter[int](), Counter[int]()
    for entry in prompts:
        prompt = engine.chat_prompt(entry["prompt"])
        index = SuffixIndex()
        index.extend(prompt)
        for token in engine.generate(prompt, max_tokens=num_tokens).tokens:
            guess = index.continuation(1)
            seen[min(index.match.length, 32)] += 1
            right[min(index.match.length, 32)] += guess == [token.id]
            index.extend([token.id])
    for length in sorted(seen):
        print(f"match {length:3d}: {right[length] / seen[length]:.2f} of {seen[length]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--draft-n-max", type=int)
    parser.add_argument("--acceptance", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    by_category = defaultdict[str, list[dict[str, str]]](list)
    for entry in read_prompts(arguments.prompts):
        if arguments.per_category is None or (
            len(by_category[entry["category"]]) < arguments.per_category
        ):
            by_category[entry["category"]].append(entry)
    results = {}
    with open_engine(
        arguments.model, runtime=arguments.runtime, draft_n_max=arguments.draft_n_max
    ) as engine:
        if arguments.acceptance:
            engine.set_drafter("none")
            acceptance(engine, [e for es in by_category.values() for e in es], arguments.tokens)
            return
        print("category             plain   suffix  ratio   tokens/round  accepted")
        for category, entries in by_category.items():
            rates: dict[str, list[float]] = {"none": [], "suffix": []}
            last: list[Stats] = []
            for _ in range(arguments.repetitions):
                totals = {"none": [0, 0.0], "suffix": [0, 0.0]}
                last = []
                for entry in entries:
                    for drafter, total in totals.items():
                        engine.set_drafter(drafter)
                        stats = engine.chat(entry["prompt"], max_tokens=arguments.tokens).stats
                        total[0] += stats.predicted_n
                        total[1] += stats.predicted_ms
                        if drafter == "suffix":
                            last.append(stats)
                for drafter, (tokens, ms) in totals.items():
                    rates[drafter].append(tokens / ms * 1e3)
            ratio = median(b / a for a, b in zip(*rates.values(), strict=True))
            per_round = sum(s.predicted_n for s in last) / sum(s.rounds for s in last)
            guessed = sum(s.draft_n for s in last)
            accepted = sum(s.draft_n_accepted for s in last) / guessed if guessed else 0.0
            plain, suffix = median(rates["none"]), median(rates["suffix"])
            print(
                f"{category:18s} {plain:7.1f} {suffix:8.1f} {ratio:6.2f} "
                f"{per_round:13.2f} {accepted:10.0%}",
                flush=True,
            )
            results[category] = {
                "plain_per_second": plain,
                "predicted_per_second": suffix,
                "speedup": ratio,
                "mean_accepted_length": per_round,
                "acceptance_rate": accepted,
                "num_prompts": len(entries),
            }
    report({"categories": results}, arguments.json)


if __name__ == "__main__":
    main()
