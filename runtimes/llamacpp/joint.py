"""One cache that several conversations have moved into, so that a pass scores rows of all of them.

Cells are given out one after the other, and none is given out again before all conversations have
moved into another cache. So the tokens of each stand in their order, whoever has written between
them. ggml's flash attention on a CPU goes through the cells in their order and skips those of
others: its sums are those of a cache of its own, bit for bit. A token in an earlier cell that was
given out again would be summed first. A row of a tree stands after its parent, so trees keep the
order, too. The library looks for empty cells from the beginning, so what is rejected, or left
between cells of others, stays in a sequence that nobody reads, HELD.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.threads import ThreadGovernor
from edge_spec.core.tree import TokenTree
from edge_spec.core.turns import own_clock
from edge_spec.errors import SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.batch import Batch, scores_of
from edge_spec.runtimes.llamacpp.features import Features, SharedFeatures
from edge_spec.runtimes.llamacpp.library import ContextChoices
from edge_spec.runtimes.llamacpp.transfer import read_sequence, write_sequence
from edge_spec.runtimes.llamacpp.weights import NO_REASON, GgufWeights, OpenContext

if TYPE_CHECKING:
    from edge_spec.runtimes.llamacpp.features import Features


@dataclass
class WrittenRows:
    """The rows that a conversation's last pass has written. branches: the first sequence of each
    row, and all sequences of a tree beside the conversation's own; None for a chain."""

    cells: list[int]
    branches: np.ndarray | None = None
    numbers: Sequence[int] = ()


@dataclass(eq=False)
class Member:
    """One conversation in the cache.

    outcome: how many tokens it has, and which rows of its last pass are among them, None before it
    has chosen. Its own thread sets that, at any time; all else is changed between passes.
    """

    number: int  # of its sequence
    cells: list[int]  # of its tokens, ascending
    outcome: tuple[int, Sequence[int] | None]
    features: Features | None = None  # that are collected of it
    last: WrittenRows | None = None
    has_left: bool = False

    @property
    def is_undecided(self) -> bool:
        return self.last is not None and self.outcome[1] is None and not self.has_left

    @property
    def needs_final_states(self) -> bool:
        """Says whether those of all of its rows are collected, unscored ones included."""
        return self.features is not None and self.features.has_final

    @property
    def num_cells(self) -> int:
        return len(self.cells) + (len(self.last.cells) if self.last else 0)

    @property
    def end(self) -> int:
        """The cell after those that it may go on to need."""
        cells = [*self.cells[-1:], *(self.last.cells if self.last else ())]
        return max(cells, default=-1) + 1

    def lay_out(
        self, tree: TokenTree, branches: Sequence[int]
    ) -> list[tuple[int, int, Sequence[int]]]:
        """Begins a pass over a tree; returns token, position and sequences of each row. branches:
        numbers of sequences for its leaves but the first; none for a chain."""
        self.outcome = (self.outcome[0], None)
        self.last = WrittenRows([])
        sequences: list[list[int]] = [[self.number]] * len(tree)
        if not tree.is_chain:
            sequences = _sequences_of_rows(tree, [self.number, *branches])
            self.last.numbers = branches
            self.last.branches = np.array([each[0] for each in sequences])
        positions = (len(self.cells) + tree.depths).tolist()
        return list(zip(tree.tokens.tolist(), positions, sequences, strict=True))


class JointRows(NamedTuple):
    """Describes what a conversation has in a pass."""

    member: Member
    tree: TokenTree
    is_scored: bool = True


def _sequences_of_rows(tree: TokenTree, numbers: Sequence[int]) -> list[list[int]]:
    """Returns for each row the sequences of the leaves below it. numbers: of each leaf's."""
    below = tree.ancestors[tree.leaves].T  # [rows, leaves]
    return [[numbers[leaf] for leaf in np.flatnonzero(row).tolist()] for row in below]


HELD, _PADDING, _FIRST = 0, 1, 2  # numbers of sequences; those of conversations and branches follow
NUM_SEQUENCES = 128  # llama.cpp takes 256, and has room for the scores of as many rows
FIRST_CELLS = 1024
_ROOM = 1.5  # times the cells in use, that a cache has at least when all move into it


