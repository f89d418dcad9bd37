"""Where the time of every round goes: what the policy forecast beside what was measured.

    python benchmarks/round_account.py TARGET DRAFT PROMPTS [--each 4] [--times 2]

As t5_in_turns.py asks: each prompt is answered by a plain conversation and by one that drafts, in
turns. A row of the first table is a task: what its rounds took, beside plain rounds for as many
tokens, and what of that was rows of the target, drafting, reading by the draft. A row of the second
one is a kind of round: its drafter (none: plain), its rows, and whether a model had drafted just
before its pass; the pass as forecast and as measured (median, mean), drafting, tokens as expected
and as they came, and what a round of the kind gained over plain ones, in plain rounds. Milliseconds
a round. "over 1.15": passes that took more than 1.15 times the median of their kind.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from common import report

import edge_spec
from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.core.metrics import RoundStats
from edge_spec.text.prompt_files import Prompt, read_prompts

Entry = dict[str, Any]


def adaptive(policy: Any) -> AdaptivePolicy:
    while not isinstance(policy, AdaptivePolicy):
        policy = policy._policy
    return policy


def watch(policy: Any, keep: Callable[[Entry], None], *, drafts: bool) -> None:
    """Keeps an entry of each round that a policy observes, with its forecast where it drafts."""
    observe = policy.observe
    forecast: Entry = {}

    def observed(stats: RoundStats) -> None:
        entry = {
            "rows": stats.num_rows,
            "tokens": stats.num_tokens,
            "forward_s": stats.forward_s,
            "draft_s": stats.draft_s,
            "total_s": stats.total_s,
        }
        keep(entry | forecast)
        observe(stats)

    policy.observe = observed
    if not drafts:
        return
    inner = adaptive(policy)
    choose = inner.choose

    def chosen(*asked: Any) -> Any:
        plan = choose(*asked)
        rows = len(plan.tree)
        forecast.update(
            drafter=inner._chosen,
            forecast_s=inner.costs.at(rows),
            drafted=sum(len(tree) - 1 for _, tree in inner._asked.values()),
            modelled=not inner._free.issuperset(inner._asked),
            expected=sum(plan.values) or 1.0,
        )
        return plan

    inner.choose = chosen  # type: ignore[method-assign]


def measured(asked: argparse.Namespace, prompts: list[Prompt]) -> tuple[list[Entry], list[Entry]]:
    """All rounds, and all answers."""
    rounds: list[Entry] = []
    answers: list[Entry] = []
    now: Entry = {}
    with (
        edge_spec.load(asked.target, draft=asked.draft, drafter=asked.drafter) as drafted,
        drafted.fork() as plain,
    ):
        plain.set_drafter("none")
        plain.generate("hello", max_tokens=4)
        for engine in (plain, drafted):
            watch(
                engine._drafting.speculation.policy,
                lambda entry: rounds.append(now | entry),
                drafts=engine is drafted,
            )
        for run in range(asked.times):
            for index, prompt in enumerate(prompts):
                order = [("plain", plain), ("drafted", drafted)]
                for who, engine in order[:: -1 if (index + run) % 2 else 1]:
                    now = {"who": who, "run": run, "task": prompt.category, "prompt": index}
                    started_s = time.perf_counter()
                    found = engine.generate(prompt.text, max_tokens=asked.max_tokens)
                    stats = found.stats
                    answers.append(
                        now
                        | {
                            "whole_s": time.perf_counter() - started_s,
                            "decode_s": stats.predicted_ms / 1e3,
                            "prompt_s": stats.prompt_ms / 1e3,
                            "ids": [token.id for token in found.tokens],
                        }
                    )
    return rounds, answers


def by_task(rounds: list[Entry], answers: list[Entry], plain_s: float) -> str:
    lines = [
        "| task | run | decode | whole | tokens | rounds | their first rows | further rows | "
        "drafting | reading |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, run in dict.fromkeys((each["task"], each["run"]) for each in answers):
        own = [each for each in rounds if (each["task"], each["run"]) == (task, run)]
        own = [each for each in own if each["who"] == "drafted"]

        def total(who: str, what: str, task: str = task, run: int = run) -> float:
            return sum(
                each[what]
                for each in answers
                if (each["who"], each["task"], each["run"]) == (who, task, run)
            )

        ratios = [total("plain", part) / total("drafted", part) for part in ("decode_s", "whole_s")]
        first_s = plain_s * len(own)
        draft_s = sum(each["draft_s"] for each in own)
        further_s = sum(each["total_s"] for each in own) - draft_s - first_s
        reading_s = total("drafted", "prompt_s") - total("plain", "prompt_s")
        parts = (first_s, further_s, draft_s, reading_s)
        lines.append(
            f"| {task} | {run} | {ratios[0]:.2f} | {ratios[1]:.2f} | "
            f"{sum(each['tokens'] for each in own)} | {len(own)} | "
            + " | ".join(f"{1e3 * seconds:.0f}" for seconds in parts)
            + " |"
        )
    return "\n".join(lines)


def by_kind(rounds: list[Entry], plain_s: float) -> str:
    kinds: dict[tuple[str, int, bool], list[Entry]] = defaultdict(list)
    for each in rounds:
        drafter = "plain" if each["who"] == "plain" else each["drafter"] or "none"
        kinds[drafter, each["rows"], each.get("modelled", False)].append(each)
    lines = [
        "| drafter | rows | after a draft | rounds | forecast | median | mean | over 1.15 | "
        "drafting | drafted | expected | tokens | gain |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (drafter, rows, modelled), own in sorted(kinds.items()):
        passes = [each["forward_s"] for each in own]
        usual = median(passes)
        forecast = mean(each.get("forecast_s", 0.0) for each in own)
        lines.append(
            f"| {drafter} | {rows} | {'yes' if modelled else 'no'} | {len(own)} | "
            f"{1e3 * forecast:.1f} | {1e3 * usual:.1f} | {1e3 * mean(passes):.1f} | "
            f"{mean(taken > 1.15 * usual for taken in passes):.0%} | "
            f"{1e3 * mean(each['draft_s'] for each in own):.1f} | "
            f"{mean(each.get('drafted', 0) for each in own):.1f} | "
            f"{mean(each.get('expected', 1.0) for each in own):.2f} | "
            f"{mean(each['tokens'] for each in own):.2f} | "
            f"{mean(each['tokens'] - each['total_s'] / plain_s for each in own):+.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--each", type=int, help="prompts of a category")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--task", help="rounds of this one alone, in the second table")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    asked = parser.parse_args()
    rounds, answers = measured(asked, read_prompts(asked.prompts, asked.each))
    plain_s = median(each["total_s"] for each in rounds if each["who"] == "plain")
    texts = defaultdict(set)
    for each in answers:
        texts[each["prompt"]].add(tuple(each["ids"]))
    print(by_task(rounds, answers, plain_s))
    print(
        f"\na plain round {1e3 * plain_s:.1f} ms; {sum(len(found) > 1 for found in texts.values())}"
        f" of {len(texts)} prompts with differing texts\n"
    )
    print(by_kind([each for each in rounds if asked.task in (None, each["task"])], plain_s))
    report({"round_account": {"rounds": rounds, "answers": answers}}, asked.out)


if __name__ == "__main__":
    main()
