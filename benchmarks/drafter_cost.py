"""What drafting costs a round, against a plain step, at short and long context.

    python benchmarks/drafter_cost.py --text FILE [--contexts 256 8000]

The text is the prompt, cut to each context; every drafter goes on from there for some rounds
under the default policy, interleaved with plain decoding on the same cache. Cost is the time of
`propose` and `observe`, the share is of a plain round's time there.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median

from common import open_engine, report

DRAFTERS = ("suffix", "recycling", "lookahead", "jacobi", "suffix,recycling")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 8000])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    results: dict[str, dict[str, dict[str, float]]] = {}
    with open_engine(arguments.model, runtime=arguments.runtime, drafter="none") as engine:
        text = arguments.text.read_text(encoding="utf-8")
        tokens = engine.parts.text.tokenizer.encode(text)
        for context in arguments.contexts:
            prompt = tokens[:context]
            engine.generate(prompt, max_tokens=1)
            plain_ms: list[float] = []
            draft_ms: dict[str, list[float]] = {names: [] for names in arguments.drafters}
            for _ in range(arguments.repetitions):
                for names in ("none", *arguments.drafters):
                    engine.set_drafter(names)
                    stats = engine.generate(prompt, max_tokens=arguments.tokens).stats
                    if names == "none":
                        plain_ms.append(stats.predicted_ms / stats.rounds)
                    else:
                        draft_ms[names].append(stats.draft_ms / stats.rounds)
            step_ms = median(plain_ms)
            print(f"\n{len(prompt)} tokens of context: a plain round takes {step_ms:.1f} ms")
            results[str(len(prompt))] = {
                names: {"draft_ms": median(times), "share": median(times) / step_ms}
                for names, times in draft_ms.items()
            }
            for names, cost in results[str(len(prompt))].items():
                print(f"{names:18s} {cost['draft_ms']:.3f} ms a round, {cost['share']:.1%}")
    report({"contexts": results}, arguments.json)


if __name__ == "__main__":
    main()
