"""Judges the default policy on recorded texts, under kinds of costs and drafters that differ.

    python benchmarks/simulate.py record OUT.npz --prompts FILE
    python benchmarks/policy_cases.py OUT.npz [...] [--json FILE]

The real round loop decodes the texts again, as one conversation, on a clock that passes and
drafters advance: 5 tables of t(k), known or to be found out, with 7 drafters, some of which pay in
some texts only. For each case it prints the rate of all texts over plain decoding's, that of the
worst text, the most plain steps that one text lost, and how many texts were slower than 0.97 of
plain. All of it is simulated, and the same on every run.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import report
from replay import Charged, DraftCost, Recording, VirtualClock, replay
from simulate import read

from edge_spec.core.metrics import Stats
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Budget, Cost, Drafter, DrafterTraits
from edge_spec.drafters.tree_builder import LearntAcceptance
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts, Scale

# t(k) over t(1): of our kernels, of onnxruntime, of llama.cpp's own kernels, of a GPU, and of one
# that works in fours.
TABLES = {
    "cheap": {1: 1, 2: 1.03, 3: 1.08, 4: 1.16, 5: 1.38, 6: 1.5, 8: 1.8, 12: 2.6, 16: 3.2},
    "ort": {1: 1, 2: 1.14, 3: 1.41, 4: 1.63, 6: 2.15, 8: 2.7, 16: 4.6},
    "stock": {1: 1, 2: 1.9, 3: 2.6, 4: 3.2, 8: 5.5, 16: 11},
    "gpu": {1: 1, 2: 1.01, 4: 1.02, 8: 1.05, 16: 1.12},
    "fours": {1: 1, 2: 1.6, 3: 1.6, 4: 1.2, 5: 2.2, 6: 2.2, 8: 2.3, 12: 3.5, 16: 4.6},
}
USUAL = {1: 1.0, 2: 1.15, 4: 1.5, 8: 2.3, 16: 4.0}  # proportions where nothing was measured
STEPS_S = {"demo": 2.4e-3, "coder": 16e-3}
LOOKUPS = {
    "suffix": ((SuffixDrafter,), DraftCost(40e-6, 5e-6, 20e-6)),
    "suffix+recycling": ((SuffixDrafter, RecyclingDrafter), DraftCost(120e-6, 10e-6, 120e-6)),
}
EASY = ("code", "repetitive", "translation", "math_reasoning")


class Draft(NamedTuple):
    """A draft model: steps of the target that a draft token takes, and the chance that it is right
    in easy texts and in others."""

    steps: float
    right: float
    right_elsewhere: float


DRAFTERS: Mapping[str, Sequence[str | Draft]] = {
    "suffix": ["suffix"],
    "suffix+recycling": ["suffix+recycling"],
    "cheap draft": [Draft(0.1, 0.7, 0.7)],
    "draft": [Draft(0.35, 0.7, 0.7)],
    "draft of some texts": [Draft(0.35, 0.85, 0.25)],
    "suffix+recycling and draft": ["suffix+recycling", Draft(0.3, 0.75, 0.75)],
    "useless draft": [Draft(0.3, 0.05, 0.05)],
}


class ReplayedDraft(Drafter):
    """Is right by chance, which is drawn again for each text; what it has to catch up with takes
    0.15 of a draft token's time a token."""

    name = "draft-model"
    traits = DrafterTraits(cost=Cost.PASS, draft_model=True)

    def __init__(self, clock: VirtualClock, draft: Draft, step_s: float, texts: Sequence[Any]):
        self._clock, self._draft, self._texts = clock, draft, texts
        self._token_s = draft.steps * step_s
        self._learnt = LearntAcceptance([0.6] * 8)
        self._number = -1

    def begin(self, prompt: Sequence[int]) -> None:
        self._number += 1
        text = self._texts[self._number % len(self._texts)]
        draft = self._draft
        chance = draft.right if text.category in EASY else draft.right_elsewhere
        draws = np.random.default_rng(self._number).random(len(text.tokens) + 64)
        self._text, self._right = text.tokens, draws < chance
        self._place = self._behind = 0
        self._tree: TokenTree | None = None

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        self._clock.advance(0.15 * self._token_s * self._behind)
        self._behind = 0
        tokens: list[int] = []
        confidence: list[float] = []
        reach, most = 1.0, min(budget.num_draft_tokens, budget.num_rows - 1)
        while len(tokens) < most and reach >= budget.min_reach:
            place = self._place + len(tokens)
            self._clock.advance(self._token_s)
            is_right = place < len(self._text) and self._right[place]
            tokens.append(self._text[place] if is_right else 5)
            confidence.append(self._learnt.estimate(min(len(confidence), 7)))
            reach *= confidence[-1]
        self._tree = TokenTree.chain(pending, tokens, confidence, self.name) if tokens else None
        return self._tree or TokenTree.chain(pending)

    def observe(self, tree: TokenTree, out: Any, verdict: Any) -> None:
        if self._tree is not None:
            for row, is_right in self._tree.followed(verdict.tokens):
                self._learnt.observe(min(row - 1, 7), is_right)
        self._tree = None
        self._place += len(verdict.tokens)
        self._behind += len(verdict.tokens)


