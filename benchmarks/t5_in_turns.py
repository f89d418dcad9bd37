"""What drafting is worth to an encoder-decoder, by task: plain and drafted answers in turns.

    python benchmarks/t5_in_turns.py TARGET DRAFT PROMPTS [--drafter suffix,draft-model] [--times 3]

Two conversations share the target's weights: one decodes plain, the other one drafts as the policy
decides. Each prompt is answered greedily by both, by the one first that was second before. A time
is one run over all prompts; the first one begins with what the cache holds of the pair. Ratios are
of sums over a task's prompts: of the answers alone (`decode`), and of all of it, with the source
read by the target and, where it drafts, by the draft (`whole`), medians over the times prompt by
prompt.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from common import report

import edge_spec
from edge_spec.text.prompt_files import Prompt, read_prompts


def answered(engine: edge_spec.Engine, prompt: Prompt, max_tokens: int) -> tuple[Any, float]:
    started_s = time.perf_counter()
    found = engine.generate(prompt.text, max_tokens=max_tokens)
    return found, time.perf_counter() - started_s


def measured(asked: argparse.Namespace, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """One entry a time and prompt."""
    draft = None if asked.draft == "none" else asked.draft
    found: list[dict[str, Any]] = []
    with (
        edge_spec.load(asked.target, draft=draft, drafter=asked.drafter) as drafted,
        drafted.fork() as plain,
    ):
        plain.set_drafter("none")
        plain.generate("hello", max_tokens=4)
        for run in range(asked.times):
            for index, prompt in enumerate(prompts):
                order = [("plain", plain), ("drafted", drafted)]
                pair = {
                    name: answered(engine, prompt, asked.max_tokens)
                    for name, engine in order[:: -1 if (index + run) % 2 else 1]
                }
                found.append({"run": run, "task": prompt.category, "prompt": index, **_row(pair)})
    return found


def _row(pair: dict[str, tuple[Any, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, (answer, seconds) in pair.items():
        row[f"{name}_decode_s"] = answer.stats.predicted_ms / 1e3
        row[f"{name}_whole_s"] = seconds
    stats = pair["drafted"][0].stats
    texts = [[token.id for token in answer.tokens] for answer, _ in pair.values()]
    return row | {
        "differs": texts[0] != texts[1],
        "tokens": stats.predicted_n,
        "rounds": stats.rounds,
        "drafted": stats.draft_n,
        "accepted": stats.draft_n_accepted,
        "plain_rounds": stats.plain_rounds,
        "by_drafter": {name: list(each) for name, each in stats.drafted_rounds.items()},
    }


def tables(rows: list[dict[str, Any]]) -> str:
    """Of each time against the median plain time of each prompt, and of the medians."""
    runs = sorted({row["run"] for row in rows})
    lines = [
        "| task | accepted | tokens a round | plain rounds | decode | whole | by time, whole |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for task in (*dict.fromkeys(row["task"] for row in rows), "all"):
        own = [row for row in rows if task in (row["task"], "all")]
        count = {key: sum(row[key] for row in own) for key in _COUNTS}
        ratios = [_seconds(own, "plain", part) / _seconds(own, "drafted", part) for part in _PARTS]
        plain_s = _seconds(own, "plain", "whole")
        by_time = [
            plain_s / _seconds([row for row in own if row["run"] == run], "drafted", "whole")
            for run in runs
        ]
        lines.append(
            f"| {task} | {count['accepted'] / max(count['drafted'], 1):.0%} of "
            f"{count['drafted']} | {count['tokens'] / count['rounds']:.2f} | "
            f"{count['plain_rounds'] / count['rounds']:.0%} | {ratios[0]:.2f} | {ratios[1]:.2f} | "
            f"{' '.join(f'{ratio:.2f}' for ratio in by_time)} |"
        )
    first = [row for row in rows if row["run"] == 0]
    rate = sum(row["tokens"] for row in first) / _seconds(rows, "plain", "decode")
    differing = sum(row["differs"] for row in rows)
    return "\n".join(
        [*lines, f"{differing} of {len(rows)} texts differ; plain {rate:.1f} tokens/s"]
    )


def _seconds(rows: list[dict[str, Any]], who: str, part: str) -> float:
    """The sum over prompts of the median over times."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        by_prompt[row["prompt"]].append(row[f"{who}_{part}_s"])
    return sum(map(median, by_prompt.values()))


_PARTS = ("decode", "whole")
_COUNTS = ("accepted", "drafted", "tokens", "rounds", "plain_rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target")
    parser.add_argument("draft", help="or none")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--each", type=int, help="prompts of a category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument(
        "--warm", action="store_true", help="the first answer of all is not counted"
    )
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    asked = parser.parse_args()
    rows = measured(asked, read_prompts(asked.prompts, asked.each))
    print(tables(rows))
    report({"t5_in_turns": rows}, asked.out)


if __name__ == "__main__":
    main()
