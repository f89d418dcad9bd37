"""The session of an encoder-decoder. Users see one text, `source </s> start answer...`. When the
source ends, the encoder reads it at once, and the answer's positions begin at 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edge_spec.core.model import Forward, Session, require_rollback, require_room
from edge_spec.core.model_parts import Encoder
from edge_spec.core.tree import TokenTree

SOURCE = "source"  # name of its tokens in a state


class DecoderSession(Session, Protocol):
    """A decoder's cache, whose passes also attend to a source. `length` is the answer's."""

    def attend_to(self, source: Sequence[int]) -> None:
        """Encode these tokens, one or more, for all later passes."""

    def state(self) -> dict[str, np.ndarray]: ...

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None: ...


class SourceSession:
    """A `Session` of source and answer.

    The source ends before the first start token, or when a row is scored without one; an empty
    source is read as the start token. A changed source is encoded anew, as an encoder reads in both
    directions; a rollback into the answer keeps the encoding.

    A source that ends like the previous one, such as with `</s>`, is encoded while the prompt is
    read. Otherwise the answer's first pass would take many times as long as others, and drafting is
    decided by durations.
    """

    def __init__(self, decoder: DecoderSession, encoder: Encoder, context_length: int) -> None:
        """context_length: of source and answer together."""
        self._decoder = decoder
        self._description = encoder
        self._context_length = context_length
        self._source: list[int] = []
        self._has_ended = False  # the answer has begun
        self._encoded: list[int] | None = None  # the source that the decoder attends to
        self._last: int | None = None  # last token of the source before

    @property
    def length(self) -> int:
        return len(self._source) + self._decoder.length

    def prefill(self, tokens: Sequence[int]) -> None:
        require_room(self.length, len(tokens), self._context_length)
        tokens = list(tokens)
        if not self._has_ended:
            known = len(self._source)
            whole = self._source + tokens
            end = self._description.answer_start(whole)
            self._source = whole[:end]
            self._has_ended = end is not None
            tokens = tokens[len(self._source) - known :]
        if tokens:
            self._encode()
            self._decoder.prefill(tokens)
        elif self._source and self._source[-1] == self._last:
            self._encode()

    def forward(self, tree: TokenTree) -> Forward:
        require_room(self.length, len(tree), self._context_length)
        self._encode()
        return self._decoder.forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        self._decoder.commit(rows)
        self._has_ended = True
        self._last = self._source[-1] if self._source else None

    def rollback(self, length: int) -> None:
        require_rollback(self.length, length)
        answer = length - len(self._source)
        self._decoder.rollback(max(answer, 0))
        if answer <= 0:
            del self._source[length:]
            self._has_ended = False

    def state(self) -> dict[str, np.ndarray]:
        """Return the decoder's state and "source" [tokens] int32, which is encoded again."""
        return {**self._decoder.state(), SOURCE: np.array(self._source, np.int32)}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        if not 0 <= length <= self._context_length:
            raise ValueError(f"{length} tokens for a context of {self._context_length}")
        source = state.get(SOURCE)
        if source is None or source.dtype != np.int32 or source.ndim != 1 or len(source) > length:
            raise ValueError(f"a state of {sorted(state)} without the tokens of a source")
        answer = {name: array for name, array in state.items() if name != SOURCE}
        self._decoder.restore(answer, length - len(source))
        self._source = source.tolist()
        self._has_ended = len(source) < length
        self._last = self._source[-1] if self._source and self._has_ended else None

    def close(self) -> None:
        self._decoder.close()

    def _encode(self) -> None:
        if self._encoded != self._source:
            self._encoded = None  # also if this raises
            self._decoder.attend_to(self._source or [self._description.start_id])
            self._encoded = list(self._source)
