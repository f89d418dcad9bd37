"""The round loop: propose, forward, verify, commit, observe."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import NamedTuple

from edge_spec.core.metrics import PlainReason, RoundStats
from edge_spec.core.model import Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.session_errors import require_scores, translate_errors
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.verify import verify
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.batch import Batch, Scored
from edge_spec.engine.components import AnswerRecorder
from edge_spec.engine.draft_overlap import OverlappedDrafting
from edge_spec.engine.results import DecodedToken, decoded_tokens, draft_counts
from edge_spec.errors import EdgeSpecError
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.scheduler.policy import Policy, RoundPlan

_NOTHING_DRAFTED = (
    PlainReason.NO_CANDIDATE,
    PlainReason.BELOW_BREAK_EVEN,
    PlainReason.COOLDOWN,
)


@dataclass(frozen=True)
class GenerationLimits:
    """Limits that end a generation."""

    max_tokens: int
    stop_ids: frozenset[int]
    context_length: int
    max_rows: int  # of one forward
    min_rows: int = 1  # of one forward; context_length leaves room for them


class RoundStart(NamedTuple):
    pending: int
    budget: Budget
    left: int  # tokens that may still be written
    plain: PlainReason | None  # why drafting is not allowed, or None
    gives_way: bool  # other conversations reduce its budget


class Round(NamedTuple):
    """The outcome of a round; empty if its first choice is left to the next round."""

    decoded: list[DecodedToken]
    verdict: Verdict
    stats: RoundStats


@dataclass(frozen=True)
class Decoder:
    """A target with its drafters under a policy."""

    target: Session
    drafters: Sequence[Drafter]
    policy: Policy
    lossless: Losslessness = field(default_factory=Losslessness)
    overlap: OverlappedDrafting = field(default_factory=OverlappedDrafting)
    vocab_size: int | None = None  # expected width of logits
    batch: Batch = field(default_factory=Batch)  # makes the target's passes
    clock: Callable[[], float] = time.perf_counter
    recorder: AnswerRecorder | None = None  # of hidden states

    @property
    def tie_margin(self) -> float:
        """Return the margin below which a choice may differ from plain decoding."""
        return self.lossless.tie_margin

    @contextmanager
    def preparing(self, prompt: Sequence[int]) -> Iterator[None]:
        """Have drafters read the prompt, during the block if drafting overlaps, else after it."""
        if not self.overlap.reads_prompts:
            yield
            self._prepare(prompt)
            return
        reader = Thread(target=self._prepare, args=(prompt,))
        reader.start()
        try:
            yield
        finally:
            try:
                reader.join()
            except KeyboardInterrupt:
                reader.join()  # the draft must stay unused until its pass has ended
                raise

    def _prepare(self, prompt: Sequence[int]) -> None:
        for drafter in self.drafters:
            if self.policy.wants(drafter):
                drafter.prepare(prompt)

    def decode(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        limits: GenerationLimits,
        on_round: Callable[[RoundStats], None],
    ) -> Generator[list[DecodedToken], None, None]:
        """Yield each round's tokens, until a stop token (included), max_tokens or the context.

        The target must hold the prompt without its last token. Whenever the iterator ends, the
        cache holds only yielded tokens, unless the target failed: then an EdgeSpecError is raised
        and the session is unusable.
        """
        num_tokens, pending, failed = 0, prompt[-1], False
        plain = self._plain_reason(sampler)
        self._begin(prompt, sampler)
        try:
            while num_tokens == 0 or pending not in limits.stop_ids:
                start = self._start(pending, num_tokens, limits, plain)
                if start.left <= 0:
                    return
                done = self._round(start, sampler, limits.stop_ids)
                self._observe(done.stats)
                on_round(done.stats)
                plain = self._plain_reason(sampler, done.verdict)
                if not done.decoded:
                    continue
                num_tokens += len(done.decoded)
                pending = done.verdict.next_token
                yield done.decoded
        except EdgeSpecError:
            failed = True
            raise
        finally:
            # An interrupt may come between a commit and counting its tokens.
            told = len(prompt) - 1 + num_tokens
            if not failed and self.target.length > told:
                with translate_errors:
                    self.target.rollback(told)

    def _plain_reason(self, sampler: Sampler, verdict: Verdict | None = None) -> PlainReason | None:
        if not self.lossless.replays:
            return None
        if not sampler.params.greedy:
            return PlainReason.UNSUPPORTED if self.lossless.plain_samples else None
        undecided = verdict is not None and verdict.first_tie == len(verdict.tokens)
        return PlainReason.REPLAY if undecided else None

    def _begin(self, prompt: Sequence[int], sampler: Sampler) -> None:
        self.policy.begin(len(prompt))
        for drafter in self.drafters:
            drafter.begin(prompt, sampler)

    def _start(
        self, pending: int, num_tokens: int, limits: GenerationLimits, plain: PlainReason | None
    ) -> RoundStart:
        """num_tokens: written so far."""
        room = limits.context_length - self.target.length
        left = min(limits.max_tokens - num_tokens, room)
        num_rows = min(room + limits.min_rows - 1, limits.max_rows)
        budget = Budget(min(left, num_rows) - 1, num_rows)
        allowed = self.batch.limit(budget, self.target, self.drafters)
        gives_way = allowed.num_draft_tokens < budget.num_draft_tokens
        return RoundStart(pending, allowed, left, plain, gives_way)

    def _round(self, start: RoundStart, sampler: Sampler, stop_ids: frozenset[int]) -> Round:
        """Run one round. If nothing is committed, drafters do not observe it."""
        replays = self.lossless.replays and sampler.params.greedy
        started_s = self.clock()
        plan = self._propose(start)
        proposed_s = self.clock()
        scored = self.overlap.beside(self._forward, plan)
        plan = _as_scored(plan, scored)
        out, scored_s = scored.out, self.clock()
        verified = plan.tree.first_rows(plan.num_verified or len(plan.tree))
        verdict = _cut(verify(verified, out, sampler), stop_ids, start.left)
        if replays and len(verified) > 1 and verdict.first_tie is not None:
            verdict = verdict.first_tokens(verdict.first_tie)
        decoded = decoded_tokens(verified, verdict, out, sampler)
        self._commit(verdict)
        sampler.observe(verdict.tokens)
        if self.recorder is not None:
            self.recorder.observe(out, verdict)
        committed_s = self.clock()
        for drafter in self.drafters if verdict.tokens else ():
            rests = drafter.name in plan.resting
            (drafter.skip if rests else drafter.observe)(plan.tree, out, verdict)
        ended_s = self.clock()
        stats = RoundStats(
            num_rows=len(plan.tree),
            num_draft_tokens=len(verified) - 1,
            num_accepted=verdict.num_accepted,
            num_tokens=len(verdict.tokens),
            plain_reason=plan.plain_reason,
            near_ties=verdict.near_ties,
            draft_s=proposed_s - started_s + ended_s - committed_s,
            forward_s=scored_s - proposed_s,
            total_s=ended_s - started_s,
            by_drafter=draft_counts(verified, verdict),
            tokens=verdict.tokens,
            anticipated=self.overlap.was_ready,
            overlapped=self.overlap.goes_on,
            no_overlap=self.overlap.why_not,
            charged_s=scored.charged_s,
            num_sharing=scored.num_sharing,
            accepted_by=tuple(token.drafter for token in decoded[: verdict.num_accepted]),
        )
        return Round(decoded, verdict, stats)

    def _propose(self, start: RoundStart) -> RoundPlan:
        if start.plain is not None:
            return RoundPlan(TokenTree.chain(start.pending), start.plain)
        plan = self.policy.choose(self.drafters, start.pending, start.budget)
        if plan.plain_reason is PlainReason.BUDGET and start.gives_way:
            return plan._replace(plain_reason=PlainReason.SHARED)
        if plan.plain_reason in _NOTHING_DRAFTED:
            idle = [drafter.idle_reason for drafter in self.drafters]
            if idle and None not in idle:
                return plan._replace(plain_reason=idle[-1])
        return plan

    def _commit(self, verdict: Verdict) -> None:
        with translate_errors:
            if verdict.tokens:
                self.target.commit(verdict.kept)
            else:
                self.target.rollback(self.target.length)

    def _observe(self, stats: RoundStats) -> None:
        self.policy.observe(stats.as_charged())
        self.overlap.observe(stats)

    def _forward(self, plan: RoundPlan) -> Scored:
        """Score the plan's tree. Raises EdgeSpecError if the target fails or logits have a wrong
        shape."""
        with translate_errors:
            scored = self.batch.forward(self.target, plan.tree, plan.num_rows or 0, plan.values)
            require_scores(scored.out, scored.num_rows, self.vocab_size)
        return scored


def _as_scored(plan: RoundPlan, scored: Scored) -> RoundPlan:
    """Return the plan, cut to the rows that a shared pass had room for."""
    tree = scored.tree
    if tree is None or len(tree) == len(plan.tree):
        return plan
    reason = plan.plain_reason if len(tree) > 1 else PlainReason.SHARED
    return plan._replace(tree=tree, plain_reason=reason, num_verified=len(tree))


def _cut(verdict: Verdict, stop_ids: frozenset[int], left: int) -> Verdict:
    """End the verdict at the first stop token or after `left` tokens."""
    for i, token in enumerate(verdict.tokens[:left]):
        if token in stop_ids:
            return verdict.first_tokens(i + 1)
    return verdict.first_tokens(left)
