"""Every drafter against plain decoding, by category and by rows a round, and how far its
confidence can be trusted.

    python benchmarks/drafters.py                                   # the prompts in prompts.jsonl
    python benchmarks/drafters.py --prompts FILE --per-category 4 --rows 1 3 5 7 --json OUT
    python benchmarks/drafters.py --drafters suffix suffix,recycling

Each round verifies as many of the likeliest rows as allowed, however unlikely: what a drafter can
do with a budget, not what the policy would choose. Prompt by prompt, interleaved with plain
decoding in one process; decoding alone. Reliability counts every row that a drafter proposed and
the text decided: Brier score, and expected calibration error over ten bins.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.control.policy import FixedPolicy
from edge_spec.drafters.lookahead import WindowSize
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine import Engine
from edge_spec.metrics import Stats
from edge_spec.model import Forward
from edge_spec.plugins import load_drafters
from edge_spec.speculation import Speculation, Speculator
from edge_spec.tree import TokenTree, Verdict

DRAFTERS = ("suffix", "recycling", "lookahead", "jacobi", "suffix,recycling")
NUM_BINS = 10


class Recorder:
    """Another drafter, whose confidence and outcomes are written down."""

    def __init__(self, drafter: Drafter, outcomes: list[tuple[float, bool]]) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._outcomes = outcomes
        self._tree: TokenTree | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._tree = self._drafter.propose(pending, budget)
        return self._tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        if self._tree is not None:
            for row, right in self._tree.followed(verdict.tokens):
                self._outcomes.append((float(self._tree.confidence[row]), right))
        self._tree = None
        self._drafter.observe(tree, out, verdict)


@dataclass(frozen=True)
class FixedRows(Speculator):
    """Composes "NAMES@ROWS"."""

    outcomes: dict[str, list[tuple[float, bool]]] | None = None

    def choose(self, names: str) -> Speculation:
        names, _, rows = names.partition("@")
        if not rows:
            return super().choose(names)
        num_rows = int(rows)
        setting = replace(
            self.setting, draft_n_max=num_rows, window=WindowSize.within(num_rows + 1)
        )
        speculation = self.compose(names, load_drafters(names, setting))
        assert self.outcomes is not None
        outcomes = self.outcomes[f"{names}@{rows}"]
        drafters = [Recorder(drafter, outcomes) for drafter in speculation.drafters]
        policy = FixedPolicy(num_rows, min_confidence=0.0, trees=self.capabilities.trees)
        return replace(speculation, drafters=drafters, policy=policy)


def reliability(outcomes: list[tuple[float, bool]]) -> dict[str, Any]:
    """Brier score, expected calibration error, and of each bin its mean confidence and frequency
    of right guesses."""
    if not outcomes:
        return {"rows": 0}
    confidence, right = np.array(outcomes, np.float64).T
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    used = np.flatnonzero(counts)
    mean = np.bincount(bins, confidence, NUM_BINS)[used] / counts[used]
    frequency = np.bincount(bins, right, NUM_BINS)[used] / counts[used]
    return {
        "rows": len(outcomes),
        "brier": float(((confidence - right) ** 2).mean()),
        "expected_calibration_error": float(
            (np.abs(mean - frequency) * counts[used]).sum() / len(outcomes)
        ),
        "bins": [
            {"confidence": float(c), "right": float(f), "rows": int(n)}
            for c, f, n in zip(mean, frequency, counts[used], strict=True)
        ],
    }


def summary(stats: Sequence[Stats], plain: Sequence[Stats]) -> dict[str, float]:
    def rate(each: Sequence[Stats]) -> float:
        return sum(s.predicted_n for s in each) / sum(s.predicted_ms for s in each) * 1e3

    guessed = sum(s.draft_n for s in stats)
    return {
        "mean_accepted_length": sum(s.predicted_n for s in stats) / sum(s.rounds for s in stats),
        "acceptance_rate": sum(s.draft_n_accepted for s in stats) / guessed if guessed else 0.0,
        "predicted_per_second": rate(stats),
        "plain_per_second": rate(plain),
        "speedup": rate(stats) / rate(plain),
        "draft_ms_per_round": sum(s.draft_ms for s in stats) / sum(s.rounds for s in stats),
        "plain_step_ms": sum(s.predicted_ms for s in plain) / sum(s.rounds for s in plain),
    }


def measure(
    engine: Engine, cases: Sequence[str], entries: Sequence[dict[str, str]], num_tokens: int
) -> dict[str, list[Stats]]:
    """Statistics of each prompt, by case; "none" among them."""
    stats = defaultdict[str, list[Stats]](list)
    for entry in entries:
        for case in ("none", *cases):
            engine.set_drafter(case)
            stats[case].append(engine.chat(entry["prompt"], max_tokens=num_tokens).stats)
    return stats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 3, 5, 7])
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()

    by_category = defaultdict[str, list[dict[str, str]]](list)
    for entry in read_prompts(arguments.prompts):
        if arguments.per_category is None or (
            len(by_category[entry["category"]]) < arguments.per_category
        ):
            by_category[entry["category"]].append(entry)
    cases = [f"{names}@{rows}" for names in arguments.drafters for rows in arguments.rows]
    outcomes = defaultdict[str, list[tuple[float, bool]]](list)
    collected: dict[str, dict[str, list[Stats]]] = {}
    with open_engine(arguments.model, runtime=arguments.runtime, drafter="none") as engine:
        old = engine.parts.speculator
        engine.parts = replace(
            engine.parts,
            speculator=FixedRows(
                old.setting, old.capabilities, old.numerics, old.exact, outcomes=outcomes
            ),
        )
        for category, entries in by_category.items():
            collected[category] = measure(engine, cases, entries, arguments.tokens)
            print(f"\n{category}: tokens a round (ratio to plain)", flush=True)
            _print_table(arguments, collected[category])
    collected["all"] = defaultdict(list)
    for of_category in list(collected.values())[:-1]:
        for case, stats in of_category.items():
            collected["all"][case] += stats
    print("\nall: tokens a round (ratio to plain)")
    _print_table(arguments, collected["all"])
    print("\nreliability: rows, Brier score, expected calibration error")
    reliabilities = {case: reliability(outcomes[case]) for case in cases}
    for case, figures in reliabilities.items():
        if figures["rows"]:
            print(
                f"{case:22s} {figures['rows']:7d} {figures['brier']:.3f} "
                f"{figures['expected_calibration_error']:.3f}"
            )
    report(
        {
            "categories": {
                category: {case: summary(stats[case], stats["none"]) for case in cases}
                for category, stats in collected.items()
            },
            "reliability": reliabilities,
        },
        arguments.json,
    )


def _print_table(arguments: argparse.Namespace, stats: dict[str, list[Stats]]) -> None:
    print(f"{'':18s}" + "".join(f"{rows:>7d} rows   " for rows in arguments.rows))
    for names in arguments.drafters:
        cells = []
        for rows in arguments.rows:
            figures = summary(stats[f"{names}@{rows}"], stats["none"])
            cells.append(f"{figures['mean_accepted_length']:7.2f} ({figures['speedup']:.2f})")
        print(f"{names:18s}" + " ".join(cells), flush=True)


if __name__ == "__main__":
    main()
