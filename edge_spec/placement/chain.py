"""Forecasts what a draft model's chains would gain, from one reading of recorded texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from edge_spec.core.model import Model, Session
from edge_spec.core.tree import TokenTree
from edge_spec.placement.measure import LEAST_S
from edge_spec.placement.replay import PassCost, Recording

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
