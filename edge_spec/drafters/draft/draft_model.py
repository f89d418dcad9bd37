"""A smaller model drafts (Leviathan et al. 2023; Chen et al. 2023).

It chooses tokens deterministically, greedily or with the target's random numbers
(sampling.Sampler), or samples them from its own distribution, which is passed along. It stops where
the chance that all are right falls below the round's limit. Trees grow from their likeliest rows
(Li et al. 2024, EAGLE-2). Other drafters may draft for the draft: a cascade (Chen et al. 2024,
Cascade Speculative Drafting), in which each level verifies the level below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from copy import copy

import numpy as np

from edge_spec.core.metrics import PlainReason
from edge_spec.core.model import Forward, Model, Session
from edge_spec.core.sampling import Sampler
from edge_spec.core.session_errors import close_quietly
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.core.watchdog import WatchedModel, WatchedSession
from edge_spec.drafters.composite import Stage, StageDrafter
from edge_spec.drafters.draft.draft_tree import (
    PRIORS,
    SIBLING_KINDS,
    DraftChooser,
    Line,
    candidates_after,
    sample_shape,
)
from edge_spec.drafters.draft.synced_session import (
    DraftAheadCache,
    Path,
    Reading,
    SyncedSession,
)
from edge_spec.drafters.protocol import (
    GREEDY,
    TRAITS,
    Budget,
    Drafter,
    named,
    part_of,
)
from edge_spec.drafters.tree_builder import Candidate, Growth, LearningDrafter, grow, nothing
from edge_spec.errors import HungError

_log = logging.getLogger(__name__)
_NO_SCORES = Forward(np.empty((0, 0), np.float32))


def _refuse() -> Session:
    raise RuntimeError("its session cannot be opened again")


class DraftModelDrafter(LearningDrafter, StageDrafter):
    """Drafts with a model whose session follows the text.

    vocab_size: of the target. Ids beyond the smaller vocabulary are padding, never proposed, and
    read as another token. level: drafts for the draft. shared: the session reads its target's
    cache. anticipates: it reads ahead while the target verifies, on a session that nobody else
    needs meanwhile, except after trees of samples. reopened: replaces a failed session, or raises.
    """

    traits = TRAITS["draft-model"]

    def __init__(
        self,
        draft: Model,
        session: Session,
        vocab_size: int,
        level: Stage | None = None,
        *,
        shared: bool = False,
        anticipates: bool = False,
        name: str = "draft-model",
        reopened: Callable[[], Session] = _refuse,
    ) -> None:
        super().__init__(PRIORS)
        self.name = name
        self._reopened = reopened
        self._vocab_size = min(draft.config.vocab_size, vocab_size)
        self._chooser = DraftChooser(draft.config.vocab_size, vocab_size)
        self._text = SyncedSession(
            session, draft.config.context_length, draft.capabilities.max_rows, shared
        )
        self._level = level or Stage()
        self._trees = draft.capabilities.trees
        self._told_full = False
        self._ahead, self._anticipates = DraftAheadCache(), anticipates
        self.passes: int = 0

    @property
    def idle_reason(self) -> PlainReason | None:
        return PlainReason.DRAFT_FULL if self._text.room <= 0 else None

    def prepare(self, prompt: Sequence[int]) -> None:
        if len(prompt) <= self._text.context_length:  # otherwise it never drafts
            self._text.begin(self._readable(prompt))
            self._text.catch_up()
            self._level.prepare(prompt)

    def begin(self, prompt: Sequence[int], sampler: Sampler = GREEDY) -> None:
        """Begin an answer. Raises if a failed session cannot be replaced."""
        super().begin(prompt, sampler)
        self._level.fault = self.fault
        if self.fault is not None:
            self._text = self._text.reopened(self._reopened())
            self.fault = None
        self._text.begin(self._readable(prompt))
        self._chooser.use_sampler(sampler)
        # Samples cannot be foreseen, so the level below drafts the likeliest tokens.
        self._level.begin(prompt, GREEDY if self._chooser.samples else sampler)
        self._forget()

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        # The draft reads the text and all draft tokens but the last.
        count = min(budget.num_draft_tokens, self._text.room)
        assumed = self._text.draft_tokens
        self.was_ready, self.passes = False, 0
        if count <= 0:
            self._tell_full()
            self._growth = nothing(pending)
            return self._growth.tree
        branches = budget.branches and not assumed and (budget.shape or not self._chooser.samples)
        if branches:
            self._growth = self._tree(pending, budget._replace(num_draft_tokens=count))
        else:
            self._growth = self._chain(pending, count, budget.min_reach)
        by_level = branches and self._chooser.samples
        self.anticipates = self._anticipates and not by_level
        self.rollback_draft(len(assumed))
        return self._growth.tree

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        super().observe(tree, out, verdict)
        self._text.extend(self._readable(verdict.tokens))
        self._level.observe(tree, out, verdict)
        self.anticipates = False
        if self._anticipates:
            self._ahead.follow(verdict.tokens)
        else:
            self._ahead.clear()

    def anticipate(self, stopped: Callable[[], bool]) -> None:
        longest = self._text.room - 1
        self._ahead.grow(self._read, self._acceptance.estimate, longest, stopped)

    def state(self, learnt_only: bool = False) -> dict[str, np.ndarray]:
        learnt = super().state(learnt_only)
        if learnt_only:
            return learnt
        text = named("text", self._text.snapshot())
        return {**learnt, **text, **named("level", self._level.state())}

    def load(self, state: Mapping[str, np.ndarray], learnt_only: bool = False) -> None:
        if not learnt_only:
            self._level.load(part_of(state, "level"))
            self._text.restore(part_of(state, "text"))
            self._growth = nothing(0)
            self._forget()
        super().load(state, learnt_only)

    @property
    def sibling_acceptance(self) -> Sequence[float]:
        if not (self._chooser.samples and self._trees):
            return ()
        return [self._acceptance.estimate(kind) for kind in SIBLING_KINDS]

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self._growth.teach(self._acceptance, verdict.tokens)
        self._text.candidate(self._readable(verdict.tokens))
        self._level.extend_draft(tree, out, verdict)

    def rollback_draft(self, keep: int) -> None:
        self._text.retract(keep)
        self._level.rollback_draft(keep)

    def _chain(self, pending: int, count: int, min_reach: float) -> Growth:
        """Draft a chain, starting with what was drafted ahead."""
        line = Line(count, min_reach, self._acceptance)
        self._take_over(line)
        while line.goes_on:
            self._write(line)
        return line.growth(pending, self.name, self._chooser.samples)

    def _take_over(self, line: Line) -> None:
        while line.goes_on:
            reading = self._ahead.get(tuple(self._text.draft_tokens))
            if reading is None:
                return
            line.add(reading.candidate)
            written = (reading.candidate.token,)
            verdict = Verdict(written, (), exhausted=True)
            self._level.extend_draft(TokenTree.chain(self._text.last), _NO_SCORES, verdict)
            self._text.candidate(written)
            self.was_ready = True

    def _write(self, line: Line) -> None:
        """Run one pass; the level below drafts for the draft."""
        ahead = self._level.chain(self._text.last, line.room - 1)
        ahead = self._readable_rows(ahead)
        logits = self._read_rows(ahead)
        path = self._text.draft_tokens
        row: int | None = 0
        rows: list[int] = []
        while row is not None and line.goes_on:
            reading = self._chooser.read(logits[row], path)
            if self._anticipates:
                self._ahead[tuple(path)] = reading
            choice = reading.candidate
            path.append(choice.token)
            line.add(choice)
            rows.append(row)
            row = ahead.child(row, choice.token)
        self._text.keep(rows)
        written = path[-len(rows) :]
        self._text.candidate(written)
        self._level.learn(ahead, logits, written)

    def _tree(self, pending: int, budget: Budget) -> Growth:
        """Grow the tree by its likeliest rows, or fill the requested shape with samples."""
        given = self.name, pending, budget, self._acceptance
        if self._chooser.samples:
            return sample_shape(*given, self._read_rows, self._text.max_rows, self._chooser.draw)
        root: Path = ()
        return grow(*given, root, self._expand, budget.num_draft_tokens)

    def _expand(self, path: Path) -> list[Candidate[Path]]:
        reading = self._ahead.get(path)
        if reading is None:
            reading = self._ahead[path] = self._read(path)
        elif not path:
            self.was_ready = True
        return candidates_after(path, reading.likeliest)

    def _read(self, path: Path) -> Reading:
        return self._chooser.read(self._score(path), path)

    def _score(self, path: Path) -> np.ndarray:
        """Return [vocab] logits after the text and these draft tokens. Takes a pass of one row if
        the row before it was scored last."""
        self._text.retract()
        self._text.candidate(path)
        logits: np.ndarray = self._read_rows(TokenTree.chain(self._text.last))[0]
        self._text.keep([0])
        return logits

    def _read_rows(self, tree: TokenTree) -> np.ndarray:
        self.passes += 1
        return self._text.score(tree)

    def _forget(self) -> None:
        self.anticipates = self.was_ready = False
        self._ahead.clear()

    def _tell_full(self) -> None:
        if self._text.room <= 0 and not self._told_full:
            self._told_full = True
            _log.warning(
                "the draft's context of %d tokens is full: the answer goes on without it",
                self._text.context_length,
            )

    def _readable(self, tokens: Sequence[int]) -> list[int]:
        return [token if token < self._vocab_size else 0 for token in tokens]

    def _readable_rows(self, chain: TokenTree) -> TokenTree:
        unknown = np.flatnonzero(chain.tokens >= self._vocab_size)
        return chain.first_rows(int(unknown[0])) if len(unknown) else chain


class Draft:
    """An open draft model with one session; its passes are watched (watchdog.py).

    `close` ends both; `close_session` leaves the model to others. vocab_size: of the target.
    step_s: seconds of a pass, if known. level: makes what drafts for the draft. translated: makes a
    drafter with the target's tokens, if the draft has others. anticipates: it reads ahead while the
    target verifies, on a session that nobody else needs meanwhile. identity: changes with whatever
    may change a bit of its cache.
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        step_s: float = 0.0,
        level: Callable[[Sequence[StageDrafter]], Stage] | None = None,
        translated: Callable[[Drafter], Drafter] | None = None,
        anticipates: bool = False,
        identity: str = "",
    ) -> None:
        self.identity = identity
        self.model = WatchedModel(model)
        self.step_s = step_s
        self._vocab_size = vocab_size
        self._level = level
        self._translated = translated
        self._anticipates = anticipates
        self._session = self.model.open_session()

    def make_drafter(
        self, below: Sequence[StageDrafter] = (), name: str = "draft-model"
    ) -> Drafter:
        """Return a drafter, which takes over the last one's session. below: draft for the draft."""
        if self._translated is not None:
            return self._translated(self.make_level(below, name))
        return self.make_level(below, name)

    def make_level(self, below: Sequence[StageDrafter], name: str) -> DraftModelDrafter:
        """Return a drafter in the draft's own tokens, for a level above."""
        level = self._level(below) if self._level and below else None
        return DraftModelDrafter(
            self.model,
            self._session,
            self._vocab_size,
            level,
            anticipates=self._anticipates,
            name=name,
            reopened=self._reopened,
        )

    def fork(self) -> Draft:
        other = copy(self)
        other._session = self.model.open_session()
        return other

    def _reopened(self) -> Session:
        """Replace a failed session. Raises HungError while one of its passes still runs, and what
        the runtime raises if the device is gone."""
        if isinstance(self._session, WatchedSession) and self._session.hangs:
            raise HungError("a pass of it still hangs", remedy="Load the model again.")
        close_quietly(self._session)
        self._session = self.model.open_session()
        return self._session

    def close_session(self) -> None:
        """Close the session, raising nothing even if the device is lost."""
        close_quietly(self._session)

    def close(self) -> None:
        self.close_session()
        self.model.close()
