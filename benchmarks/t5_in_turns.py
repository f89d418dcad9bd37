"""What drafting is worth to an encoder-decoder, by task: plain and drafted answers in turns.

    python benchmarks/t5_in_turns.py TARGET DRAFT PROMPTS [--drafter suffix,draft-model] [--times 3]

Two conversations share the target's weights: one decodes plain, the other one drafts as the policy
decides. Each prompt is answered greedily by both, by the one first that was second before. A time
is one run over all prompts; the first one begins with what the cache holds of the pair. Ratios are
of sums over a task's prompts: of the answers alone (`decode`), and of all of it, with the source
read by the target and, where it drafts, by the draft (`whole`).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from common import report

import edge_spec
from edge_spec.text.prompt_files import Prompt, read_prompts


def answered(engine: edge_spec.Engine, prompt: Prompt, max_tokens: int) -> tuple[Any, float]:
    started_s = time.perf_counter()
    found = engine.generate(prompt.text, max_tokens=max_tokens)
    return found, time.perf_counter() - started_s


def measured(asked: argparse.Namespace, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """By time: counts and seconds of each task."""
    draft = None if asked.draft == "none" else asked.draft
    times = []
    with edge_spec.load(asked.target, draft=draft, drafter=asked.drafter) as drafted:
        with drafted.fork() as plain:
            plain.set_drafter("none")
            for engine in (plain, drafted) if asked.warm else (plain,):
                engine.generate("hello", max_tokens=4)
            for run in range(asked.times):
                times.append(_one_time(plain, drafted, prompts, run, asked.max_tokens))
                _print(run, times[-1])
    return times


def _one_time(
    plain: edge_spec.Engine,
    drafted: edge_spec.Engine,
    prompts: list[Prompt],
    run: int,
    max_tokens: int,
) -> dict[str, Any]:
    tasks: dict[str, Counter[str]] = defaultdict(Counter)
    for index, prompt in enumerate(prompts):
        found = {}
        order = [("plain", plain), ("drafted", drafted)]
        for name, engine in order[:: -1 if (index + run) % 2 else 1]:
            found[name] = answered(engine, prompt, max_tokens)
        counts: Counter[str] = Counter()
        for name, (answer, seconds) in found.items():
            counts[f"{name}_decode_s"] = answer.stats.predicted_ms / 1e3
            counts[f"{name}_whole_s"] = seconds
        stats = found["drafted"][0].stats
        texts = [[token.id for token in answer.tokens] for answer, _ in found.values()]
        counts += Counter(
            prompts=1,
            differing=int(texts[0] != texts[1]),
            tokens=stats.predicted_n,
            rounds=stats.rounds,
            drafted=stats.draft_n,
            accepted=stats.draft_n_accepted,
            plain_rounds=stats.plain_rounds,
        )
        for name in (prompt.category, "all"):
            tasks[name] += counts
    return {name: dict(counts) for name, counts in tasks.items()}


def _print(run: int, tasks: dict[str, Any]) -> None:
    print(f"\n{run + 1}. | task | accepted | tokens a round | plain rounds | decode | whole |")
    for name, counts in tasks.items():
        count: Counter[str] = Counter(counts)
        ratios = [count[f"plain_{part}_s"] / count[f"drafted_{part}_s"] for part in _PARTS]
        print(
            f"| {name} | {count['accepted'] / max(count['drafted'], 1):.0%} of "
            f"{count['drafted']} | {count['tokens'] / count['rounds']:.2f} | "
            f"{count['plain_rounds'] / count['rounds']:.0%} | {ratios[0]:.2f} | {ratios[1]:.2f} |"
        )
    all_ = Counter(tasks["all"])
    rate = all_["tokens"] / all_["plain_decode_s"]
    print(f"{all_['differing']} of {all_['prompts']} texts differ; plain {rate:.1f} tokens/s")


_PARTS = ("decode", "whole")


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
    report({"t5_in_turns": measured(asked, read_prompts(asked.prompts, asked.each))}, asked.out)


if __name__ == "__main__":
    main()
