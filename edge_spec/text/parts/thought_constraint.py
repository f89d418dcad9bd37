"""Limit a thought to its budget, and constrain the text after it to the answer's form.

A thought may contain anything. This is an ordinary constraint, which drafts obey, too, so the
output does not depend on drafts.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from edge_spec.core.sampling import Constraint
from edge_spec.text.parts.answer_form import AnswerForm, ThoughtForm
from edge_spec.text.parts.part import overlap
from edge_spec.text.token_pieces import TokenPieces

_MAX_LEFT = 3  # bytes that may complete a character, each maybe a token


class _Place(Enum):
    BEGINNING = 1  # a thought may open, or the answer may begin without one
    THOUGHT = 2
    ENDING = 3  # the next tokens are fixed
    AFTER = 4


@dataclass(frozen=True)
class _State:
    """tail: end of this part's text. count: tokens of the thought. left: remaining tokens of the
    ending. following: tokens after the thought."""

    place: _Place
    tail: bytes = b""
    count: int = 0
    left: tuple[int, ...] = ()
    following: tuple[int, ...] = ()


class ThoughtConstraint:
    """Allows a thought at the beginning, and then what `inner` allows."""

    def __init__(
        self,
        form: AnswerForm,
        thought: ThoughtForm,
        pieces: TokenPieces,
        vocab_size: int,
        stop_ids: Sequence[int],
        inner: Constraint | None,
    ) -> None:
        """inner: None if the answer may have any form."""
        self._thought = thought
        self._opening, self._closing = thought.opening.encode(), thought.closing.encode()
        self._text_opening = b"" if inner is None else form.text_opening.encode()
        self._codec = pieces.codec
        self._pieces = pieces
        self._vocab_size = vocab_size
        self._stop_ids = frozenset(stop_ids)
        self._budget = form.budget
        self._inner = inner
        self._within: dict[int, np.ndarray] = {}  # by written bytes of the closing tag
        self._state = _State(_Place.BEGINNING)
        if form.is_opened:
            self._state = self._within_budget(_State(_Place.THOUGHT))

    def allowed(self, path: Sequence[int]) -> np.ndarray:
        state, count = self._walked(path)
        allowed = np.zeros(self._vocab_size, np.bool_)
        if state.place is _Place.ENDING and count == len(path):
            allowed[state.left[0]] = True
        elif self._inner is None or count < len(path):
            allowed[:] = True
        elif state.place is _Place.AFTER:
            return self._inner.allowed(state.following)
        elif state.place is _Place.THOUGHT:
            return self._allowed_within(state)
        else:
            if not self._text_opening and self._fits(state.following):
                allowed = self._inner.allowed(state.following)
            allowed[self._opening_tokens(state)] = True
        return allowed

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return self._walked(tokens)[1]

    def forced(self) -> list[int]:
        state = self._state
        if state.place is _Place.ENDING:
            return list(state.left)
        if state.place is not _Place.AFTER or self._inner is None:
            return []
        return self._inner.forced()

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            state = self._next(self._state, token)
            if state is None or state.place is _Place.AFTER:
                following = (*self._state.following, token) if state is None else state.following
                if self._inner is not None and following:
                    self._inner.observe(following)
                state = _State(_Place.AFTER)
            self._state = state

    def _walked(self, path: Sequence[int]) -> tuple[_State, int]:
        """Return the state after the path's allowed tokens, and their number."""
        state = self._state
        for count, token in enumerate(path):
            if state.place is _Place.AFTER:
                whole = (*state.following, *path[count:])
                fit = len(whole) if self._inner is None else self._inner.num_allowed(whole)
                return replace(state, following=whole), fit - len(state.following) + count
            following = self._next(state, token)
            if following is None:
                return state, count
            state = following
        return state, len(path)

    def _next(self, state: _State, token: int) -> _State | None:
        if state.place is _Place.AFTER:
            return replace(state, following=(*state.following, token))
        if state.place is _Place.ENDING:
            if token != state.left[0]:
                return None
            left = state.left[1:]
            return replace(state, left=left) if left else _State(_Place.AFTER)
        if state.place is _Place.BEGINNING:
            return self._after_beginning(state, token)
        return self._after_thought(state, token)

    def _after_beginning(self, state: _State, token: int) -> _State | None:
        written = (state.tail + self._written(token)).lstrip()
        following = (*state.following, token)
        if written.startswith(self._opening):
            rest = written[len(self._opening) :]
            return self._within_budget(_State(_Place.THOUGHT, rest))
        if self._text_opening and written == self._text_opening:
            return _State(_Place.AFTER)
        fits = not self._text_opening and self._fits(following)
        openings = (self._opening, self._text_opening)
        is_begun = any(each.startswith(written) for each in openings)
        is_opening = is_begun and token not in self._stop_ids
        if is_opening and (fits or token in self._opening_tokens(state)):
            return _State(_Place.BEGINNING, written, following=following)
        return _State(_Place.AFTER, following=following) if fits else None

    def _after_thought(self, state: _State, token: int) -> _State | None:
        if token in self._stop_ids:
            return None if self._inner is not None else _State(_Place.AFTER)
        before, closing, rest = (state.tail + self._written(token)).partition(self._closing)
        if not closing:
            kept = before[-len(self._closing) - _MAX_LEFT :]
            return self._within_budget(_State(_Place.THOUGHT, kept, state.count + 1))
        if self._inner is None:
            return _State(_Place.AFTER)
        if rest.strip():
            return None
        space = rest.decode("utf-8", "replace")
        after = self._thought.ending.partition(self._thought.closing)[2]
        return self._ending(after[len(space) :] if after.startswith(space) else after.lstrip())

    def _within_budget(self, state: _State) -> _State:
        """End the thought once its budget is spent and its last character complete."""
        if self._budget is None or state.count < self._budget:
            return state
        _, length = codecs.utf_8_decode(state.tail, "replace", False)
        if length < len(state.tail) and state.count < self._budget + _MAX_LEFT:
            return state
        text = state.tail.decode("utf-8", "replace")
        ending = self._thought.ending_after(text or self._thought.opening)
        return self._ending(ending)

    def _ending(self, text: str) -> _State:
        left = self._encoded(text)
        return _State(_Place.ENDING, left=left) if left else _State(_Place.AFTER)

    def _encoded(self, text: str) -> tuple[int, ...]:
        encode = self._codec.encode
        before, whole = encode("a"), encode(f"a{text}")
        if whole[: len(before)] != before:  # the letter merged with the text
            before, whole = encode(""), encode(text)
        return tuple(whole[len(before) :])

    def _written(self, token: int) -> bytes:
        special = self._codec.special_text(token)
        return special.encode() if special else self._pieces.of(token).raw or b""

    def _opening_tokens(self, state: _State) -> list[int]:
        openings = (self._opening, self._text_opening)
        rests = [each[len(state.tail) :] for each in openings if each.startswith(state.tail)]
        return [self._encoded(rest.decode())[0] for rest in rests if rest]

    def _fits(self, following: Sequence[int]) -> bool:
        return self._inner is None or self._inner.num_allowed(following) == len(following)

    def _allowed_within(self, state: _State) -> np.ndarray:
        """Allow everything; before a constrained answer, neither stop tokens nor tokens that
        contain its beginning."""
        begun = overlap(state.tail.decode("latin-1"), self._closing.decode("latin-1"))
        allowed = self._within.get(begun)
        if allowed is None:
            allowed = np.ones(self._vocab_size, np.bool_)
            allowed[list(self._stop_ids)] = False
            allowed[self._tokens_beyond(self._closing[begun:])] = False
            self._within[begun] = allowed
        return allowed.copy()

    def _tokens_beyond(self, rest: bytes) -> list[int]:
        """Return tokens that close the thought and continue with more than whitespace."""
        found = []
        last = rest[-1:].decode("latin-1")
        for token in self._pieces.spelled_with(last):
            if token < self._vocab_size:
                written = self._written(token)
                is_rest = written.startswith(rest) and written[len(rest) :].strip()
                if is_rest or written.partition(self._closing)[2].strip():
                    found.append(token)
        return found
