"""Judges the default policy on recorded texts, under kinds of costs and drafters that differ.

    python benchmarks/simulate.py record OUT.npz --prompts FILE
    python benchmarks/policy_cases.py OUT.npz [...] [--json FILE]

The real round loop decodes the texts again, as one conversation, on a clock that passes and
drafters advance: 5 tables of t(k), known or to be found out, with 7 drafters, some of which pay in
some texts only. For each case it prints the rate of all texts over plain decoding's, that of the
worst text, the most plain steps that one text lost, and how many texts were slower than 0.97 of
plain. Then it compares

- a first session with the tenth, which begins with what nine others kept of easy or hard texts, or
  of a draft model that was timed on a busy machine;
- texts on a machine that something else slows down, for stretches and by single delays, or by these
  alone in a long session, with plain decoding there: work is counted as a quiet machine would have
  taken for it, so neither is lucky;
- `auto` with the best of its drafters alone, for each text.

All of it is simulated, and the same on every run.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from common import report
from replay import (
    MAX_ROWS,
    UNLIKELY,
    Charged,
    DraftCost,
    RecordedSession,
    Recording,
    VirtualClock,
)
from simulate import read

from edge_spec.core.metrics import RoundStats
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import CompositeDrafter, DrafterGroup
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import (
    Budget,
    Cost,
    Drafter,
    DrafterTraits,
)
from edge_spec.drafters.tree_builder import LearntAcceptance
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.profile import SECONDS, ProfileKey
from edge_spec.scheduler.row_findings import RoundTimes

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
HOW = ProfileKey("", "", "", "", "", "", 1, (), "")
MEAN_STRETCH, MEAN_DELAY = 40.0, 60.0  # plain steps, of a busy machine
LONG_SESSION = 8  # times all texts
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
        self._behind = 0
        self._number, self._is_prepared = -1, False

    def prepare(self, prompt: Sequence[int]) -> None:
        self._is_prepared = True

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self._number += 1
        text = self._texts[self._number % len(self._texts)]
        draft = self._draft
        chance = draft.right if text.category in EASY else draft.right_elsewhere
        draws = np.random.default_rng(self._number).random(len(text.tokens) + 64)
        self._text, self._right = text.tokens, draws < chance
        self._place = 0
        self._behind = 0 if self._is_prepared else self._behind + len(prompt)
        self._is_prepared = False
        self._tree: TokenTree | None = None

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        return self._learnt.state(learnt_only)

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        self._learnt.load(state, learnt_only)

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


class BusyClock(VirtualClock):
    """Work takes longer while something else computes: by a factor that comes and goes, and by
    single delays. work_s: what the same work would have taken on a quiet machine."""

    def __init__(
        self, step_s: float = 1.0, seed: int | None = None, stretches: bool = True
    ) -> None:
        """step_s: of a plain step, in which stretches are measured. seed: None for a quiet
        machine. stretches: False for single delays alone."""
        super().__init__()
        self.work_s = 0.0
        self._step_s = step_s
        self._draws = None if seed is None else np.random.default_rng(seed)
        self._factor, self._left_s = 1.0, 0.0 if stretches and seed is not None else math.inf
        self._delay_in_s = math.inf if seed is None else self._next(MEAN_DELAY)

    def advance(self, seconds: float) -> None:
        while seconds > 0:
            if self._left_s <= 0:
                assert self._draws is not None
                is_quiet = self._factor > 1
                self._factor = 1.0 if is_quiet else self._draws.uniform(1.5, 4.0)
                self._left_s = self._next(MEAN_STRETCH)
            done_s = min(seconds, self._left_s, self._delay_in_s)
            self.work_s += done_s
            self.now_s += self._factor * done_s
            seconds -= done_s
            self._left_s -= done_s
            self._delay_in_s -= done_s
            if self._delay_in_s <= 0:
                assert self._draws is not None
                self.now_s += self._draws.uniform(1.0, 8.0) * self._step_s
                self._delay_in_s = self._next(MEAN_DELAY)

    def _next(self, mean_steps: float) -> float:
        assert self._draws is not None
        return max(1e-9, self._step_s * self._draws.exponential(mean_steps))


@dataclass
class Kept:
    """What sessions leave to the next one. key: of t(k) in the store, another for each user."""

    key: ProfileKey = field(default_factory=lambda: replace(HOW, build=uuid4().hex))
    stats: Mapping[str, np.ndarray] = field(default_factory=dict)  # of drafters
    draft_token_s: float | None = None


@dataclass(frozen=True)
class Session:
    """One session of a user: it decodes texts in turn, with one policy.

    known: t(k) was measured before. named: drafters that the user asked for.
    """

    texts: Sequence[Recording]
    vocab_size: int
    table: str
    drafters: Sequence[str | Draft]
    step_s: float
    known: bool = True
    busy: int | None = None  # seed
    stretches: bool = True  # of a busy machine; else single delays alone
    named: Sequence[str] = ()

    def decode(self, kept: Kept | None = None) -> list[float]:
        """Return the plain steps of work that each text took, and leave to `kept` what a session
        keeps."""
        seconds = {rows: self.step_s * more for rows, more in TABLES[self.table].items()}
        exact, clock = RowCosts(seconds), BusyClock(self.step_s, self.busy, self.stretches)
        drafters = drafters_of(self.drafters, clock, self.step_s, self.texts)
        costs = RowCosts(seconds) if self.known else RowCosts(USUAL, is_measured=False)
        draft_token_s: dict[str, float] = {}
        if kept is not None:
            DrafterGroup(drafters).load(kept.stats, learnt_only=True)
            costs = RowCosts(USUAL, is_measured=False)
            costs.recall(SECONDS.known(kept.key) or {})
            for drafter in drafters:
                if isinstance(drafter, ReplayedDraft) and kept.draft_token_s is not None:
                    draft_token_s[drafter.name] = kept.draft_token_s
        free = {each.name for each in drafters if not isinstance(each, ReplayedDraft)}
        policy = AdaptivePolicy(
            costs, draft_token_s, free, branches=False, clock=clock, named=self.named
        )
        times = RoundTimes(kept.key) if kept is not None else None
        logits = np.full((MAX_ROWS, self.vocab_size), UNLIKELY, np.float32)
        taken: list[float] = []
        for text in self.texts:
            session = RecordedSession(text, logits, lambda rows, context: exact.at(rows), clock)
            session.prefill(text.prompt[:-1])
            decoder = Decoder(session, drafters, policy, clock=clock)
            with decoder.preparing(text.prompt):
                pass
            start_s = clock.work_s
            sampler = Sampler(SamplingParams(), text.prompt)
            context = len(text.prompt) + len(text.tokens) + MAX_ROWS
            limits = GenerationLimits(len(text.tokens), frozenset(), context, MAX_ROWS)
            rounds: list[RoundStats] = []
            for _ in decoder.decode(text.prompt, sampler, limits, rounds.append):
                pass
            session.close()
            taken.append((clock.work_s - start_s) / self.step_s)
            if kept is not None and times is not None:
                for each in rounds:
                    times.observe(each)
                times.end(len(text.tokens))
        if kept is not None:
            kept.stats = DrafterGroup(drafters).state(learnt_only=True)
        return taken


def judge(steps: Sequence[float], plain: Sequence[float]) -> dict[str, float]:
    """steps: the plain steps that each text took. plain: what plain decoding, or whatever they are
    compared with, took for it."""
    ratios = [before / now for before, now in zip(plain, steps, strict=True)]
    return {
        "speedup": sum(plain) / sum(steps),
        "worst": min(ratios),
        "most_lost_steps": max(now - before for before, now in zip(plain, steps, strict=True)),
        "slower": sum(ratio < 0.97 for ratio in ratios),
    }


def plain_steps(texts: Sequence[Recording]) -> list[float]:
    return [float(len(text.tokens)) for text in texts]


def decode(
    texts: Sequence[Recording],
    vocab_size: int,
    table: str,
    drafters: str,
    step_s: float,
    known: bool,
) -> dict[str, float]:
    """Decodes all texts with one policy."""
    session = Session(texts, vocab_size, table, DRAFTERS[drafters], step_s, known)
    return judge(session.decode(), plain_steps(texts))


DRAFT_NAMES = tuple(
    name for name, each in DRAFTERS.items() if any(isinstance(one, Draft) for one in each)
)
HABITS = ("all texts", "hard texts", "hard texts, timed while busy")  # of nine sessions


def compare_sessions(
    session: Session, habit: str, num_sessions: int = 9
) -> tuple[list[float], list[float]]:
    """Return the plain steps of a first session, and of one after nine others."""
    first = replace(session, known=False).decode(Kept())
    texts = [text for text in session.texts if habit == "all texts" or text.category not in EASY]
    kept = Kept()
    for _ in range(num_sessions):
        replace(session, known=False, texts=texts).decode(kept)
    [draft] = [each for each in session.drafters if isinstance(each, Draft)]
    busy = 3.0 if "busy" in habit else 1.0
    kept.draft_token_s = busy * draft.steps * session.step_s
    return first, session.decode(kept)


def session_cases(texts: Sequence[Recording], vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield the rate of a tenth session over that of a first one."""
    for table in TABLES:
        for drafters in DRAFT_NAMES:
            for habit in HABITS:
                session = Session(
                    texts,
                    vocab_size,
                    table,
                    DRAFTERS[drafters],
                    STEPS_S["coder"],
                    named=("draft-model",),
                )
                first, tenth = compare_sessions(session, habit)
                found = judge(first, tenth) | {"tenth": judge(tenth, plain_steps(texts))["speedup"]}
                yield {"t(k)": table, "drafters": drafters, "nine sessions": habit} | found


