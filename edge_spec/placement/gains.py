"""Forecasts what a way to run a model would bring, by what was measured of its places."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Capabilities, Forward, Model, Session
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters import factory
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.draft_overlap import HYSTERESIS
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.models.model_plan import PreparedModel
from edge_spec.placement.replay import MAX_ROWS, PassCost, Recording, VirtualClock, replay
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.scheduler.measure import LEAST_S
from edge_spec.scheduler.plan_file import Placement
from edge_spec.scheduler.policy import Policy
from edge_spec.scheduler.profile import TYPICAL_TOKENS, PairFindings, Profile

MOST_DRAFT_TOKENS = 8  # of a round
_ROWS = 32  # of a text that are read in one pass


class Meanwhile(NamedTuple):
    """The time of a pass while the other model runs, over what it takes alone."""

    target_slowdown: float
    draft_slowdown: float


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round's parts.

    pass_s: of the target, with its logits and its commit; draft_s: of a draft token; catch_up_s:
    more, where the draft first reads a draft token of its own that was right; switch_s: of a round
    with draft tokens, for the models to take turns. meanwhile: None where the draft waits while the
    target verifies.
    """

    pass_s: PassCost
    draft_s: float = 0.0
    catch_up_s: float = 0.0
    switch_s: float = 0.0
    meanwhile: Meanwhile | None = None

    def drafting_s(self, draft_tokens: int, ready: int, all_right: bool) -> float:
        """ready: draft tokens that were made in the round before, in which all were right or not:
        while the target verified, the draft has read its own."""
        if not draft_tokens:
            return 0.0
        left = max(0, draft_tokens - ready)
        has_to_read = all_right and self.meanwhile is None
        return left * self.draft_s + (self.catch_up_s if has_to_read else 0.0) + self.switch_s

    def beside_s(self, pass_s: float) -> float:
        """A pass of the target while the draft runs, whose last pass is waited for: half of one, as
        they come."""
        assert self.meanwhile is not None
        target, draft = self.meanwhile
        return pass_s * target + self.draft_s * draft / 2

    def num_ready(self, seconds: float) -> int:
        """Draft tokens after the token that the target adds, which takes the draft a pass, too."""
        assert self.meanwhile is not None
        passes = seconds / max(self.draft_s * self.meanwhile.draft_slowdown, LEAST_S)
        return max(0, int(passes) - 1)


@dataclass(frozen=True)
class Walk:
    """Rounds over texts, each with `num_guesses` draft tokens where as many fit."""

    num_guesses: int
    num_tokens: int
    num_verified: int
    num_accepted: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_verified if self.num_verified else 0.0


def agreements(model: Model, recordings: Iterable[Recording]) -> list[list[bool]]:
    """Says for each token of each text whether the draft prefers it after the ones before.

    The draft reads the text itself: exact for greedy chains, which are accepted up to the first
    miss. Raises ContextFullError.
    """
    rows = min(_ROWS, model.capabilities.max_rows)
    session = model.open_session()
    try:
        return [_agreement(session, recording, rows) for recording in recordings]
    finally:
        session.close()


def _agreement(session: Session, recording: Recording, rows: int) -> list[bool]:
    session.rollback(0)
    session.prefill(recording.prompt[:-1])
    read = [recording.prompt[-1], *recording.tokens[:-1]]
    hits: list[bool] = []
    for start in range(0, len(read), rows):
        chain = TokenTree.chain(read[start], read[start + 1 : start + rows])
        preferred = session.forward(chain).logits.argmax(axis=1).tolist()
        written = recording.tokens[start : start + rows]
        hits += [mine == its for mine, its in zip(preferred, written, strict=True)]
        session.commit(range(len(chain)))
    return hits


def best_walk(
    recordings: Sequence[Recording], hits: Sequence[Sequence[bool]], costs: RoundCosts
) -> Walk:
    """Returns the walk with the number of draft tokens that is fastest."""
    walks = [walk(recordings, hits, n, costs) for n in range(1, MOST_DRAFT_TOKENS + 1)]
    return max(walks, key=lambda each: each.tokens_per_s)