class JointCache:
    """There is a context while there are members. Any thread may call."""

    def __init__(self, weights: GgufWeights, choices: ContextChoices) -> None:
        """choices: of the sessions that may join."""
        self._weights = weights
        self._library = weights.library
        self._choices = replace(choices, batch_tokens=MAX_ROWS, num_sequences=NUM_SEQUENCES)
        self._lock = RLock()
        self._batch = Batch(self._library.batch_type, MAX_ROWS, MAX_ROWS)
        self._features = SharedFeatures(weights, MAX_ROWS)
        self._threads = ThreadGovernor(choices.threads)
        self._members: list[Member] = []
        self._opened: OpenContext | None = None
        self._steady_rows: Callable[[bool], None] | None = None
        self._is_steady = False
        self._is_broken = False  # whether cells may be others than those that are noted here
        self._free_numbers = list(range(NUM_SEQUENCES - 1, _FIRST - 1, -1))
        self._num_cells = 0
        self._tail = 0  # all cells before it are in use, none after it
        self._held_end = 0  # the cell after the last one in HELD

    def join(self, sequence: np.ndarray, length: int, features: Features | None = None) -> Member:
        """Writes a conversation's tokens into the cache. sequence: of `length` tokens, as the
        library has written it. features: that its passes collect, as long as it is a member.
        Raises SessionError, DeviceMemoryError."""
        with self._lock:
            self._clean()
            self._features.want([features])
            self._reserve(length)
            [number] = self._take_numbers(1)
            self._is_broken = True  # until all is noted
            try:
                if length:
                    self._write(self._context(), sequence, number)
            except BaseException:
                self._free_numbers.append(number)
                raise
            cells = list(range(self._tail, self._tail + length))
            member = Member(number, cells, (length, None), features)
            self._tail += length
            self._members.append(member)
            self._is_broken = False
            return member

    def score(self, parts: Sequence[JointRows], num_rows: int) -> list[Forward]:
        """One pass; the scores are copies, without hidden states where not all rows are scored.
        Features are those of all rows. num_rows: of the pass, if more than the parts have.

        Raises SessionError, DeviceMemoryError; no member has rows to commit then."""
        with self._lock:
            self._require_all([part.member for part in parts])
            collected = [part.member.features for part in parts]
            rows = max(num_rows, sum(len(part.tree) for part in parts))
            self._features.want(collected)
            self._reserve(rows)
            started_s = own_clock()
            self._is_broken = True  # until all is noted
            if any(part.member.needs_final_states for part in parts):
                parts = [part._replace(is_scored=True) for part in parts]
            is_whole = all(part.is_scored for part in parts)
            with nullcontext() if is_whole else self._without_hidden():
                at, scored = self._score(parts, rows)
            self._is_broken = False
            self._share_out(rows, own_clock() - started_s)
            outs = scores_of(self._weights, self._context(), scored, is_whole)
            return [
                replace(out, features=self._features.read(features, self._context(), rows, own))
                for out, features, own in zip(outs, collected, at, strict=True)
            ]

    def prefill(self, member: Member, tokens: Sequence[int]) -> None:
        """Adds tokens to a conversation without scoring them; its outcome tells how far that came.
        Only where rows are alike whoever is beside them. Raises SessionError, DeviceMemoryError."""
        with self._lock:
            self._require_all([member])
            self._features.want([member.features])
            self._reserve(len(tokens))
            with nullcontext() if member.needs_final_states else self._without_hidden():
                for start in range(0, len(tokens), MAX_ROWS):
                    self._append(member, tokens[start : start + MAX_ROWS])

    @contextmanager
    def _without_hidden(self) -> Iterator[None]:
        """Passes within need not score every token, as they do for the sake of hidden states."""
        self._library.want_hidden(self._context(), False)
        try:
            yield
        finally:
            self._library.want_hidden(self._context(), True)

    def read(self, member: Member) -> np.ndarray:
        """Returns the sequence of its tokens, [bytes] uint8. Raises SessionError."""
        with self._lock:
            self._require_all([member])
            return read_sequence(self._library, self._context(), member.number)

    def leave(self, member: Member) -> None:
        """Waits for no pass: where one runs, the next one gives the cells up."""
        member.has_left = True
        if self._lock.acquire(blocking=False):
            try:
                self._clean()
            finally:
                self._lock.release()

    def _context(self) -> int:
        if self._opened is None or not self._opened.free.alive:
            raise SessionError("the model is closed", remedy="Open another one.")
        return self._opened.handle

    def _clean(self, joining: Sequence[Member] = ()) -> None:
        """Drops what members have not kept. joining: those that have given up what they have not
        chosen."""
        if self._opened is None or not self._opened.free.alive:
            return
        memory = self._library.memory(self._opened.handle)
        decided = [each for each in self._members if each in joining or not each.is_undecided]
        lengths = [self._choose(memory, member) for member in decided]
        others = [each for each in self._members if each not in decided]
        kept = zip(decided, lengths, strict=True)
        ends = [member.cells[length - 1] + 1 for member, length in kept if length]
        self._tail = max([self._held_end, *ends, *(other.end for other in others)])
        for member, length in zip(decided, lengths, strict=True):
            self._cut(memory, member, length)
        for member in [each for each in decided if each.has_left]:
            self._members.remove(member)
            self._free_numbers.append(member.number)
        if not self._members:
            self._opened.free()
            self._opened, self._num_cells, self._tail, self._held_end = None, 0, 0, 0

    def _require_all(self, joining: Sequence[Member]) -> None:
        """Cleans the cache before a pass of these. Raises SessionError where one has left."""
        self._clean(joining)
        if any(member.has_left for member in joining):
            raise SessionError(
                f"{self._library.name} has lost tokens of a conversation that was interrupted",
                remedy="Begin a new one.",
            )

    def _choose(self, memory: int, member: Member) -> int:
        """Leaves in the member's sequence what was chosen of its last pass, and maybe more after
        it; `cells` are those of that sequence. Returns how many of its tokens it keeps."""
        length, chosen = member.outcome
        last, member.last = member.last, None
        if last is not None and last.branches is None:
            member.cells = member.cells + last.cells
        elif last is not None:
            rows = list(chosen or ())
            self._keep_branch(memory, member, last, rows)
            member.cells = member.cells + [last.cells[row] for row in rows]
        # An interrupt between two of these changes may have lost tokens of this conversation.
        member.has_left = member.has_left or length > len(member.cells)
        return 0 if member.has_left else length

    def _keep_branch(
        self, memory: int, member: Member, last: WrittenRows, rows: Sequence[int]
    ) -> None:
        library, start, own = self._library, len(member.cells), member.number
        end = start + len(rows)
        for number in (own, *last.numbers):
            library.sequence_copy(memory, number, HELD, start, -1)
        assert last.branches is not None
        kept = int(last.branches[rows[-1]]) if rows else own
        if kept == own:
            library.sequence_remove(memory, own, end, -1)
        else:
            library.sequence_remove(memory, own, start, -1)
            library.sequence_copy(memory, kept, own, start, end)
        for number in last.numbers:
            library.sequence_remove(memory, number, -1, -1)
        self._free_numbers += last.numbers
        self._held_end = max([self._held_end, *(cell + 1 for cell in last.cells)])

    def _cut(self, memory: int, member: Member, length: int) -> None:
        """Gives up the cells from `length` on: those before the tail are held."""
        cells = member.cells
        if len(cells) > length:
            held = bisect_left(cells, self._tail, lo=length)
            if held > length:
                self._library.sequence_copy(memory, member.number, HELD, length, held)
                self._held_end = max(self._held_end, cells[held - 1] + 1)
            self._library.sequence_remove(memory, member.number, length, -1)
            member.cells = cells[:length]

    def _reserve(self, num_cells: int) -> None:
        """Makes room, in another context where there is none in this one."""
        is_full = self._tail + num_cells > self._num_cells
        lacks_tap = self._choices.tap is not self._features.tap
        if self._opened is None or self._is_broken or is_full or lacks_tap:
            self._move_all(num_cells)

    def _move_all(self, num_cells: int) -> None:
        """The tokens of each member side by side. Where it fails all stays as it was."""
        used = [each.num_cells for each in self._members]
        if any(each.last and each.last.branches is not None for each in self._members):
            raise SessionError(
                "a conversation has not chosen a branch yet", remedy="Its next pass can be shared."
            )
        size = FIRST_CELLS
        while size < _ROOM * (sum(used) + num_cells):
            size *= 2
        tap, threads = self._features.tap, self._threads.threads
        choices = replace(self._choices, num_tokens=size, threads=threads, tap=tap)
        after = self._weights.open_context(self, choices)
        try:
            for member, count in zip(self._members, used, strict=True):
                if count:
                    sequence = read_sequence(self._library, self._context(), member.number)
                    self._write(after.handle, sequence, member.number)
        except BaseException:
            after.free()
            raise
        before, self._opened, self._num_cells = self._opened, after, size
        self._choices = replace(self._choices, tap=tap)
        self._is_broken, self._tail, self._held_end = False, 0, 0
        for member, count in zip(self._members, used, strict=True):
            cells = list(range(self._tail, self._tail + count))
            length = len(member.cells)
            member.cells = cells[:length]
            if member.last is not None:
                member.last.cells = cells[length:]
            self._tail += count
        switch = self._library.steady_rows(after.handle) if choices.steady_rows else None
        self._steady_rows, self._is_steady = switch, False
        self._library.want_hidden(after.handle, True)
        if before is not None:
            before.free()

    def _write(self, context: int, sequence: np.ndarray, number: int) -> None:
        try:
            write_sequence(self._library, context, sequence, number)
        except ValueError as error:
            raise SessionError(
                f"a conversation cannot join the others: {error}", remedy="It goes on alone."
            ) from error

    def _score(
        self, parts: Sequence[JointRows], num_rows: int
    ) -> tuple[list[list[int]], list[list[int]]]:
        """Returns where the rows of each part are, and where their scores. First rows stand before
        second ones: what is rejected then comes after what is kept."""
        laid = [self._lay_out(part.member, part.tree) for part in parts]
        order = sorted((row, part) for part, rows in enumerate(laid) for row in range(len(rows)))
        padding = [(0, at, (_PADDING,)) for at in range(num_rows - len(order))]
        found: list[list[int]] = [[] for _ in parts]
        for at, (_, part) in enumerate(order):
            found[part].append(at)
        for (member, _, _), at_rows in zip(parts, found, strict=True):
            assert member.last is not None
            member.last.cells = [self._tail + at for at in at_rows]
        if self._steady_rows is not None and self._is_steady != (num_rows == 1):
            self._is_steady = num_rows == 1
            self._steady_rows(self._is_steady)
        is_scored = [parts[part].is_scored for _, part in order] + [True] * len(padding)
        rows = [*(laid[part][row] for row, part in order), *padding]
        self._decode(self._batch.mixed(rows, is_scored))
        self._tail += len(order)
        if padding:
            memory = self._library.memory(self._context())
            self._library.sequence_remove(memory, _PADDING, -1, -1)
        output = np.cumsum(is_scored) - 1  # of each row that has one
        scored = [
            [int(output[at]) for at in at_rows] if each.is_scored else []
            for each, at_rows in zip(parts, found, strict=True)
        ]
        return found, scored

    def _append(self, member: Member, tokens: Sequence[int]) -> None:
        length = len(member.cells)
        self._is_broken = True  # until all is noted
        if member.needs_final_states:  # for which every token is scored
            rows = [(each, at, (member.number,)) for at, each in enumerate(tokens, start=length)]
            self._decode(self._batch.mixed(rows, [True] * len(rows)))
        else:
            self._decode(self._batch.prefill(tokens, length, member.number))
        member.cells = member.cells + list(range(self._tail, self._tail + len(tokens)))
        self._tail += len(tokens)
        member.outcome = (length + len(tokens), ())
        self._is_broken = False
        every, context = range(len(tokens)), self._context()
        found = self._features.read(member.features, context, len(tokens), every)
        if member.features is not None and found is not None:
            member.features.on_prefilled(length, found)

    def _lay_out(self, member: Member, tree: TokenTree) -> list[tuple[int, int, Sequence[int]]]:
        """Returns token, position and sequences of each row."""
        branches: list[int] = []
        if not tree.is_chain:
            branches = self._take_numbers(len(tree.leaves) - 1)
            memory = self._library.memory(self._context())
            for number in branches:
                self._library.sequence_copy(memory, member.number, number, -1, -1)
        return member.lay_out(tree, branches)

    def _decode(self, batch: object) -> None:
        library = self._library
        if self._choices.tap is not None:
            self._choices.tap.begin()
        known = library.log.num_errors
        status = library.decode(self._context(), batch)
        if status:
            raise SessionError(
                f"{library.name} failed to score rows of several conversations (status {status}): "
                f"{library.log.errors_after(known) or NO_REASON}",
                remedy="Each is scored alone.",
            )

    def _take_numbers(self, count: int) -> list[int]:
        if count > len(self._free_numbers):
            raise SessionError(
                f"{self._library.name} takes no more conversations and branches",
                remedy="They take turns.",
            )
        return [self._free_numbers.pop() for _ in range(count)]

    def _share_out(self, rows: int, seconds: float) -> None:
        """Tries other counts of threads, as the session of a single conversation does."""
        before = self._threads.threads
        threads = self._threads.observe(rows, seconds)
        if threads != before:
            self._library.set_threads(self._context(), threads, threads)
