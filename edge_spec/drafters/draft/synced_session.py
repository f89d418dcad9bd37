"""Keeps a draft's session in step with a text that others write.

On a device of its own, the draft may read ahead while the target verifies, for likely outcomes
(Bhendawade et al. 2025, Mirror Speculative Decoding; Liu et al. 2024, PEARL). An outcome is a path:
accepted draft tokens and one more. The draft's output depends on the path alone, so it stays valid.

So do samples: each path gets one, from a random number used nowhere else. Whether it is proposed
depends on time and on the text before it, whose random numbers come from other streams
(sampling.Purpose). So it follows its draft_probs independently of that, as verification requires.
It is proposed once at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Restorable, Session
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import named, part_of, restored_prompt

MAX_CATCH_UP = 8  # tokens that a pass may score before the requested rows; more are prefilled


class SyncedSession:
    """Follows a text and its draft tokens, rolling the session back and catching up when used.

    max_rows: of one pass. shared: the session reads its target's own cache, which then holds the
    text without its last token.
    """

    def __init__(
        self, session: Session, context_length: int, max_rows: int, shared: bool = False
    ) -> None:
        self._session = session
        self.context_length = context_length
        self._max_rows = max_rows
        self._tokens: list[int] = []  # of the text, then draft tokens
        self._num_text = 0
        self._shared = shared
        self._given = 0  # leading tokens that the target's cache provides
        self._held: list[int] = []  # in the cache after those
        self._agreed = 0  # length of the verified common prefix
        self._scored: list[int] = []  # by the last pass: tokens before its tree, then the tree's
        self._before = 0

    def reopened(self, session: Session) -> SyncedSession:
        """Return the same for another, empty session."""
        return SyncedSession(session, self.context_length, self._max_rows, self._shared)

    def begin(self, text: Sequence[int]) -> None:
        self._tokens = list(text)
        self._agreed = 0
        self._text_ends()

    def extend(self, tokens: Sequence[int]) -> None:
        """Continue the text, dropping all draft tokens."""
        self.retract()
        self._tokens += tokens
        self._text_ends()

    def candidate(self, tokens: Sequence[int]) -> None:
        """Append draft tokens."""
        self._tokens += tokens

    def retract(self, keep: int = 0) -> None:
        """Drop all draft tokens but the first `keep`."""
        del self._tokens[self._num_text + keep :]
        self._agreed = min(self._agreed, len(self._tokens))

    @property
    def last(self) -> int:
        return self._tokens[-1]

    @property
    def draft_tokens(self) -> list[int]:
        return self._tokens[self._num_text :]

    @property
    def room(self) -> int:
        """Return the rows that fit the context after all tokens but the last."""
        return self.context_length - len(self._tokens) + 1

    @property
    def max_rows(self) -> int:
        """Return the most rows that `score` accepts now."""
        return min(self.room, self._max_rows)

    def score(self, tree: TokenTree) -> np.ndarray:
        """Return [rows, vocab] logits of a tree whose row 0 is the last token. Valid until the next
        pass. Raises ContextFullError if it does not fit."""
        missing = self._missing()
        if len(missing) > min(MAX_CATCH_UP, self._max_rows - len(tree)):
            self._prefill(missing)
            missing = []
        out = self._session.forward(tree.prepend(missing))
        self._before = len(missing)
        self._scored = [*missing, *tree.tokens.tolist()]
        return out.logits[self._before :]

    def catch_up(self) -> None:
        """Read all tokens but the last."""
        if missing := self._missing():
            self._prefill(missing)

    def keep(self, rows: Sequence[int]) -> None:
        """Commit these rows of the last tree, a path from row 0."""
        kept = [*range(self._before), *(self._before + row for row in rows)]
        self._session.commit(kept)
        self._held += [self._scored[row] for row in kept]

    def snapshot(self) -> dict[str, np.ndarray]:
        """Return the cache's text and state if it is the session's own and restorable."""
        if self._shared or not isinstance(self._session, Restorable):
            return {}
        self.retract()
        self._drop_beyond(len(self._tokens))
        state = self._session.state()
        return {"held": np.array(self._held, np.int32), **named("session", state)} if state else {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Load a snapshot. Raises KeyError or ValueError, changing nothing, for anything else."""
        if not state or not isinstance(self._session, Restorable):
            return
        held = list(restored_prompt(state["held"]))
        self._session.restore(part_of(state, "session"), len(held))
        self._held = held
        self.begin(held)

    def _text_ends(self) -> None:
        self._num_text = len(self._tokens)
        if self._shared:
            self._given = self._agreed = self._num_text - 1
            self._held = []

    def _missing(self) -> list[int]:
        """Roll back to the common prefix; return the tokens that the cache lacks, without the
        last."""
        self._drop_beyond(len(self._tokens) - 1)
        return self._tokens[self._agreed : -1]

    def _prefill(self, tokens: list[int]) -> None:
        self._session.prefill(tokens)
        self._held += tokens

    def _drop_beyond(self, limit: int) -> None:
        """Roll the cache back to its common prefix with the first `limit` tokens."""
        last = min(self._given + len(self._held), limit)
        while (
            self._agreed < last
            and self._held[self._agreed - self._given] == self._tokens[self._agreed]
        ):
            self._agreed += 1
        self._agreed = min(self._agreed, last)
        # first, since an interrupt may come in between
        del self._held[self._agreed - self._given :]
        self._session.rollback(self._agreed)


Path = tuple[int, ...]

_LEAST_CHANCE = 0.02  # of a path; reading less likely ones is a waste
_MOST_READ = 64  # paths kept; each may hold a distribution


class AheadChoice(NamedTuple):
    """A possible next token, its kind, and the distribution it was sampled from, [vocab]."""

    token: int
    kind: int
    draft_probs: np.ndarray | None


Ranks = Sequence[tuple[int, int]]  # (token, kind), likeliest first


class Reading:
    """The draft's output after a path: its draft token, and the likeliest tokens, computed
    lazily."""

    def __init__(self, candidate: AheadChoice, rank: Callable[[], Ranks]) -> None:
        self.candidate = candidate
        self._rank = rank

    @cached_property
    def likeliest(self) -> Ranks:
        likeliest = self._rank()
        del self._rank  # it holds a whole distribution
        return likeliest


class DraftAheadCache(dict[Path, Reading]):
    """Readings by path after the text."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Continue the text with `tokens`, dropping readings after others."""
        start, length = tuple(tokens), len(tokens)
        kept = {path[length:]: self[path] for path in self if path[:length] == start}
        self.clear()
        self.update(kept)

    def grow(
        self,
        read: Callable[[Path], Reading],
        estimate: Callable[[int], float],
        max_length: int,
        stopped: Callable[[], bool],
    ) -> None:
        """Read the likeliest paths until none is likely, there are too many, or `stopped()`.
        estimate: acceptance of a kind of draft token. max_length: of a path."""
        paths: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
        pushed = 0
        while paths and len(self) < _MOST_READ and not stopped():
            negative, _, path = heappop(paths)
            if path not in self:
                self[path] = read(path)
            if len(path) == max_length:
                continue
            reading = self[path]
            followers = dict([reading.candidate[:2], *reading.likeliest])
            for token, kind in followers.items():
                chance = -negative * estimate(kind)
                if chance >= _LEAST_CHANCE:
                    pushed += 1
                    heappush(paths, (-chance, pushed, (*path, token)))