def walk(
    recordings: Sequence[Recording],
    hits: Sequence[Sequence[bool]],
    num_guesses: int,
    costs: RoundCosts,
) -> Walk:
    """Rounds of this many draft tokens. At a text's end there are fewer, since its last token needs
    none."""
    verified = accepted = tokens = 0
    seconds = 0.0
    for recording, right in zip(recordings, hits, strict=True):
        at = ready = 0
        all_right = False  # in the round before
        while at < len(right):
            draft_tokens = min(num_guesses, len(right) - at - 1)
            run = 0
            while run < draft_tokens and right[at + run]:
                run += 1
            seconds += costs.drafting_s(draft_tokens, ready, all_right)
            pass_s = costs.pass_s(draft_tokens + 1, len(recording.prompt) + at)
            all_right = run == draft_tokens
            ready = 0
            if costs.meanwhile is not None and draft_tokens:
                pass_s = costs.beside_s(pass_s)
                foreseen = all_right and right[at + run]
                ready = costs.num_ready(pass_s) if foreseen else 0
            seconds += pass_s
            verified += draft_tokens
            accepted += run
            tokens += run + 1
            at += run + 1
    return Walk(num_guesses, tokens, verified, accepted, seconds)


_USUAL_DRAFT_TOKENS = 4  # of a round

# Of a step, that a pass may take more and its rows are cheap. On recorded texts of a model of 1.5B
# (benchmarks/simulate.py, costs of a Zen 5) recycling beside suffix lookup wrote 8 % more tokens/s
# where eight rows took 1.2 steps (AVX-512 VNNI), and 4 % fewer where they took 2.2 (AVX2). For
# real, as many where they took 1.5.
_CHEAP = 0.35
_UPKEEP_S = 0.0005  # of a round, in Python, which weighs more where steps are short

CONTEXT_STEP = 32  # tokens, within which t(k) is taken to be the same


@dataclass(frozen=True)
class Pair:
    """Two measured places. findings: None where they were not measured together; has_devices:
    whether the draft's device is another one, so that it can go on while the target verifies."""

    target: Profile
    draft: Profile
    findings: PairFindings | None
    has_devices: bool


def with_draft(
    placement: Placement,
    pair: Pair,
    recordings: Sequence[Recording],
    hits: Sequence[Sequence[bool]],
    lossless: Losslessness | None = None,
) -> Placement:
    """Completes a placement with the forecast of the best number of draft tokens. hits: for each
    token of each text whether the draft prefers it. lossless: how passes are padded."""
    draft, findings = pair.draft.costs(TYPICAL_TOKENS), pair.findings
    costs = RoundCosts(
        pass_costs(pair.target, lossless),
        draft_s=draft_token_s(draft, pair.draft, findings),
        catch_up_s=max(0.0, draft.at(2) - draft.at(1)),
        switch_s=findings.switch_s if findings else 0.0,
    )
    best, overlapped = best_walk(recordings, hits, costs), False
    if findings is not None and pair.has_devices:  # else it cannot, or nobody knows what it costs
        slowdowns = Meanwhile(findings.target_slowdown, findings.draft_slowdown)
        other = best_walk(recordings, hits, replace(costs, meanwhile=slowdowns))
        seconds = best.tokens_per_s / other.tokens_per_s  # of a token, over one of the best
        overlapped = seconds < 1 - HYSTERESIS  # as `OverlapTrial` will judge it
        best = other if overlapped else best
    return replace(
        placement,
        tokens_per_s=best.tokens_per_s,
        step_s=1 / plain_rate(pair.target, recordings),
        acceptance=best.acceptance,
        row_share=row_share(pair.target),
        guess_share=costs.draft_s / pair.target.costs(TYPICAL_TOKENS).at(1),
        draft_tokens=best.num_guesses,
        overlapped=overlapped,
    )


def plain_rate(
    profile: Profile, recordings: Sequence[Recording], lossless: Losslessness | None = None
) -> float:
    """Returns the tokens a second without speculation. lossless: how passes are padded."""
    nothing = [[False] * len(recording.tokens) for recording in recordings]
    return walk(recordings, nothing, 0, RoundCosts(pass_costs(profile, lossless))).tokens_per_s


def cheap_rows(costs: RowCosts) -> int:
    """Returns the widest measured pass that is still cheap for drafters that need many rows."""
    return costs.widest_free(max(0.0, _CHEAP - _UPKEEP_S / costs.at(1)))


