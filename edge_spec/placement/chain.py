"""What a draft model's chains would gain, from one reading of recorded texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edge_spec.core.model import Model, Session
from edge_spec.core.tree import TokenTree
from edge_spec.placement.replay import PassCost, Recording

MOST_DRAFT_TOKENS = 8  # of a round
_ROWS = 32  # of a text that are read in one pass


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
    recordings: Sequence[Recording],
    hits: Sequence[Sequence[bool]],
    draft_s: float,
    pass_s: PassCost,
) -> Walk:
    """Returns the walk with the number of draft tokens that is fastest. draft_s: seconds a draft
    token."""
    walks = [walk(recordings, hits, n, draft_s, pass_s) for n in range(1, MOST_DRAFT_TOKENS + 1)]
    return max(walks, key=lambda each: each.tokens_per_s)


def walk(
    recordings: Sequence[Recording],
    hits: Sequence[Sequence[bool]],
    num_guesses: int,
    draft_s: float,
    pass_s: PassCost,
) -> Walk:
    """Rounds of this many draft tokens. At a text's end there are fewer, since its last token needs
    none; `pass_s` and `draft_s` are all that a round takes."""
    verified = accepted = tokens = 0
    seconds = 0.0
    for recording, right in zip(recordings, hits, strict=True):
        at = 0
        while at < len(right):
            draft_tokens = min(num_guesses, len(right) - at - 1)
            run = 0
            while run < draft_tokens and right[at + run]:
                run += 1
            context = len(recording.prompt) + at
            seconds += draft_tokens * draft_s + pass_s(draft_tokens + 1, context)
            verified += draft_tokens
            accepted += run
            tokens += run + 1
            at += run + 1
    return Walk(num_guesses, tokens, verified, accepted, seconds)
