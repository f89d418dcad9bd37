"""What the smaller T5 of train_t5.py is worth to the larger one, by task.

    python benchmarks/t5_pair.py OUT [--runtime ort] [--drafter draft-model,suffix]

OUT: as train_t5.py wrote it. Every draft token is verified, whether or not that pays: acceptance
and tokens a round do not depend on the machine. All texts are compared with plain decoding's. What
it is worth in time: `edge-spec bench OUT/large --draft OUT/small --prompts OUT/prompts.jsonl`.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path

from edge_spec import Engine, load
from edge_spec.text.prompt_files import Prompt, read_prompts

_MAX_TOKENS = 48


def answers(engine: Engine, prompts: list[Prompt]) -> list[str]:
    return [engine.generate(each.text, max_tokens=_MAX_TOKENS).text for each in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--drafter", default="draft-model")
    asked = parser.parse_args()
    prompts = read_prompts(asked.out / "prompts.jsonl")
    target, draft = (str(asked.out / name) for name in ("large", "small"))
    with load(target, runtime=asked.runtime, drafter="none") as plain:
        expected = answers(plain, prompts)
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
    options = {"draft": draft, "draft_runtime": asked.runtime, "drafter": asked.drafter}
    with (
        load(target, runtime=asked.runtime, **options) as engine,
        engine.verifying_all_draft_tokens(),
    ):
        for prompt, text in zip(prompts, expected, strict=True):
            found = engine.generate(prompt.text, max_tokens=_MAX_TOKENS)
            stats = found.stats
            seen = (stats.draft_n, stats.draft_n_accepted, stats.predicted_n, stats.rounds)
            new = (*seen, int(found.text == text))
            for name in (prompt.category, "all"):
                counts[name] = [a + b for a, b in zip(counts[name], new, strict=True)]
    print("| task | draft tokens | accepted | tokens a round | texts equal |")
    print("|---|---|---|---|---|")
    for name, (drafted, accepted, tokens, rounds, equal) in counts.items():
        total = sum(name in (each.category, "all") for each in prompts)
        share = f"{accepted / max(drafted, 1):.0%}"
        print(f"| {name} | {drafted} | {share} | {tokens / rounds:.2f} | {equal} of {total} |")


if __name__ == "__main__":
    sys.exit(main())
