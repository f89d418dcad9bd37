"""The KV cache of the conversations on a llama.cpp model.

Each conversation is a sequence in the `Cache`'s context, so a pass may score rows of several. When
another context opens, each conversation moves there with its next pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock, get_ident
from typing import NamedTuple

import numpy as np

from edge_spec.core import turns
from edge_spec.core.model import Forward
from edge_spec.core.threads import ThreadGovernor
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.llamacpp.context import (
    NUM_SEQUENCES,
    Batch,
    CacheSequence,
    Context,
    keeps_order,
)
from edge_spec.runtimes.llamacpp.features import Features, Tap, Tapped, new_tap, unsupported
from edge_spec.runtimes.llamacpp.library import NAME, NO_REASON, PREFILL_TOKENS, ContextChoices
from edge_spec.runtimes.llamacpp.transfer import read_windowed, write_windowed
from edge_spec.runtimes.llamacpp.weights import GgufWeights

FIRST_TOKENS = 2048  # of a new cache, which doubles
_TRIED_TOKENS = 256  # of a trial context; the library's minimum
_SPARE = 1.5  # room of a new context for several conversations, times their cells


class SequenceRows(NamedTuple):
    """A conversation's rows in a pass. is_scored: whether their logits are read."""

    sequence: CacheSequence
    tree: TokenTree
    is_scored: bool = True


