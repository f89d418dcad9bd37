"""Measures whether a text can depend on who else is being served, and makes shared passes ready
beside those that run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from threading import Lock, Thread
from typing import NamedTuple

import numpy as np

from edge_spec.core.model import Forward, Model, Restorable, Session
from edge_spec.core.shared_pass import PassPart, SharesPasses
from edge_spec.core.tree import TokenTree
from edge_spec.exactness.batch_invariance import agreeing_beyond, is_large
from edge_spec.exactness.lossless import Losslessness

_HELD = (40, 23)  # tokens of the two conversations
_ROWS = ((1, 1), (1, 3), (4, 2), (5, 6))  # of the two in one pass, one after the other
_WIDE_ROWS = (9, 14)  # in passes of each width that has room for them
_PROMPT, _LARGE_PROMPT = 256, 64  # tokens: of a large model fewer tell as much
# Of a prompt, at once, while others write. On a processor with two cores 32 tokens take as long as
# a few rounds of theirs, and one of them hardly longer than in a pass of 256 (1.33 and 1.27 ms).
SLICE_TOKENS = 32

Together = Callable[[Sequence[PassPart], int], list[Forward]]  # `SharesPasses.forward_together`
_ANY_ROWS = 64  # of a shared pass, where widths need not agree
_ROWS_EACH = 4  # of a shared pass, that widths are looked for up to

_log = logging.getLogger(__name__)


class Sharing(NamedTuple):
    """The way in which passes are shared. widths: that they keep to, ascending; empty where any
    will do. slices: whether prompts may be read SLICE_TOKENS at a time."""

    widths: tuple[int, ...]
    slices: bool


def settle_sharing(
    model: Model, widths: Sequence[int], together: Together, num_rows: int = 0
) -> Sharing | None:
    """Measures how to share passes without changing a bit of texts whose own passes keep to
    `widths`, or to any where there are none. None where that cannot be. together: makes a shared
    pass, while nobody else does. num_rows: of shared passes, where wider ones are wanted."""
    if not widths:
        return Sharing((), True)
    own = tuple(widths)
    for tried in dict.fromkeys((agreeing_beyond(model, own, num_rows), own)):
        if shares_alike(model, tried, together):
            return Sharing(tried, slices_alike(model, SLICE_TOKENS))
    return None


def shares_alike(model: Model, widths: Sequence[int], together: Together) -> bool:
    """Says whether chains score bit for bit alike in passes that two sessions share and in passes
    of their own, which are widened to the next of these ascending widths."""
    drawn = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(token) for token in drawn.integers(0, model.config.vocab_size, count)]

    with ExitStack() as opened:
        own, shared = (
            [opened.enter_context(closing(model.open_session())) for _ in _HELD] for _ in range(2)
        )
        for pair, held in zip(zip(own, shared, strict=True), _HELD, strict=True):
            prompt = tokens(held)
            for session in pair:
                session.prefill(prompt)
        passes = [(counts, wider(sum(counts), widths)) for counts in _ROWS]
        passes += [(_WIDE_ROWS, width) for width in widths if width >= sum(_WIDE_ROWS)]
        for counts, width in passes:
            if width is None:
                continue
            trees = [TokenTree.chain(tokens(1)[0], tokens(count - 1)) for count in counts]
            parts = [PassPart(*each) for each in zip(shared, trees, strict=True)]
            outs = together(parts, width)
            for session, tree, part, out in zip(own, trees, parts, outs, strict=True):
                expected = session.forward(tree.padded(wider(len(tree), widths) or 0)).logits
                if not np.array_equal(expected[: len(tree)], out.logits):
                    return False
                session.commit(range(len(tree)))
                part.session.commit(range(len(tree)))
    return True


def slices_alike(model: Model, rows: int) -> bool:
    """Measures whether a prompt leaves the same cache, bit for bit, read in one pass or in slices
    of `rows` tokens and fewer, down to half of it."""
    length = _LARGE_PROMPT if is_large(model.config) else _PROMPT
    length = min(length, model.config.context_length - 1)
    prompt = np.random.default_rng(1).integers(0, model.config.vocab_size, length).tolist()
    sizes = [rows, max(1, rows // 2), max(1, 3 * rows // 4 + 1)]  # in turns
    states = []
    for whole in (True, False):
        with closing(model.open_session()) as session:
            start = 0
            while start < length:
                end = length if whole else min(length, start + sizes[start % len(sizes)])
                session.prefill(prompt[start:end])
                start = end
            states.append(_state(session))
    read, sliced = states
    return bool(read) and all(np.array_equal(read[name], sliced[name]) for name in read)


def wider(rows: int, widths: Sequence[int]) -> int | None:
    """Returns the first of these ascending widths that has `rows` rows; `rows` where there are
    none, None where all are narrower."""
    return next((width for width in widths if width >= rows), None) if widths else rows


def _state(session: Session) -> dict[str, np.ndarray]:
    return session.state() if isinstance(session, Restorable) else {}


class SharingSetup:
    """Knows how passes may be shared by now; finds out more in threads of its own, one at a time.

    most: conversations that may share a pass, 1 for none. sharing: how, if they may.
    """

    def __init__(self, model: Model, lossless: Losslessness, together: Together) -> None:
        """together: makes a pass for two sessions of the setup's own, between those of others."""
        self.most = 1
        self.sharing = Sharing(lossless.widths, slices=False)
        self._model = model
        self._together = together
        self._widths = lossless.widths  # of passes of one conversation
        self._lock = Lock()
        self._thread: Thread | None = None
        self._prepared_for = 1

    @property
    def widest(self) -> int:
        """Rows of a shared pass, at most."""
        widths, most = self.sharing.widths, self._model.capabilities.verified_rows
        return widths[-1] if widths else min(_ANY_ROWS, most)

    def prepare_for(self, num_conversations: int) -> None:
        """Begins to make ready for that many, unless it has."""
        if num_conversations <= self._prepared_for or not isinstance(self._model, SharesPasses):
            return
        with self._lock:
            if num_conversations > self._prepared_for:
                self._prepared_for = num_conversations
                before = self._thread
                self._thread = Thread(
                    target=self._run, args=(num_conversations, before), daemon=True
                )
                self._thread.start()

    def settle(self) -> None:
        """Returns when nothing is being prepared."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, num_conversations: int, before: Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            self._prepare(num_conversations)
        except Exception as error:  # whatever the library raises: all goes on as before
            _log.info("shared passes are not made ready: %s", error)

    def _prepare(self, num_conversations: int) -> None:
        assert isinstance(self._model, SharesPasses)
        most = self._model.prepare_sharing(num_conversations)
        rows = _ROWS_EACH * min(num_conversations, most)
        rows = min(rows, self._model.capabilities.verified_rows)
        if most > 1 and (self.most < 2 or (self._widths and rows > self.widest)):
            found = settle_sharing(self._model, self._widths, self._together, rows)
            if found is None and self.most < 2:
                _log.info("passes are not shared: that would change texts on this machine")
                return
            if found is not None and (self.most < 2 or found.widths[-1] > self.widest):
                self.sharing = found
        self.most = most