def busy_cases(texts: Sequence[Recording], vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield rates over plain decoding on a busy machine."""
    for table in TABLES:
        for drafters, kinds in DRAFTERS.items():
            for seed in range(2):
                session = Session(
                    texts,
                    vocab_size,
                    table,
                    kinds,
                    STEPS_S["coder"],
                    known=bool(seed % 2),
                    busy=seed,
                )
                found = judge(session.decode(), plain_steps(texts))
                yield {"t(k)": table, "drafters": drafters, "seed": seed} | found


def delayed_cases(
    texts: Sequence[Recording], vocab_size: int, step_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the rate of a long session with single delays over that of one without."""
    texts = list(texts) * LONG_SESSION
    for table in TABLES:
        for drafters, kinds in DRAFTERS.items():
            for known in (True, False):
                quiet = Session(texts, vocab_size, table, kinds, step_s, known)
                found = judge(replace(quiet, busy=0, stretches=False).decode(), quiet.decode())
                yield {"t(k)": table, "drafters": drafters, "known": known} | found


def auto_cases(texts: Sequence[Recording], vocab_size: int) -> Iterator[dict[str, Any]]:
    """Yield the rate of all drafters together over that of the best one, for each text."""
    for step_s in STEPS_S.values():
        for table in TABLES:
            for draft in sorted({each for one in DRAFTERS.values() for each in one[-1:]}, key=str):
                if not isinstance(draft, Draft):
                    continue
                kinds = ["suffix+recycling", draft]
                session = Session(texts, vocab_size, table, kinds, step_s, named=("draft-model",))
                alone = [replace(session, drafters=[kind]).decode() for kind in kinds]
                best = [min(each) for each in zip(*alone, plain_steps(texts), strict=True)]
                found = judge(session.decode(), best)
                yield {"t(k)": table, "drafters": str(tuple(draft)), "step_s": step_s} | found


def speed_cases(
    texts: Sequence[Recording], vocab_size: int, step_s: float
) -> Iterator[dict[str, Any]]:
    for table in TABLES:
        for drafters in DRAFTERS:
            for known in (True, False):
                case = {"t(k)": table, "drafters": drafters, "known": known}
                yield case | decode(texts, vocab_size, table, drafters, step_s, known)


def summarize(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    speedups = [each["speedup"] for each in cases]
    return {
        "mean speedup": float(np.exp(np.mean(np.log(speedups)))),
        "least speedup": min(speedups),
        "worst text": min(each["worst"] for each in cases),
        "slower texts": sum(each["slower"] for each in cases),
        "most lost steps": max(each["most_lost_steps"] for each in cases),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EDGE_SPEC_CACHE"] = cache  # of what sessions keep
        for path in asked.recordings:
            texts, about = read(path)
            random.Random(1).shuffle(texts)
            step_s = STEPS_S["demo" if "demo" in path.name else "coder"]
            vocab_size = about["vocab_size"]
            for kind, cases in {
                "over plain decoding": speed_cases(texts, vocab_size, step_s),
                "tenth session over first": session_cases(texts, vocab_size),
                "busy, over plain decoding": busy_cases(texts, vocab_size),
                "single delays, over none": delayed_cases(texts, vocab_size, step_s),
                "auto over the best drafter": auto_cases(texts, vocab_size),
            }.items():
                all_cases = list(cases)
                total = summarize(all_cases)
                found[f"{path.stem}, {kind}"] = {"cases": all_cases, "total": total}
                for each in all_cases:
                    print(*(f"{v:.3f}" if isinstance(v, float) else v for v in each.values()))
                print(f"{kind}: {total}\n")
    if asked.json:
        report(found, asked.json)


if __name__ == "__main__":
    main()
