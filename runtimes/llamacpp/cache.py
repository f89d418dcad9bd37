"""The cells that the conversations on one model have in llama.cpp.

A `Cache` has one context, in which each conversation is a sequence from its beginning, so that a
pass may score rows of several. Where the context is full, or another one is needed, it is opened,
and each conversation moves there with its next pass. The old one is freed when all have left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock, get_ident
from typing import Any

import numpy as np

from edge_spec.core import turns
from edge_spec.core.model import Forward
from edge_spec.core.threads import ThreadGovernor
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.batch import Batch
from edge_spec.runtimes.llamacpp.cells import (
    NUM_SEQUENCES,
    PADDING,
    CacheSequence,
    Context,
    SequenceRows,
    keeps_order,
)
from edge_spec.runtimes.llamacpp.features import Tap
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS, ContextChoices
from edge_spec.runtimes.llamacpp.transfer import (
    read_sequence,
    read_windowed,
    write_sequence,
    write_windowed,
)
from edge_spec.runtimes.llamacpp.weights import NO_REASON, GgufWeights

FIRST_TOKENS = 2048  # of a new cache, which doubles when it is full
_SPARE = 1.5  # times the cells in use, that a new context of several conversations has


class Cache:
    """Of all conversations on a model where these share passes, else of one. Any thread may call.

    There is a context while there are conversations.
    """

    def __init__(self, weights: GgufWeights, choices: ContextChoices, context_length: int) -> None:
        self.weights = weights
        self.library = weights.library
        self.context_length = context_length
        self.choices = choices  # of the next context, but for its size
        if keeps_order(choices):
            self.choices = replace(choices, num_sequences=NUM_SEQUENCES)
        self._lock = Lock()
        self._batch = Batch(self.library.batch_type, PREFILL_TOKENS, MAX_ROWS)
        self._threads = None if choices.on_device else ThreadGovernor(choices.threads)
        self._sequences: list[CacheSequence] = []
        self._current: Context | None = None

    def join(self) -> CacheSequence:
        """Add a conversation without tokens. Raises SessionError, DeviceMemoryError."""
        with self._lock:
            self._collect()
            context = self._current
            if context is None or not context.free.alive or not context.has_numbers(1):
                context = self._open(0)
            [number] = context.take_numbers(1)
            self._sequences.append(CacheSequence(context, number))
            return self._sequences[-1]

    def leave(self, sequence: CacheSequence) -> None:
        """Wait for no pass: where one runs, the next one gives the cells up."""
        sequence.is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def score(self, sequence: CacheSequence, tree: TokenTree) -> Forward:
        """Score a conversation's rows. Scores are valid until its next pass.

        Raises SessionError, DeviceMemoryError; there are no rows to commit then."""
        sequence.has_rows = False
        rows, is_chain = len(tree), tree.is_chain
        with self._turn():
            context = self._prepare([sequence], rows, 0 if is_chain else len(tree.leaves))
            started_s = turns.own_clock()
            context.outputs.want_hidden(True)
            context.outputs.want_steady(rows == 1)
            cells = range(context.tail, context.tail + rows)
            numbers = context.begin(self.library, sequence, tree, cells)
            if is_chain:
                batch = self._batch.chain(tree.tokens, sequence.length, sequence.number)
            else:
                batch = self._batch.mixed(_rows(sequence, tree, numbers, True))
            self._decode(context, [sequence], batch)
            self._share_out(context, rows, turns.own_clock() - started_s)
            out = context.outputs.scores(rows)
            if len(self._sequences) == 1:
                context.viewer = sequence  # nobody else writes to the library's own buffers
            else:
                out = Forward(out.logits.copy(), None if out.hidden is None else out.hidden.copy())
            if sequence.features is not None or sequence.keys_values is not None:
                out = self._with_features(context, sequence, out, rows)
        sequence.has_rows = True
        return out

    def score_together(self, parts: Sequence[SequenceRows], num_rows: int) -> list[Forward]:
        """Score rows of several conversations in one pass. Scores are copies; they come without
        hidden states where not all rows are scored. Features are those of all rows. num_rows: of
        the pass, if more than the parts have. Raises as `score` does."""
        sequences = [part.sequence for part in parts]
        if any(sequence.needs_final_states for sequence in sequences):
            parts = [part._replace(is_scored=True) for part in parts]
        rows = max(num_rows, sum(len(part.tree) for part in parts))
        branches = sum(0 if part.tree.is_chain else len(part.tree.leaves) for part in parts)
        is_whole = all(part.is_scored for part in parts)
        with self._turn():
            context = self._prepare(sequences, rows, branches)
            started_s = turns.own_clock()
            context.outputs.want_hidden(is_whole)
            context.outputs.want_steady(rows == 1)
            batch, places, outputs = self._lay_out(context, parts, rows)
            self._decode(context, sequences, batch)
            self.library.sequence_remove(context.memory, PADDING, -1, -1)
            self._share_out(context, rows, turns.own_clock() - started_s)
            whole, outs = context.outputs.scores(1 + max(map(max, filter(len, outputs)))), []
            for sequence, at_rows, at in zip(sequences, places, outputs, strict=True):
                hidden = None if whole.hidden is None else whole.hidden[at]
                out = Forward(whole.logits[at], hidden)
                outs.append(self._with_features(context, sequence, out, rows, at_rows))
        for sequence in sequences:
            sequence.has_rows = True
        return outs

    def read(self, sequence: CacheSequence, tokens: Sequence[int]) -> np.ndarray | None:
        """Add up to PREFILL_TOKENS tokens to a conversation without scores; returns the features of
        these, if any are collected. Raises SessionError, DeviceMemoryError."""
        sequence.has_rows = False
        with self._turn():
            count, length = len(tokens), sequence.length
            context = self._prepare([sequence], count)
            is_scored = sequence.needs_final_states  # for which every token is
            context.outputs.want_hidden(is_scored)
            context.outputs.want_steady(False)
            batch = self._batch.chain(tokens, length, sequence.number, is_scored)
            self._decode(context, [sequence], batch)
            sequence.cells.extend(range(context.tail, context.tail + count))
            sequence.outcome = (length + count, ())
            if sequence.keys_values is not None:
                self.library.synchronize(context.handle)
                sequence.keys_values.take(context.choices.tap, count)
                sequence.keys_values.commit(range(count), length)
            return self._features(context, sequence, count)

    def wait(self, sequence: CacheSequence) -> None:
        """Return when the passes of a conversation are done: devices go on by themselves."""
        self.library.synchronize(sequence.home.handle)

    def require_open(self, sequence: CacheSequence) -> Context:
        """Return a conversation's context. Raises SessionError once it or its model is closed."""
        if sequence.is_closed or not sequence.home.free.alive:
            raise SessionError("the session is closed", remedy="Open another one.")
        return sequence.home

    def first_position(self, sequence: CacheSequence) -> int:
        """Return the first position of a conversation that the library still has."""
        return self.library.sequence_start(sequence.home.memory, sequence.number)

    def require_tap(self, tap: Tap) -> None:
        """Have the next passes keep what a tap takes. tap: the one for it if there is none yet."""
        if self.choices.tap is None:
            self.choices = replace(self.choices, tap=tap)

    def settle(self, sequence: CacheSequence, rows: int = 0) -> Context:
        """Leave the tokens of a conversation alone in its context, with room for `rows` more.
        Raises SessionError, DeviceMemoryError."""
        with self._turn():
            return self._prepare([sequence], rows)

    def stored(self, sequence: CacheSequence) -> np.ndarray:
        """Return [bytes] uint8, in the library's own form. Raises SessionError."""
        with self._turn():
            self._prepare([sequence], 0)
            return self._read(sequence)

    def replace(self, sequence: CacheSequence, stored: np.ndarray, length: int) -> None:
        """Give a conversation the tokens of a stored sequence. Raises ValueError where the library
        does not take it, SessionError, DeviceMemoryError; nothing is changed then."""
        with self._turn():
            context = self._prepare([sequence], 0)
            # What is left where it was may be written over in a window, out of the order of cells.
            is_fresh = bool(self.weights.state_window) or not keeps_order(self.choices)
            is_full = context.tail + length > context.choices.num_tokens
            if is_fresh or is_full or not context.has_numbers(1):
                context = self._open(length)
            self._put(sequence, context, stored, length)
            self._collect()

    def _turn(self) -> Lock:
        """Return the lock; what a thread waits for it is no time of its own."""
        if self._lock.locked():
            thread, started_s = get_ident(), time.perf_counter()
            turns.begin_waiting(thread)
            try:
                with self._lock:
                    pass
            finally:
                turns.end_waiting(thread)
                turns.add_wait(time.perf_counter() - started_s)
        return self._lock

    def _prepare(self, sequences: Sequence[CacheSequence], rows: int, branches: int = 0) -> Context:
        """Bring these together in a context that has room for `rows` more, and settle it."""
        context = self._current
        first = sequences[0]
        if context is not None and len(self._sequences) == 1 and first.home is context:
            is_settled = context.take_chain(self.library, first)
            if is_settled and not self._needs_another(context, sequences, rows, branches):
                return context
        for each in sequences:
            self.require_open(each)
        self._collect(sequences)
        context = self._current
        moving = [each for each in sequences if each.home is not context]
        needed = rows + sum(each.length for each in moving)
        if context is None or self._needs_another(
            context, sequences, needed, branches + len(moving)
        ):
            context = self._open(rows)
        for each in sequences:
            if each.home is not context:
                self._move(each, context)
        return context

    def _needs_another(
        self, context: Context, sequences: Sequence[CacheSequence], rows: int, numbers: int
    ) -> bool:
        wanted, found = self.choices, context.choices
        if context.tail + rows > found.num_tokens or context.is_broken:
            return True
        if numbers and not context.has_numbers(numbers):
            return True
        if wanted.tap is not found.tap or wanted.num_outputs != found.num_outputs:
            return True
        viewer = context.viewer  # who may be reading its scores
        return viewer is not None and not viewer.is_closed and viewer not in sequences

    def _collect(self, joining: Sequence[CacheSequence] = ()) -> None:
        """Settle contexts, and free those that nobody needs any more."""
        for context in {each.home for each in self._sequences}:
            here = [each for each in self._sequences if each.home is context]
            if not context.free.alive or all(each.is_closed for each in here):
                context.free()
                self._sequences = [each for each in self._sequences if each.home is not context]
                self._current = None if self._current is context else self._current
                continue
            context.settle(self.library, here, joining)
            for each in here:
                if each.is_closed:
                    self._sequences.remove(each)
                    context.give_back([each.number])

    def _open(self, rows: int) -> Context:
        """Open a context with room for all, and `rows` more. Raises SessionError,
        DeviceMemoryError."""
        open_ones = [each for each in self._sequences if not each.is_closed]
        used = sum(each.length for each in open_ones) + rows
        before, most = self._current, self.context_length * max(1, len(open_ones))
        room = FIRST_TOKENS if before is None else before.choices.num_tokens
        wanted = int(used * (_SPARE if len(open_ones) > 1 else 1))
        if wanted > room:
            room = max(wanted, 2 * room)
        room = max(used, min(room, most))
        choices = replace(self.choices, num_tokens=room)
        if self._threads is not None:
            choices = replace(choices, threads=self._threads.threads)
        opened = self.weights.open_context(self, choices)
        self._current = Context(self.weights, opened, choices)
        if before is not None and all(each.home is not before for each in self._sequences):
            before.free()
        return self._current

    def _move(self, sequence: CacheSequence, context: Context) -> None:
        length, before = sequence.length, sequence.home
        self.library.sequence_remove(before.memory, sequence.number, length, -1)
        try:
            self._put(sequence, context, self._read(sequence), length)
        except ValueError:
            raise SessionError(
                f"{self.library.name} could not move {length} tokens to a larger cache",
                remedy="Give a shorter --context.",
            ) from None
        self._collect([sequence])

    def _put(
        self, sequence: CacheSequence, context: Context, stored: np.ndarray, length: int
    ) -> None:
        """Write a stored sequence to a context. Raises ValueError where the library does not take
        it; the conversation is where it was then."""
        [number] = context.take_numbers(1)
        try:
            if length:
                self._write(context, number, stored)
        except BaseException:
            context.give_back([number])
            if all(each.home is not context for each in self._sequences):
                context.free()
                self._current = sequence.home
            raise
        left = CacheSequence(sequence.home, sequence.number, sequence.cells, is_closed=True)
        cells = list(range(context.tail, context.tail + length))
        context.tail += length
        self._sequences.append(left)
        sequence.home, sequence.number, sequence.cells = context, number, cells
        sequence.pending, sequence.outcome = None, (length, ())

    def _read(self, sequence: CacheSequence) -> np.ndarray:
        context, length = sequence.home, sequence.length
        if not self.weights.state_window:
            return read_sequence(self.library, context.handle, sequence.number)
        window, [spare] = self.weights.state_window, context.take_numbers(1)
        context.give_back([spare])
        numbers = sequence.number, spare
        return read_windowed(self.library, context.handle, numbers, length, window)

    def _write(self, context: Context, number: int, stored: np.ndarray) -> None:
        if not self.weights.state_window:
            write_sequence(self.library, context.handle, stored, number)
            return
        [spare] = context.take_numbers(1)
        context.give_back([spare])
        write_windowed(self.library, context.handle, (number, spare), stored)

    def _lay_out(
        self, context: Context, parts: Sequence[SequenceRows], num_rows: int
    ) -> tuple[Any, list[list[int]], list[list[int]]]:
        """Begin a pass: returns its batch, where each part's rows are in it, and where their
        scores. First rows are before second ones: what is rejected then comes after what is
        kept."""
        order = sorted((row, at) for at, part in enumerate(parts) for row in range(len(part.tree)))
        places = [[i for i, (_, at) in enumerate(order) if at == p] for p in range(len(parts))]
        rows: list[Any] = [(0, at, (PADDING,), True) for at in range(num_rows)]
        for part, at_rows in zip(parts, places, strict=True):
            cells = [context.tail + at for at in at_rows]
            numbers = context.begin(self.library, part.sequence, part.tree, cells)
            own = _rows(part.sequence, part.tree, numbers, part.is_scored)
            for at, row in zip(at_rows, own, strict=True):
                rows[at] = row
        output = np.cumsum([row[-1] for row in rows]) - 1  # of each row that has one
        outputs = [
            output[at_rows].tolist() if part.is_scored else []
            for part, at_rows in zip(parts, places, strict=True)
        ]
        return self._batch.mixed(rows), places, outputs

    def _decode(self, context: Context, sequences: Sequence[CacheSequence], batch: Any) -> None:
        """Raises SessionError."""
        library, tap = self.library, context.choices.tap
        if tap is not None:
            wanted = {
                layer for each in sequences if each.features for layer in each.features.streams
            }
            shared = sequences[0].keys_values
            tap.want(sorted(wanted))
            tap.want_keys_values({} if shared is None else shared.sizes)
            tap.begin()
        known = library.log.num_errors
        context.is_broken, context.viewer = True, None
        status = library.decode(context.handle, batch)
        if status:
            for sequence in sequences:
                sequence.outcome = (sequence.length, ())
            lengths = " and ".join(str(sequence.length) for sequence in sequences)
            raise SessionError(
                f"{library.name} failed to score {batch.n_tokens} tokens after {lengths} (status "
                f"{status}): {library.log.errors_after(known) or NO_REASON}",
                remedy="Give a shorter --context or another --device.",
            )
        context.is_broken = False

    def _with_features(
        self,
        context: Context,
        sequence: CacheSequence,
        out: Forward,
        num_rows: int,
        rows: Sequence[int] | None = None,
    ) -> Forward:
        """Add what is collected of these rows of the last pass, of `num_rows`; None: of all."""
        if sequence.keys_values is not None:
            self.library.synchronize(context.handle)
            sequence.keys_values.take(context.choices.tap, num_rows)
        if sequence.features is None:
            return out
        return replace(out, features=self._features(context, sequence, num_rows, rows))

    def _features(
        self,
        context: Context,
        sequence: CacheSequence,
        num_rows: int,
        rows: Sequence[int] | None = None,
    ) -> np.ndarray | None:
        """Return what is collected of these rows of the last pass, of `num_rows`."""
        features = sequence.features
        if features is None:
            return None
        self.library.synchronize(context.handle)
        hidden = context.outputs.hidden(num_rows) if features.has_final else None
        return features.read(context.choices.tap, num_rows, hidden, rows)

    def _share_out(self, context: Context, rows: int, seconds: float) -> None:
        """The next pass has as many threads as are fastest beside what else is running. No score
        depends on their number where attention does not share out a single row."""
        governor = self._threads
        if governor is None:
            return
        before = governor.threads
        threads = governor.observe(rows, seconds)
        if threads != before:
            self.library.set_threads(context.handle, threads, threads)


def _rows(
    sequence: CacheSequence, tree: TokenTree, numbers: Sequence[int], is_scored: bool
) -> list[tuple[int, int, Sequence[int], bool]]:
    """Return token, position and sequences of each row. numbers: the sequence of each leaf; a row
    has those of the leaves below it."""
    below: list[list[int]] = [[] for _ in range(len(tree))]
    if tree.is_chain:
        below = [list(numbers)] * len(tree)
    else:
        for leaf, number in zip(tree.leaves.tolist(), numbers, strict=True):
            for row in tree.path(leaf):
                below[row].append(number)
    positions = (sequence.length + tree.depths).tolist()
    return [
        (token, position, own, is_scored)
        for token, position, own in zip(tree.tokens.tolist(), positions, below, strict=True)
    ]
