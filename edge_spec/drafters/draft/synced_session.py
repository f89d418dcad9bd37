"""A session of a draft that is kept in step with a text which others write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Restorable, Session
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.state import named, part_of, restored_prompt

MAX_CATCH_UP = 8  # tokens that a pass may score before the rows asked for; more are prefilled


class SyncedSession:
    """Follows a text and the draft tokens after it: the session is rolled back to where it agrees
    with them, and caught up, when it is next asked.

    max_rows: of one pass. shared: the session reads its target's own cache, which holds the text
    without its last token whenever the draft is asked.
    """

    def __init__(
        self, session: Session, context_length: int, max_rows: int, shared: bool = False
    ) -> None:
        self._session = session
        self.context_length = context_length
        self._max_rows = max_rows
        self._tokens: list[int] = []  # of the text, then of the draft tokens
        self._num_text = 0
        self._shared = shared
        self._given = 0  # leading tokens that the cache holds without our doing
        self._held: list[int] = []  # what it holds after them
        self._agreed = 0  # leading tokens of both that are known to be equal
        self._scored: list[int] = []  # of the last pass: tokens before its tree, then the tree's
        self._before = 0

    def reopened(self, session: Session) -> SyncedSession:
        """The same with another session, which is empty."""
        return SyncedSession(session, self.context_length, self._max_rows, self._shared)

    def begin(self, text: Sequence[int]) -> None:
        self._tokens = list(text)
        self._agreed = 0
        self._text_ends()

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on, whatever was drafted."""
        self.retract()
        self._tokens += tokens
        self._text_ends()

    def candidate(self, tokens: Sequence[int]) -> None:
        """Appends to the draft tokens."""
        self._tokens += tokens

    def retract(self, keep: int = 0) -> None:
        """Forgets all draft tokens but the first `keep`."""
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
        """Counts the rows that fit the context after all tokens but the last."""
        return self.context_length - len(self._tokens) + 1

    @property
    def max_rows(self) -> int:
        """Counts the rows of a tree that `score` takes now."""
        return min(self.room, self._max_rows)

    def score(self, tree: TokenTree) -> np.ndarray:
        """[rows, vocab] logits of a tree whose row 0 holds the last token; valid until the next
        pass. Raises ContextFullError where it does not fit."""
        self._synchronize()
        missing = self._tokens[self._agreed : -1]
        if len(missing) > min(MAX_CATCH_UP, self._max_rows - len(tree)):
            self._session.prefill(missing)
            self._held += missing
            missing = []
        out = self._session.forward(tree.prepend(missing))
        self._before = len(missing)
        self._scored = [*missing, *tree.tokens.tolist()]
        return out.logits[self._before :]

    def catch_up(self) -> None:
        """Reads all of the text and the draft tokens but their last token."""
        self._synchronize()
        missing = self._tokens[self._agreed : -1]
        if missing:
            self._session.prefill(missing)
            self._held += missing

    def keep(self, rows: Sequence[int]) -> None:
        """Puts these rows of the last tree, a path from row 0, into the cache."""
        kept = [*range(self._before), *(self._before + row for row in rows)]
        self._session.commit(kept)
        self._held += [self._scored[row] for row in kept]

    def snapshot(self) -> dict[str, np.ndarray]:
        """Returns what the cache holds of the text; nothing where the session cannot tell it, or
        shares its cache."""
        if self._shared or not isinstance(self._session, Restorable):
            return {}
        self.retract()
        self._drop_beyond(len(self._tokens))
        state = self._session.state()
        return {"held": np.array(self._held, np.int32), **named("session", state)} if state else {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises KeyError or ValueError for what is no snapshot of such a session, and changes
        nothing then."""
        if not state or not isinstance(self._session, Restorable):
            return
        held = list(restored_prompt(state["held"]))
        self._session.restore(part_of(state, "session"), len(held))
        self._held = held
        self.begin(held)

    def close(self) -> None:
        self._session.close()

    def _text_ends(self) -> None:
        self._num_text = len(self._tokens)
        if self._shared:
            self._given = self._agreed = self._num_text - 1
            self._held = []

    def _synchronize(self) -> None:
        """Drops what the cache holds beyond its agreement with all tokens but the last."""
        self._drop_beyond(len(self._tokens) - 1)

    def _drop_beyond(self, limit: int) -> None:
        """Drops what the cache holds beyond its agreement with the first `limit` tokens."""
        last = min(self._given + len(self._held), limit)
        while (
            self._agreed < last
            and self._held[self._agreed - self._given] == self._tokens[self._agreed]
        ):
            self._agreed += 1
        self._agreed = min(self._agreed, last)
        del self._held[self._agreed - self._given :]  # first: an interrupt may come in between
        self._session.rollback(self._agreed)
