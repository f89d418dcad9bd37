"""What the policy itself takes of a round, beside a plain step.

    python benchmarks/policy_cost.py --prompts FILE --per-category 2

Times `choose` without the drafters' own work, and `observe`, among the passes of a real model,
where the processor's caches are cold. Prints medians over all rounds, in microseconds, and their
share of a plain step of the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.control.policy import Policy, RoundPlan
from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.engine import Engine


class TimedDrafter(Drafter):
    """Another drafter; `taken_s` is what its last proposal took."""

    def __init__(self, drafter: Drafter) -> None:
        self.name = drafter.name
        self.taken_s = 0.0
        self._drafter = drafter

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        start = time.perf_counter()
        tree = self._drafter.propose(pending, budget)
        self.taken_s = time.perf_counter() - start
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._drafter.observe(tree, out, verdict)


class TimedPolicy:
    """Another policy, with the seconds of each round."""

    def __init__(self, policy: Policy) -> None:
        self.rounds_s: list[float] = []
        self.plain_s: list[float] = []
        self._policy = policy
        self._chosen_s = 0.0

    def begin(self) -> None:
        self._policy.begin()

    def choose(self, drafters: Sequence[TimedDrafter], pending: int, budget: Budget) -> RoundPlan:
        for drafter in drafters:
            drafter.taken_s = 0.0
        start = time.perf_counter()
        plan = self._policy.choose(drafters, pending, budget)
        drafting_s = sum(drafter.taken_s for drafter in drafters)
        self._chosen_s = time.perf_counter() - start - drafting_s
        return plan

    def wants(self, drafter: Drafter) -> bool:
        return self._policy.wants(drafter)

    def observe(self, round_stats: RoundStats) -> None:
        start = time.perf_counter()
        self._policy.observe(round_stats)
        self.rounds_s.append(self._chosen_s + time.perf_counter() - start)
        if round_stats.num_rows == 1:
            self.plain_s.append(round_stats.total_s)


def timed(engine: Engine) -> TimedPolicy:
    """The engine's own policy, from now on timed."""
    speculation = engine.parts.speculation
    policy = TimedPolicy(speculation.policy)
    drafters = [TimedDrafter(drafter) for drafter in speculation.drafters]
    engine._drafting.speculation = replace(speculation, drafters=drafters, policy=policy)
    return policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="ort")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--per-category", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    options = {"runtime": arguments.runtime, "drafter": arguments.drafter}
    with open_engine(arguments.model, **options) as engine:
        policy = timed(engine)
        for entry in read_prompts(arguments.prompts, arguments.per_category):
            engine.chat(entry["prompt"], max_tokens=arguments.tokens)
    policy_us = 1e6 * median(policy.rounds_s)
    share = median(policy.rounds_s) / median(policy.plain_s)
    print(
        f"{policy_us:.0f} us a round of the policy, {share:.2%} of a plain step of "
        f"{1e3 * median(policy.plain_s):.2f} ms ({len(policy.rounds_s)} rounds)"
    )
    figures = {"policy_us": policy_us, "share": share, "rounds": len(policy.rounds_s)}
    report(figures, arguments.json)


if __name__ == "__main__":
    main()
