"""Every drafter against plain decoding, by category, and how far its confidence can be trusted.

    python benchmarks/drafters.py                             # what a user gets: the default policy
    python benchmarks/drafters.py --drafters suffix recycling,suffix --prompts FILE
    python benchmarks/drafters.py --rows 1 3 5 7 --per-category 4 --json OUT
    python benchmarks/drafters.py --drafters auto suffix@3:0.4 suffix@15:0.5  # a sweep

With --rows each round scores that many of the likeliest rows, however unlikely they are: what a
drafter does with a budget. NAMES@ROWS:CONFIDENCE is a fixed policy that scores at most ROWS
rows, each reached with this chance at least. Draft tokens branch only where the runtime was
measured to allow it, or with --branches. Prompt by prompt, interleaved with plain decoding in one
process, each case keeping what it learns; times are of decoding alone, the median over repetitions.
Reliability counts every row that a drafter proposed and the text decided: Brier
score, and expected calibration error over ten bins.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import OWN_PROMPTS, compose_by, open_engine, read_prompts, report

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.factory import load_drafters
from edge_spec.drafters.jacobi import WindowSize
from edge_spec.drafters.protocol import GREEDY, Budget, Drafter
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.scheduler.policy import FixedPolicy

DRAFTERS = ("suffix", "recycling", "lookahead", "jacobi", "suffix,recycling")
NUM_BINS = 10

Outcomes = list[tuple[float, bool]]  # confidence, and whether the draft token was right
Repetitions = dict[str, list[list[Stats]]]  # by case: for each repetition, of each prompt


class Recorder(Drafter):
    """Another drafter, whose confidence and outcomes are written down."""

    def __init__(self, drafter: Drafter, outcomes: Outcomes) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._outcomes = outcomes
        self._tree: TokenTree | None = None

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        self._drafter.begin(prompt, sampler)

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
class FixedRows(SpeculationFactory):
    """Composes "NAMES@ROWS" and "NAMES@ROWS:CONFIDENCE", and records outcomes."""

    outcomes: dict[str, Outcomes] = field(default_factory=lambda: defaultdict(list))
    branches: bool = False
    folder: Path = Path()  # of answers, a file for each case
    made: dict[str, Speculation] = field(default_factory=dict)  # by case: each is a session

    def choose(self, names: str) -> Speculation:
        if names not in self.made:
            self.made[names] = self._make(names)
        return self.made[names]

    def _make(self, case: str) -> Speculation:
        names = case
        names, _, rows = names.partition("@")
        setting = replace(self.setting, answers_file=self.folder / f"{case}.json")
        if not rows:
            return self._recorded(case, self.compose(load_drafters(names, setting)))
        rows, _, confidence = rows.partition(":")
        num_rows = int(rows)
        window = WindowSize.within(num_rows + 1)
        setting = replace(setting, draft_n_max=num_rows, window=window)
        speculation = self.compose(load_drafters(names, setting))
        policy = FixedPolicy(
            num_rows,
            min_confidence=float(confidence or 0.0),
            branches=self.branches or self.batch_invariance.branch_invariant,
        )
        return self._recorded(case, replace(speculation, policy=policy))

    def _recorded(self, case: str, speculation: Speculation) -> Speculation:
        recorded = [Recorder(drafter, self.outcomes[case]) for drafter in speculation.drafters]
        return replace(speculation, drafters=recorded)


def reliability(outcomes: Outcomes) -> dict[str, Any]:
    """Brier score, expected calibration error, and of each bin its mean confidence and frequency
    of right draft tokens."""
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


def rate(stats: Sequence[Stats]) -> float:
    return sum(s.predicted_n for s in stats) / sum(s.predicted_ms for s in stats) * 1e3


def summary(repetitions: Repetitions, case: str) -> dict[str, float]:
    drafted, plain = repetitions[case], repetitions["none"]
    stats = drafted[-1]
    draft_n = sum(s.draft_n for s in stats)
    num_rounds = sum(s.rounds for s in stats)
    return {
        "mean_accepted_length": sum(s.predicted_n for s in stats) / num_rounds,
        "acceptance_rate": sum(s.draft_n_accepted for s in stats) / draft_n if draft_n else 0.0,
        "predicted_per_second": median(map(rate, drafted)),
        "plain_per_second": median(map(rate, plain)),
        "speedup": median(rate(d) / rate(p) for d, p in zip(drafted, plain, strict=True)),
        "draft_ms_a_round": sum(s.draft_ms for s in stats) / num_rounds,
        "near_ties": sum(s.near_ties for s in stats),
        "rows_a_round": draft_n / num_rounds,
    }


def measure(
    engine: Engine,
    cases: Sequence[str],
    entries: Sequence[dict[str, str]],
    arguments: Any,
) -> Repetitions:
    """Statistics by case, "none" among them."""
    repetitions: Repetitions = {case: [] for case in ("none", *cases)}
    for _ in range(arguments.repetitions):
        for of_case in repetitions.values():
            of_case.append([])
        for entry in entries:
            for case, of_case in repetitions.items():
                engine.set_drafter(case)
                stats = engine.chat(entry["prompt"], max_tokens=arguments.tokens).stats
                of_case[-1].append(stats)
    return repetitions


def arguments_of_the_command() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--drafters", nargs="+", default=DRAFTERS)
    parser.add_argument("--branches", action="store_true", help="even where they change numbers")
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    arguments = arguments_of_the_command()
    by_category = defaultdict[str, list[dict[str, str]]](list)
    for entry in read_prompts(arguments.prompts):
        if arguments.per_category is None or (
            len(by_category[entry["category"]]) < arguments.per_category
        ):
            by_category[entry["category"]].append(entry)
    suffixes = [f"@{rows}" for rows in arguments.rows] if arguments.rows else [""]
    cases = [names + suffix for names in arguments.drafters for suffix in suffixes]
    summaries: dict[str, dict[str, dict[str, float]]] = {}
    everything: Repetitions = {}
    corpora = (arguments.corpus,) if arguments.corpus else ()
    with (
        TemporaryDirectory() as folder,
        open_engine(arguments.model, runtime=arguments.runtime, corpora=corpora) as engine,
    ):
        own = engine.parts.speculation_factory
        fixed = FixedRows(
            own.setting,
            own.capabilities,
            own.batch_invariance,
            costs=own.costs,
            branches=arguments.branches,
            folder=Path(folder),
        )
        compose_by(engine, fixed)
        for category, entries in by_category.items():
            repetitions = measure(engine, cases, entries, arguments)
            summaries[category] = {case: summary(repetitions, case) for case in cases}
            print_table(category, summaries[category])
            for case, of_case in repetitions.items():
                before = everything.setdefault(case, [[] for _ in of_case])
                everything[case] = [a + b for a, b in zip(before, of_case, strict=True)]
    summaries["all"] = {case: summary(everything, case) for case in cases}
    print_table("all", summaries["all"])
    reliabilities = {case: reliability(fixed.outcomes[case]) for case in cases}
    print("\nreliability            rows   Brier score   expected calibration error")
    for case, figures in reliabilities.items():
        if figures["rows"]:
            print(
                f"{case:20s} {figures['rows']:6d} {figures['brier']:13.3f} "
                f"{figures['expected_calibration_error']:10.3f}"
            )
    found = {"categories": summaries, "reliability": reliabilities}
    report(found, arguments.json)


def print_table(category: str, figures: dict[str, dict[str, float]]) -> None:
    print(f"\n{category:20s}   plain  drafted  ratio  tokens/round  accepted  draft ms/round")
    for case, of_case in figures.items():
        print(
            f"{case:20s} {of_case['plain_per_second']:7.1f} {of_case['predicted_per_second']:8.1f} "
            f"{of_case['speedup']:6.2f} {of_case['mean_accepted_length']:13.2f} "
            f"{of_case['acceptance_rate']:9.0%} {of_case['draft_ms_a_round']:15.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