def default_drafter(profile: Profile) -> str:
    """Returns who drafts where nothing was asked for or planned, beside no second model."""
    rows = cheap_rows(profile.costs(TYPICAL_TOKENS))
    return ",".join(factory.auto_drafters(drafts=False, corpora=False, cheap_rows=rows))


def row_share(profile: Profile) -> float:
    """Returns what one row more costs, in steps."""
    costs = profile.costs(TYPICAL_TOKENS)
    return max(0.0, costs.at(4) - costs.at(1)) / 3 / costs.at(1)


def draft_token_s(costs: RowCosts, draft: Profile | None, findings: PairFindings | None) -> float:
    """Returns the seconds of a draft token, with the call of its device and the way of its scores
    to main memory: as the pair was measured, else as the draft was alone. costs: of the draft's
    rows."""
    found = None if findings is None else findings.draft_token_s
    if found is not None:
        return found
    around_s = 0.0 if draft is None else draft.logits_row_s + draft.commit_s
    return costs.at(1) + around_s


def can_overlap(findings: PairFindings, target: RowCosts, draft_s: float) -> bool:
    """Says whether a draft that goes on while the target verifies can make rounds shorter, by how
    the two were measured beside each other: if all that it reads meanwhile were of use. False is
    certain, True has to be tried."""
    pass_s = target.at(_USUAL_DRAFT_TOKENS + 1)
    slowdowns = Meanwhile(findings.target_slowdown, findings.draft_slowdown)
    costs = RoundCosts(lambda rows, context: pass_s, draft_s, meanwhile=slowdowns)
    beside_s = costs.beside_s(pass_s)
    spared_s = min(_USUAL_DRAFT_TOKENS, costs.num_ready(beside_s)) * draft_s
    return beside_s - pass_s < spared_s


class RealTime(Drafter):
    """Another drafter, whose own work takes as long on a virtual clock as it does here."""

    def __init__(
        self,
        drafter: Drafter,
        virtual: VirtualClock,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.name = drafter.name
        self._drafter = drafter
        self._virtual = virtual
        self._clock = clock

    def begin(self, prompt: Sequence[int]) -> None:
        self._drafter.begin(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        start = self._clock()
        tree = self._drafter.propose(pending, budget)
        self._virtual.advance(self._clock() - start)
        return tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        start = self._clock()
        self._drafter.observe(tree, out, verdict)
        self._virtual.advance(self._clock() - start)


def pass_costs(profile: Profile, lossless: Losslessness | None = None) -> PassCost:
    """Seconds of a round without its drafting: the pass, reading its logits, and its commit.
    lossless: how passes are padded; None: they are not."""
    known: dict[int, RowCosts] = {}
    width = lossless.plain_width if lossless else 1

    def pass_s(rows: int, context_tokens: int) -> float:
        rows = max(rows, width)
        step = context_tokens // CONTEXT_STEP
        if step not in known:
            known[step] = profile.costs(step * CONTEXT_STEP)
        return known[step].at(rows) + rows * profile.logits_row_s + profile.commit_s

    return pass_s


def replay_drafters(
    names: str,
    prepared: PreparedModel,
    profile: Profile,
    recordings: Sequence[Recording],
    lossless: Losslessness | None = None,
) -> list[Stats]:
    """Replays drafters that need no second model and no part of the target, which begin again: what
    they keep from one run to the next is put aside. lossless: how passes are padded. Raises an
    EdgeSpecError."""
    with TemporaryDirectory() as scratch:
        setting = DrafterContext(
            prepared.config.vocab_size,
            tokens=prepared.vocabulary,
            answers_file=Path(scratch) / "answers",
        )
        speculation_factory = SpeculationFactory(
            setting,
            Capabilities(MAX_ROWS, trees=True, rollback=True, hidden_states=False),
            BatchInvariance(0.0, (), branch_invariant=profile.branches),
            lossless=Losslessness(widths=lossless.widths if lossless else ()),
            costs=lambda: profile.costs(TYPICAL_TOKENS),
        )
        speculation = speculation_factory.compose(factory.load_drafters(names, setting))

        def speculate(clock: VirtualClock) -> tuple[Sequence[Drafter], Policy]:
            drafters = [RealTime(drafter, clock) for drafter in speculation.drafters]
            return drafters, speculation.policy

        try:
            return replay(recordings, setting.vocab_size, speculate, pass_costs(profile))
        finally:
            speculation.close()