class Cache:
    """The cache of one conversation, or of all that share passes. Thread-safe."""

    def __init__(self, weights: GgufWeights, choices: ContextChoices) -> None:
        self.weights = weights
        self.context_length = weights.config.context_length
        self.choices = choices  # of the next context, except its size
        if keeps_order(choices):
            self.choices = replace(choices, num_sequences=NUM_SEQUENCES)
        self._lock = Lock()
        self._batch = Batch(weights.library.llama_batch, PREFILL_TOKENS)
        self._offsets = np.arange(PREFILL_TOKENS)
        self._threads = None if choices.on_device else ThreadGovernor(choices.threads)
        self._sequences: list[CacheSequence] = []
        self._current: Context | None = None

    def join(self) -> CacheSequence:
        """Add an empty conversation. Raises SessionError, DeviceMemoryError."""
        with self._lock:
            self._collect()
            context = self._current
            if context is None or not context.free.alive or not context.has_numbers(1):
                context = self._open(0)
            [number] = context.take_numbers(1)
            self._sequences.append(CacheSequence(context, number))
            return self._sequences[-1]

    def leave(self, sequence: CacheSequence) -> None:
        """Close a conversation without waiting: its cells are freed now, or by the next pass if one
        runs."""
        sequence.is_closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def score(self, parts: Sequence[SequenceRows]) -> list[Forward]:
        """Score rows of conversations in one pass. Hidden states are given only if all parts are
        scored or a sequence collects final states; features cover all rows. Raises SessionError,
        DeviceMemoryError; then no rows can be committed."""
        sequences = [part.sequence for part in parts]
        rows, branches, num_scored, is_whole = 0, 0, 0, False
        for sequence, tree, is_scored in parts:
            sequence.has_rows = False
            rows += len(tree)
            branches += 0 if tree.is_chain else len(tree.leaves)
            num_scored += is_scored
            is_whole = is_whole or sequence.needs_final_states
        is_whole = is_whole or num_scored == len(parts)
        with self._turn():
            context = self._prepare(sequences, rows, branches)
            started_s = turns.own_clock()
            context.want_hidden(is_whole)
            context.want_steady(rows == 1 and num_scored > 0)
            places = self._lay_out(context, parts, rows, is_whole)
            self._decode(context, sequences, rows, num_scored > 0)
            if num_scored:
                self._share_out(context, rows, turns.own_clock() - started_s)
            outs = self._outputs(context, parts, places, rows)
        for sequence in sequences:
            sequence.has_rows = True
        return outs

    def require_open(self, sequence: CacheSequence) -> Context:
        """Return a conversation's context. Raises SessionError if closed."""
        if sequence.is_closed or not sequence.home.free.alive:
            raise SessionError("the session is closed", remedy="Open another one.")
        return sequence.home

    def require_tap(self, tap: Tap) -> None:
        """Have the next passes use a tap: this one if there is none yet."""
        if self.choices.tap is None:
            self.choices = replace(self.choices, tap=tap)

    def collect(self, sequence: CacheSequence, features: Features | None) -> None:
        """Collect features from the next pass on. Raises UnsupportedModelError, SessionError."""
        if features is not None:
            self._require_streams(features.streams)
            self.choices = features.fitted(self.choices)
        sequence.features = features

    def _require_streams(self, streams: Sequence[Tapped]) -> None:
        """Try new streams with a one-token pass in a context of its own."""
        untried = [each for each in streams if each.layer not in self.weights.known_streams]
        if not untried:
            return
        tap, batch = new_tap(self.weights, 1), Batch(self.weights.library.llama_batch, 1)
        tap.want(untried)
        batch.put(slice(1), TokenTree.chain(0), 0, [0], True)
        batch.struct.n_tokens = 1
        context = Context(self.weights, replace(self.choices, num_tokens=_TRIED_TOKENS, tap=tap))
        try:
            failed = context.decode(batch.struct, is_scored=False)
            context.wait()
        finally:
            context.free()
        missing = [each.layer for each in untried if failed or tap.rows(each, 1) is None]
        if missing:
            named = f"inputs of the layers {', '.join(map(str, missing))}"
            architecture = self.weights.config.architecture
            raise unsupported(f"{named} of the architecture {architecture!r}")
        self.weights.known_streams.update(each.layer for each in untried)

    def settle(self, sequence: CacheSequence, rows: int = 0) -> Context:
        """Drop uncommitted rows, make room for `rows`. Raises SessionError, DeviceMemoryError."""
        with self._turn():
            return self._prepare([sequence], rows)

    def stored(self, sequence: CacheSequence) -> np.ndarray:
        """Return the sequence as [bytes] uint8 in the library's format. Raises SessionError."""
        with self._turn():
            self._prepare([sequence], 0)
            return self._read(sequence)

    def replace(self, sequence: CacheSequence, stored: np.ndarray, length: int) -> None:
        """Load a stored sequence. Raises ValueError if the library refuses it, SessionError,
        DeviceMemoryError; then nothing changes."""
        with self._turn():
            context = self._prepare([sequence], 0)
            # A sliding window may reuse the old sequence's cells, out of order.
            is_fresh = bool(self.weights.state_window) or not keeps_order(self.choices)
            is_full = context.tail + length > context.choices.num_tokens
            if is_fresh or is_full or not context.has_numbers(1):
                context = self._open(length)
            self._put(sequence, context, stored, length)
            self._collect()

    def _turn(self) -> Lock:
        """Return the lock; waiting for it is not the thread's own time."""
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
        """Move the sequences to one settled context with room for `rows`."""
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
        viewer = context.viewer  # may still read its scores
        return viewer is not None and not viewer.is_closed and viewer not in sequences

    def _collect(self, joining: Sequence[CacheSequence] = ()) -> None:
        for context in {each.home for each in self._sequences}:
            here = [each for each in self._sequences if each.home is context]
            if not context.free.alive or all(each.is_closed for each in here):
                context.free()
                self._sequences = [each for each in self._sequences if each.home is not context]
                self._current = None if self._current is context else self._current
                continue
            context.settle(here, joining)
            for each in here:
                if each.is_closed:
                    self._sequences.remove(each)
                    context.give_back([each.number])

    def _open(self, rows: int) -> Context:
        """Open a context for all tokens and `rows` more."""
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
        self._current = Context(self.weights, choices)
        if before is not None and all(each.home is not before for each in self._sequences):
            before.free()
        return self._current

    def _move(self, sequence: CacheSequence, context: Context) -> None:
        length, before = sequence.length, sequence.home
        before.remove(sequence.number, length)
        try:
            self._put(sequence, context, self._read(sequence), length)
        except ValueError:
            raise SessionError(
                f"{NAME} could not move {length} tokens to a larger cache",
                remedy="Give a shorter --context.",
            ) from None
        self._collect([sequence])

    def _put(
        self, sequence: CacheSequence, context: Context, stored: np.ndarray, length: int
    ) -> None:
        """Write a stored sequence to a context. Raises ValueError, with nothing changed, if the
        library refuses it."""
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
        context, window = sequence.home, self.weights.state_window
        if window:
            return read_windowed(context, sequence.number, sequence.length, window)
        return context.read(sequence.number)

    def _write(self, context: Context, number: int, stored: np.ndarray) -> None:
        if self.weights.state_window:
            write_windowed(context, number, stored)
        else:
            context.write(stored, number)

    def _lay_out(
        self, context: Context, parts: Sequence[SequenceRows], num_rows: int, is_whole: bool
    ) -> list[slice | np.ndarray]:
        """Begin a pass and return each part's rows in the batch: all first rows, then all second
        ones, so that rejected rows come last."""
        places: list[slice | np.ndarray] = [slice(num_rows)]
        if len(parts) > 1:
            order = sorted(
                (row, at) for at, part in enumerate(parts) for row in range(len(part.tree))
            )
            owners = np.array([at for _, at in order])
            places = [np.flatnonzero(owners == at) for at in range(len(parts))]
        span = range(context.tail, context.tail + num_rows)
        for (sequence, tree, is_scored), at in zip(parts, places, strict=True):
            cells = span[at] if isinstance(at, slice) else (at + context.tail).tolist()
            numbers = context.begin(sequence, tree, cells)
            self._batch.put(at, tree, sequence.length, numbers, is_scored or is_whole)
        return places

    def _decode(
        self,
        context: Context,
        sequences: Sequence[CacheSequence],
        num_rows: int,
        is_scored: bool,
    ) -> None:
        log, tap = self.weights.library.log, context.choices.tap
        if tap is not None:
            streams = {each for one in sequences if one.features for each in one.features.streams}
            shared = sequences[0].keys_values
            tap.want([*sorted(streams), *(shared.wanted if shared else ())])
        known = log.num_errors
        context.is_broken, context.viewer = True, None
        self._batch.struct.n_tokens = num_rows
        status = context.decode(self._batch.struct, is_scored)
        if status:
            for sequence in sequences:
                sequence.outcome = (sequence.length, ())
            lengths = " and ".join(str(sequence.length) for sequence in sequences)
            raise SessionError(
                f"{NAME} failed to score {num_rows} tokens after {lengths} (status {status}): "
                f"{log.errors_after(known) or NO_REASON}",
                remedy="Give a shorter --context or another --device.",
            )
        context.is_broken = False

    def _outputs(
        self,
        context: Context,
        parts: Sequence[SequenceRows],
        places: Sequence[slice | np.ndarray],
        num_rows: int,
    ) -> list[Forward]:
        outs, outputs = [], self._offsets[:num_rows]
        if len(parts) > 1:
            outputs = self._batch.outputs(num_rows)
        for (sequence, _, is_scored), rows in zip(parts, places, strict=True):
            if not is_scored:
                out = Forward(np.empty((0, self.weights.vocab_size), np.float32))
            elif len(self._sequences) == 1:
                out = context.scores(num_rows)
                context.viewer = sequence  # nobody else overwrites the library's buffers
            else:
                out = context.scores(int(outputs[-1]) + 1)
                own = outputs[rows]
                hidden = None if out.hidden is None else out.hidden[own]
                out = Forward(out.logits[own], hidden)  # copies
            if sequence.features is not None or sequence.keys_values is not None:
                out = self._with_features(context, sequence, out, num_rows, rows)
            outs.append(out)
        return outs

    def _with_features(
        self,
        context: Context,
        sequence: CacheSequence,
        out: Forward,
        num_rows: int,
        rows: slice | np.ndarray,
    ) -> Forward:
        features, keys_values = sequence.features, sequence.keys_values
        context.wait()
        if keys_values is not None:
            keys_values.take(context.choices.tap, num_rows)
        if features is None:
            return out
        hidden = context.hidden(num_rows) if features.has_final else None
        return replace(out, features=features.read(context.choices.tap, num_rows, hidden, rows))

    def _share_out(self, context: Context, rows: int, seconds: float) -> None:
        """Choose the next pass's threads. Scores do not depend on it unless attention splits single
        rows."""
        governor = self._threads
        if governor is None:
            return
        before = governor.threads
        threads = governor.observe(rows, seconds)
        if threads != before:
            self.weights.library.llama_set_n_threads(context.handle, threads, threads)