def drafters_of(
    names: Sequence[str | Draft], clock: VirtualClock, step_s: float, texts: Sequence[Any]
) -> list[Drafter]:
    made: list[Drafter] = []
    for each in names:
        if isinstance(each, Draft):
            made.append(ReplayedDraft(clock, each, step_s, texts))
            continue
        kinds, cost = LOOKUPS[each]
        parts = [kind() for kind in kinds]
        drafter = parts[0] if len(parts) == 1 else CompositeDrafter(parts)
        made.append(Charged(drafter, cost, clock))
    return made


def decode(
    texts: Sequence[Recording],
    vocab_size: int,
    table: str,
    drafters: str,
    step_s: float,
    known: bool,
) -> dict[str, float]:
    """Decodes all texts with one policy."""
    seconds = {rows: step_s * more for rows, more in TABLES[table].items()}
    exact = RowCosts(seconds)

    def speculate(clock: VirtualClock) -> tuple[list[Drafter], AdaptivePolicy]:
        made = drafters_of(DRAFTERS[drafters], clock, step_s, texts)
        costs = RowCosts(seconds) if known else RowCosts(USUAL, scale=Scale(False))
        free = {each.name for each in made if not isinstance(each, ReplayedDraft)}
        return made, AdaptivePolicy(costs, {}, free, branches=False, clock=clock)

    pass_s: Callable[[int, int], float] = lambda rows, context: exact.at(rows)  # noqa: E731
    return judged(replay(texts, vocab_size, speculate, pass_s), step_s)


def judged(decoded: Sequence[Stats], step_s: float) -> dict[str, float]:
    taken_s = [stats.predicted_ms / 1e3 for stats in decoded]
    plain_s = [stats.predicted_n * step_s for stats in decoded]
    ratios = [plain / taken for plain, taken in zip(plain_s, taken_s, strict=True)]
    lost = [(taken - plain) / step_s for plain, taken in zip(plain_s, taken_s, strict=True)]
    return {
        "speedup": sum(plain_s) / sum(taken_s),
        "worst": min(ratios),
        "most_lost_steps": max(lost),
        "slower": sum(ratio < 0.97 for ratio in ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: list[dict[str, Any]] = []
    for path in asked.recordings:
        texts, about = read(path)
        random.Random(1).shuffle(texts)
        step_s = STEPS_S["demo" if "demo" in path.name else "coder"]
        for table in TABLES:
            for drafters in DRAFTERS:
                for known in (True, False):
                    case = {"texts": path.stem, "t(k)": table, "drafters": drafters, "known": known}
                    case |= decode(texts, about["vocab_size"], table, drafters, step_s, known)
                    found.append(case)
                    print(
                        *(
                            f"{each:.3f}" if isinstance(each, float) else each
                            for each in case.values()
                        )
                    )
    speedups = [each["speedup"] for each in found]
    total = {
        "mean speedup": float(np.exp(np.mean(np.log(speedups)))),
        "worst text": min(each["worst"] for each in found),
        "slower texts": sum(each["slower"] for each in found),
        "most lost steps": max(each["most_lost_steps"] for each in found),
    }
    print(total)
    if asked.json:
        report({"cases": found, "total": total}, asked.json)


if __name__ == "__main__":
    main()
