"""Default drafting with and without a draft, in turns, prompt by prompt.

    python benchmarks/draft_in_turns.py smollm2 DRAFT [--each 1] [--max-tokens 96]

Both engines stay open; each prompt is answered greedily by the one and the other, and by the other
first where the number of the prompt is odd. Prints tokens/s of both, their ratio by category, and
how many texts differ.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

from common import report

import edge_spec
from edge_spec.text.prompt_files import Prompt, read_prompts


def measured(model: str, draft: str, prompts: list[Prompt], max_tokens: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    counts: dict[str, int] = defaultdict(int)
    drafted, accepted, differing = 0, 0, 0
    with edge_spec.load(model) as without, edge_spec.load(model, draft=draft) as with_it:
        for engine in (without, with_it):
            engine.chat("Say hello.", max_tokens=16)
        for index, prompt in enumerate(prompts):
            order = [(0, without), (1, with_it)]
            texts = {}
            for which, engine in order[:: -1 if index % 2 else 1]:
                answer = engine.chat(prompt.text, max_tokens=max_tokens)
                texts[which] = [token.id for token in answer.tokens]
                for name in ("all", prompt.category):
                    seconds[name][which] += answer.stats.predicted_ms / 1e3
                if which:
                    drafted += answer.stats.draft_n
                    accepted += answer.stats.draft_n_accepted
            differing += texts[0] != texts[1]
            for name in ("all", prompt.category):
                counts[name] += len(texts[0])
    for name, (plain, drafts) in seconds.items():
        rates = counts[name] / plain, counts[name] / drafts
        print(f"{name}: {rates[0]:.0f} and {rates[1]:.0f} tokens/s, {plain / drafts:.2f} times")
    print(f"{differing} of {len(prompts)} texts differ; {accepted} of {drafted} draft tokens right")
    return {"seconds": seconds, "tokens": counts, "differing": differing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("draft")
    parser.add_argument("--each", type=int, default=1, help="prompts of a category")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("prompts.jsonl"))
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts, arguments.each)
    found = measured(arguments.model, arguments.draft, prompts, arguments.max_tokens)
    report({"draft_in_turns": found}, arguments.out)


if __name__ == "__main__":
    main()
