"""One KV cache over a llama.cpp context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from edge_spec.core.features import OnPrefilled, require_layers
from edge_spec.core.model import Forward, require_rollback, require_room, require_state
from edge_spec.core.threads import ThreadGovernor
from edge_spec.core.tree import TokenTree
from edge_spec.core.turns import own_clock
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.batch import Batch, ContextOutputs
from edge_spec.runtimes.llamacpp.features import Features, KeysValues, new_tap
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS, ContextChoices, Library
from edge_spec.runtimes.llamacpp.transfer import (
    holds,
    holds_windowed,
    read_sequence,
    read_windowed,
    write_sequence,
    write_windowed,
)
from edge_spec.runtimes.llamacpp.weights import NO_REASON, GgufWeights

TEXT = 0
# A tree that is no chain has fewer leaves than rows, so that none of its branches has this number.
HELD = MAX_ROWS - 1


class Branches:
    """Branches share the cells of their common prefix, as in llama.cpp's examples/speculative.

    keeps_order: whether the tokens of the text stand in the cells in their order, which attention
    adds them up in. The library puts new tokens into the first free cells, so rejected rows that
    stand before kept ones are not given up then: they stay in the sequence HELD, which nobody
    reads, until the text is written to an empty cache. No cell before the text's last one is free.
    """

    def __init__(self, library: Library, keeps_order: bool) -> None:
        self.num_held = 0  # cells that may be in HELD
        self._library = library
        self._keeps_order = keeps_order
        self._tree: TokenTree | None = None  # whose rows are not committed
        self._sequences = np.empty(0, np.int32)  # [rows] the first one of each

    def __bool__(self) -> bool:
        """Says whether there are any but the text."""
        return self._tree is not None

    def begin(self, memory: int, tree: TokenTree, sequences: np.ndarray) -> None:
        """Has each branch begin with the text. sequences: [rows] the first one of each."""
        self._tree, self._sequences = tree, sequences
        for sequence in range(1, self._count):
            self._library.sequence_copy(memory, TEXT, sequence, -1, -1)

    def commit(self, memory: int, rows: Sequence[int], length: int) -> None:
        """Adds these rows to a text of `length` tokens, and forgets the branches."""
        library, kept = self._library, int(self._sequences[rows[-1]])
        if self._keeps_order:
            self._hold(memory, rows, length)
        # An interrupt may come between any two of these: the committed tokens never leave the
        # text, and what else is left in it is removed before the next pass.
        if kept != TEXT:
            library.sequence_remove(memory, TEXT, length, -1)
            library.sequence_copy(memory, kept, TEXT, length, length + len(rows))
        self.drop(memory)

    def drop(self, memory: int) -> None:
        """Forgets all of them but the text."""
        if self._tree is None:
            return
        if self._keeps_order:
            for sequence in range(1, self._count):
                self._library.sequence_remove(memory, sequence, -1, -1)
        else:
            self._library.sequence_keep(memory, TEXT)
        self._tree = None

    def empty(self, memory: int) -> None:
        """Forgets the text, too."""
        self.drop(memory)
        for sequence in (TEXT, HELD) if self._keeps_order else (TEXT,):
            self._library.sequence_remove(memory, sequence, -1, -1)
        self.num_held = 0

    def moved(self) -> None:
        """Is told that the text alone has moved to another cache."""
        self._tree, self.num_held = None, 0

    @property
    def _count(self) -> int:
        return int(self._sequences.max()) + 1

    def _hold(self, memory: int, rows: Sequence[int], length: int) -> None:
        """Holds the rejected rows that stand before the last kept one."""
        assert self._tree is not None
        for leaf in self._tree.leaves.tolist():
            before = [row for row in self._tree.path(leaf) if row <= rows[-1]]
            shared = sum(row in rows for row in before)  # with the kept path: the first ones
            if shared < len(before):
                branch, ends = int(self._sequences[leaf]), (length + shared, length + len(before))
                self._library.sequence_copy(memory, branch, HELD, *ends)
                self.num_held += len(before) - shared


FIRST_TOKENS = 2048  # of a new cache, which doubles when it is full
_NOTHING = np.empty(0, np.uint8)


class LlamaCppSession:
    """Committed tokens are sequence 0; the branches of a tree are sequences only during a round."""

    def __init__(self, weights: GgufWeights, choices: ContextChoices, context_length: int) -> None:
        self.length = 0
        self._weights = weights
        self._library = weights.library
        self._context_length = context_length
        self._choices = replace(choices, num_tokens=min(FIRST_TOKENS, context_length))
        self._threads = None if choices.on_device else ThreadGovernor(choices.threads)
        self._batch = Batch(self._library.batch_type, PREFILL_TOKENS, MAX_ROWS)
        self._opened = weights.open_context(self, self._choices)
        self._outputs = ContextOutputs(weights, self._opened.handle, choices.steady_rows)
        self._cached = 0  # tokens that the cache may hold, uncommitted ones included
        self._features: Features | None = None  # that are collected
        self._shared: KeysValues | None = None  # that someone reads
        self._branches = Branches(weights.library, choices.invariant_rows)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        features = self._features
        is_scored = features is not None and features.has_final
        self._outputs.want_hidden(is_scored)  # for which every token is scored
        self._outputs.want_steady(False)
        batch = self._batch.chain if is_scored else self._batch.prefill
        for start in range(0, len(tokens), PREFILL_TOKENS):
            chunk = tokens[start : start + PREFILL_TOKENS]
            self._decode(batch(chunk, self.length))
            if self._shared is not None:
                self._take_shared(len(chunk))
                self._shared.commit(range(len(chunk)), self.length)
            self.length += len(chunk)
            if features is not None:
                found = self._read_features(features, len(chunk))
                features.on_prefilled(self.length - len(chunk), found)
        self._library.synchronize(self._context())  # whoever reads a clock next, reads it right

    def forward(self, tree: TokenTree) -> Forward:
        rows = len(tree)
        if rows > MAX_ROWS:
            raise ValueError(f"{rows} rows in one pass; at most {MAX_ROWS}")
        self._reserve(rows)
        self._outputs.want_hidden(True)
        started_s = own_clock()
        self._outputs.want_steady(rows == 1)
        if tree.is_chain:
            self._decode(self._batch.chain(tree.tokens, self.length))
        else:
            self._decode(self._branched(tree))
        self._share_out(rows, own_clock() - started_s)
        out = self._outputs.scores(rows)
        if self._shared is not None:
            self._take_shared(rows)
        if self._features is None:
            return out
        return replace(out, features=self._read_features(self._features, rows))

    def commit(self, rows: Sequence[int]) -> None:
        length = self.length + len(rows)
        if self._branches:
            self._branches.commit(self._library.memory(self._context()), rows, self.length)
        if self._shared is not None:
            self._shared.commit(rows, self.length)
        self.length = length

    def rollback(self, length: int) -> None:
        """Raises SessionError where a sliding window has forgotten what then would be needed."""
        require_rollback(self.length, length)
        if length == self.length:
            return
        start = self._library.sequence_start(self._library.memory(self._context()), 0)
        window = self._weights.state_window or length  # before it nothing is looked at
        if length and start > max(0, length - window):
            raise SessionError(
                f"{self._library.name} holds this text from token {start} on only, so that it "
                f"cannot go back to token {length}",
                remedy="Begin a new conversation.",
            )
        self.length = length
        if self._shared is not None:
            self._shared.cut(length)

    @property
    def collects(self) -> bool:
        return self._features is not None or self._shared is not None

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        """See `edge_spec.core.features.GivesFeatures`. Final states of a prompt cost its scores,
        without which llama.cpp gives none, and a context that holds these."""
        require_layers(layers, self._weights.num_layers)
        wanted = Features(self._weights, layers, on_prefilled, self._choices) if layers else None
        fitted = wanted.fitted(self._choices) if wanted is not None else self._choices
        if fitted != self._choices:
            self._reserve(0)
            self._grow(fitted)
        if fitted.tap is not None:
            fitted.tap.want(wanted.streams if wanted is not None else ())
        self._features = wanted

    def share_keys_values(self, layers: Sequence[int]) -> None:
        """See `edge_spec.core.features.SharesKeysValues`."""
        shared = KeysValues(self._weights.config, layers) if layers else None
        if shared is not None and self._choices.tap is None:
            self._reserve(0)
            tap = new_tap(self._weights, PREFILL_TOKENS)
            self._grow(replace(self._choices, tap=tap))
        if self._choices.tap is not None:
            self._choices.tap.want_keys_values(shared.sizes if shared is not None else {})
        self._shared = shared

    def keys_values(self, layer: int) -> tuple[np.ndarray, np.ndarray] | None:
        """See `edge_spec.core.features.SharesKeysValues`."""
        known = self._shared is not None and self._shared.length >= self.length
        return self._shared.of(layer) if self._shared is not None and known else None

    def _take_shared(self, rows: int) -> None:
        self._library.synchronize(self._context())
        if self._shared is not None:
            self._shared.take(self._choices.tap, rows)

    def state(self) -> dict[str, np.ndarray]:
        """ "sequence" [bytes] uint8, in the library's own form; empty where that is not known."""
        self._reserve(0)
        sequence = self._read_sequence()
        return {"sequence": sequence} if self._holds(sequence, self.length) else {}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        sequence = state.get("sequence", _NOTHING)
        expected = {"sequence": (sequence.shape[:1], np.uint8)}
        require_state(state, expected, length, self._context_length)
        if not self._holds(sequence, length):
            raise ValueError(f"no sequence of {length} tokens")
        self._move_to(self._roomier(length), sequence, length)
        if self._shared is not None:
            self._shared.cut(0)

    def close(self) -> None:
        self.length = 0
        self._opened.free()

    def _context(self) -> int:
        """Raises SessionError once the session or its model is closed."""
        if not self._opened.free.alive:
            raise SessionError("the session is closed", remedy="Open another one.")
        return self._opened.handle

    def _reserve(self, rows: int) -> None:
        """Leaves the committed tokens alone in a cache that has room for `rows` more."""
        require_room(self.length, rows, self._context_length)
        self._context()
        if self._cached > self.length:
            memory = self._library.memory(self._context())
            self._branches.drop(memory)
            self._drop_uncommitted(memory)
            self._cached = self.length
        needed = self.length + rows
        if needed + self._branches.num_held > self._choices.num_tokens:
            self._grow(self._roomier(needed))

    def _drop_uncommitted(self, memory: int) -> None:
        self._library.sequence_remove(memory, 0, self.length, -1)

    def _roomier(self, length: int) -> ContextChoices:
        """Returns those of a context for `length` tokens: as it is, or twice as large."""
        room = self._choices.num_tokens
        if length > room:
            room = min(max(length, 2 * room), self._context_length)
        return replace(self._choices, num_tokens=room)

    def _grow(self, choices: ContextChoices) -> None:
        """Moves the cache into another context. Where that fails the old one stays."""
        try:
            self._move_to(choices, self._read_sequence(), self.length)
        except ValueError:
            raise SessionError(
                f"{self._library.name} could not move {self.length} tokens to a larger cache",
                remedy="Give a shorter --context.",
            ) from None

    def _read_sequence(self) -> np.ndarray:
        """[bytes] uint8, in the library's own form."""
        window = self._weights.state_window
        if window:
            return read_windowed(self._library, self._context(), self.length, window)
        return read_sequence(self._library, self._context(), 0)

    def _write_sequence(self, context: int, sequence: np.ndarray) -> None:
        """Raises ValueError where the library does not take it."""
        if self._weights.state_window:
            write_windowed(self._library, context, sequence)
        else:
            write_sequence(self._library, context, sequence, 0)

    def _holds(self, sequence: np.ndarray, length: int) -> bool:
        """Says whether it is one of `length` tokens, that the library may be given."""
        form, window = self._library.state_form, self._weights.state_window
        if window:
            return holds_windowed(sequence, length, window, form)
        return holds(sequence, length, form)

    def _move_to(self, choices: ContextChoices, sequence: np.ndarray, length: int) -> None:
        """Another context, which holds this sequence. Raises ValueError where the library does not
        take it; the old context stays then."""
        before = self._opened
        if self._threads is not None:
            choices = replace(choices, threads=self._threads.threads)
        after = self._weights.open_context(self, choices)
        if length:
            try:
                self._write_sequence(after.handle, sequence)
            except ValueError:
                after.free()
                raise
        outputs = ContextOutputs(self._weights, after.handle, choices.steady_rows)
        # In one statement, so that an interrupt finds one or the other.
        self._opened, self._choices, self._outputs, self.length = after, choices, outputs, length
        self._cached = length
        self._branches.moved()
        before.free()

    def _share_out(self, rows: int, seconds: float) -> None:
        """The next pass has as many threads as are fastest beside what else is running. No score
        depends on their number where attention does not share out a single row."""
        governor = self._threads
        if governor is None:
            return
        before = governor.threads
        threads = governor.observe(rows, seconds)
        if threads != before:
            self._library.set_threads(self._opened.handle, threads, threads)

    def _branched(self, tree: TokenTree) -> Any:
        """The batch of a tree, whose branches the cache then knows as sequences."""
        self._cached = self.length + len(tree)
        batch, sequences = self._batch.tree(tree, self.length)
        self._branches.begin(self._library.memory(self._context()), tree, sequences)
        return batch

    def _decode(self, batch: Any) -> None:
        """Raises SessionError; the cache is cleaned before the next pass."""
        self._cached = self.length + batch.n_tokens
        library, tap = self._library, self._choices.tap
        if tap is not None:
            tap.begin()
        known = library.log.num_errors
        status = library.decode(self._opened.handle, batch)
        if status:
            raise SessionError(
                f"{library.name} failed to score {batch.n_tokens} tokens after "
                f"{self.length} (status {status}): {library.log.errors_after(known) or NO_REASON}",
                remedy="Give a shorter --context or another --device.",
            )

    def _read_features(self, features: Features, rows: int) -> np.ndarray:
        """Returns those of the last pass."""
        self._library.synchronize(self._context())
        hidden = self._outputs.hidden(rows) if features.has_final else None
        return features.read(self._choices.tap, rows, hidden)
