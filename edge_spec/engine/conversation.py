"""The target's cache and the text that it holds, from one answer to the next; and the reading of
one prompt: what of it is kept already, and what of it will be."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from edge_spec.core.features import collects
from edge_spec.core.metrics import PlainRate
from edge_spec.core.model import Restorable, Session, keep_place, place_before
from edge_spec.core.session_errors import TranslatedErrors, roll_back, translate_errors
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import (
    LEAST_TOKENS,
    LONGEST_TAIL,
    KeptConversation,
    PromptCache,
    Reading,
    common,
    whole_passes,
)
from edge_spec.engine.snapshot_file import PREFILL_TOKENS, KeptPrompt, PromptFiles
from edge_spec.errors import EdgeSpecError
from edge_spec.scheduler.policy import Concurrency

_TAIL_TOKENS = 64  # at the end of a prompt, which another one with the same beginning may not share
_AGAIN = 1 / 16  # of what is to be read, that is read again for the sake of others


@contextmanager
def begin_reading(cache: PromptCache, prompt: Sequence[int]) -> Iterator[PromptReading]:
    """Yields the reading of a prompt, which is read within the block."""
    reading = PromptReading(cache, prompt)
    try:
        yield reading
    finally:
        cache.remove(reading)


class PromptReading(Reading):
    """Gives a target what is kept of its prompt, and keeps what others can use of it."""

    def __init__(self, cache: PromptCache, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self._cache = cache
        self._files = cache.files
        self._paths: dict[int, Path] = {} if self._files is None else self._files.paths(prompt)
        self._met = 0 if self._files is None else self._files.shared(self._paths)
        self._to_write: set[int] = set()
        self._taken: dict[Path, KeptPrompt] = {}

    def recall(
        self, target: Session, num_whole: int, cancelled: Callable[[], bool] = lambda: False
    ) -> int:
        """Gives the target the longest beginning that is kept, or that another conversation is
        reading, if that is longer than what it holds. num_whole: of what it holds, by whole passes;
        returns that of what it then holds. Raises SessionError."""
        if not isinstance(target, Restorable):
            return num_whole
        if self._cache.is_shared and not collects(target):
            num_whole = self._recall_shared(target, num_whole, cancelled)
        if self._files is not None:
            num_whole = self._recall_file(self._files, target, num_whole)
        return num_whole

    def take(self, target: Session, num_whole: int) -> None:
        """Keeps the target's state where it is wanted, between passes. num_whole: tokens at the
        beginning that whole passes have written."""
        length = target.length
        is_shared = self._cache.advance(self, length, num_whole)
        is_written = length == num_whole and length in self._to_write
        if not is_shared and not is_written:
            return
        assert isinstance(target, Restorable)  # else nothing is wanted of it
        self._to_write.discard(length)
        try:
            with translate_errors:
                state = target.state()
            kept = KeptPrompt(self.tokens[:length], state)
            if state and is_shared:
                self._cache.keep(kept)
            if state and is_written:
                self._taken[self._paths[length]] = kept
        finally:
            self._cache.reach(self, length)

    def finish(self) -> None:
        """Writes what was taken, after the answer."""
        if self._files is not None and self._taken:
            self._files.write(self._taken)
            self._taken = {}

    def _recall_shared(self, target: Session, num_whole: int, cancelled: Callable[[], bool]) -> int:
        self.length, self.num_whole = target.length, num_whole
        recalled = self._take_over(target)
        # A little that others cannot have is given up, so that they can have what is read now.
        little = num_whole + _AGAIN * (len(self.tokens) - target.length)
        given_up = num_whole < target.length <= little and num_whole < self._last
        if recalled is None and given_up and place_before(target, num_whole) == num_whole:
            recalled = self._cut(target, num_whole)
        self._cache.add(self)
        while not cancelled() and self._cache.wait(self, target.length, cancelled):
            found = self._take_over(target)
            recalled = recalled if found is None else found
        if self._last and not self._cache.has(self.tokens[: self._last]):
            self.wanted.add(self._last)
        return num_whole if recalled is None else recalled

    def _recall_file(self, files: PromptFiles, target: Session, num_whole: int) -> int:
        recalled = self._restore_file(files, target)
        wanted = {self._met, self._last} & self._paths.keys()
        self._to_write = {length for length in wanted if not self._paths[length].is_file()}
        met, held = self._met, target.length
        if recalled:
            num_whole = recalled
        elif (
            met in self._to_write
            and met <= num_whole
            and met < held < met + PREFILL_TOKENS
            and place_before(target, met) == met
            and files.may_read_again(self._paths, met)
        ):
            # What an earlier prompt began with, too, can be kept: less than a pass is read again.
            num_whole = self._cut(target, met)
        self.take(target, num_whole)
        return num_whole

    def _restore_file(self, files: PromptFiles, target: Session) -> int:
        """Returns the length of the longest kept beginning, which the target then holds; 0 where
        none is longer than what it holds."""
        for length, path in sorted(self._paths.items(), reverse=True):
            if length <= target.length:
                break
            kept = files.read(path, self.tokens[:length].tolist())
            if kept is None:
                continue
            assert isinstance(target, Restorable)
            try:
                with TranslatedErrors(ValueError):
                    target.restore(kept.cache, length)
            except ValueError as error:
                files.forget(path, error)
                continue
            return length
        return 0

    @property
    def _last(self) -> int:
        """The length after which it is kept for those that come later."""
        return whole_passes(len(self.tokens) - 1 - _TAIL_TOKENS)

    def _take_over(self, target: Session) -> int | None:
        found = self._cache.longest(self.tokens)
        if found is None or found[1] <= target.length:
            return None
        kept, length = found
        assert isinstance(target, Restorable)
        with suppress(ValueError):
            with TranslatedErrors(ValueError):
                target.restore(kept.state, len(kept.tokens))
            if self._cut(target, length) < length:
                self._cache.cut_in_vain()
            return target.length
        return None

    def _cut(self, target: Session, length: int) -> int:
        """Rolls back to `length` tokens, all by whole passes, or to none; returns how many are
        left."""
        self.length = self.num_whole = roll_back(target, length)
        return self.length


_USUAL_TAIL = 16  # that ask for the answer, until it is known how many do
_MOST_KEPT = 8  # times the tokens that are given up: a conversation that is larger costs too much
_REMEMBERED_TAILS = 4


class Conversation:
    """The target's KV cache and the tokens that it holds, so that prompts share a prefix.

    load: of the target, of which other conversations may have a part. noise: the margin of a choice
    below which the cache may make another one of it than if it had been written by plain decoding.
    num_whole: tokens at the beginning of the cache that passes of PREFILL_TOKENS have written.
    """

    def __init__(
        self,
        decoder: Decoder,
        plain_rate: PlainRate,
        load: Concurrency,
        prompts: PromptCache | None = None,
        keeps_places: bool = False,
    ) -> None:
        """prompts: of all conversations on the model. keeps_places: whether the session reads text
        again where it is rolled back, but to places that it was asked to keep."""
        self.load = load
        self.prompts = prompts or PromptCache()
        self.num_whole = 0
        self.decoder = decoder
        self.plain_rate = plain_rate
        self.noise = decoder.tie_margin
        self.tokens: list[int] = []  # those in the target's cache
        self.failed = False  # the target did: what its session holds is not known
        self._keeps_places = keeps_places
        # Lengths of the prompt at which one is to be kept, and after each pass until then: the next
        # prompt may part from this one where the last ones did, at its end or short of what asks
        # for the answer, or where this one has parted from the text before.
        self._places: list[int] = []
        self._num_prompted = 0  # tokens of the last prompt
        self._has_gone_on = False  # prompts have gone on from those before them
        # How many of a prompt's last tokens the next prompts did not have.
        self._tails = deque[int](maxlen=_REMEMBERED_TAILS)

    def reuse(self, prompt: Sequence[int]) -> int:
        """Rolls back to the longest common prefix, short of the pending token, or to the last place
        before; its length. What is noisier than the decoder promises is not kept."""
        if self.noise > self.decoder.tie_margin:
            self.tokens = []
        self.noise = self.decoder.tie_margin
        before_pending = np.array(prompt[:-1], np.int32)
        shared = common(np.array(self.tokens, np.int32), before_pending)
        if not self.tokens or len(self.tokens) - shared >= LEAST_TOKENS:
            shared = self._exchange(before_pending, shared)
        kept = self.cut(shared)
        self.tokens = list(prompt[:kept])
        tail = self._num_prompted - shared
        goes_on = bool(self._num_prompted) and tail <= LONGEST_TAIL
        if goes_on:
            self._tails.append(max(0, tail))
        self._has_gone_on = goes_on or (self._has_gone_on and shared >= LEAST_TOKENS)
        self._num_prompted = len(prompt)
        if self._keeps_places:
            tails = self._tails or (_USUAL_TAIL, 0)
            ends = {max(shared, len(prompt) - max(1, tail)) for tail in tails}
            self._places = sorted({shared, *ends})
        return kept

    def _exchange(self, prompt: np.ndarray, shared: int) -> int:
        """Keeps this conversation for later, unless the prompt goes on from nearly all of it, and
        takes up the one that it goes on from, if that is kept. Returns how many tokens of the
        prompt the cache then begins with. Raises SessionError."""
        target = self.decoder.target
        if collects(target) or not isinstance(target, Restorable):
            return shared
        try:
            if _MOST_KEPT * (len(self.tokens) - shared) > len(self.tokens):
                kept = self._taken(target)
                if kept is not None:
                    self.prompts.conversations.keep(kept)
            found = self.prompts.take(prompt, shared + LEAST_TOKENS)
            if found is None or found[0].noise > self.noise:
                return shared
            taken, length = found
            with suppress(ValueError), TranslatedErrors(ValueError):
                target.restore(taken.state, len(taken.tokens))
                self.tokens = taken.tokens.tolist()
                self.num_whole, self.noise = taken.num_whole, taken.noise
                self._num_prompted, self._has_gone_on = taken.num_prompted, taken.has_gone_on
                return length
        except BaseException:  # an interrupt, too: what the cache holds is not known
            self.failed = True
            raise
        return shared

    def put_away(self) -> None:
        """Writes it to disk, where conversations are kept there and it can tell its state."""
        target, files = self.decoder.target, self.prompts.conversation_files
        if files is None or self.failed or not isinstance(target, Restorable) or collects(target):
            return
        if self._has_gone_on:
            with suppress(EdgeSpecError):
                kept = self._taken(target)
                if kept is not None:
                    files.write(kept)

    def _taken(self, target: Restorable) -> KeptConversation | None:
        """Returns this conversation as it is, if it is worth keeping."""
        if len(self.tokens) < LEAST_TOKENS:
            return None
        with translate_errors:
            state = target.state()
        tokens = np.array(self.tokens, np.int32)
        prompted, is_long = self._num_prompted, self._has_gone_on
        found = KeptConversation(tokens, state, prompted, self.num_whole, self.noise, is_long)
        return found if state else None

    def next_end(self, prompt: Sequence[int]) -> int:
        """Returns where the next pass over the prompt ends."""
        start = self.decoder.target.length
        end = min(start + PREFILL_TOKENS, len(prompt) - 1)
        return min((place for place in self._places if start < place < end), default=end)

    def read(self, prompt: Sequence[int], end: int) -> None:
        """One pass over the prompt, up to `end`."""
        target = self.decoder.target
        start = target.length
        with translate_errors:
            self.decoder.passes.prefill(target, prompt[start:end])
        if start == self.num_whole and end - start == PREFILL_TOKENS:
            self.num_whole = end
        if self._keeps_places and end <= self._places[-1]:
            with translate_errors:
                keep_place(target)

    def recall(self, reading: PromptReading, cancelled: Callable[[], bool]) -> None:
        """Takes up what is kept of the prompt, or what other conversations read of it; may wait for
        one. Follows `reuse`."""
        try:
            self.num_whole = reading.recall(self.decoder.target, self.num_whole, cancelled)
        except BaseException:  # an interrupt, too: what the cache holds is not known
            self.failed = True
            raise

    def cut(self, length: int) -> int:
        """Rolls back to `length` tokens, or to none where a sliding window has forgotten what would
        then be needed; returns how many are left."""
        left = roll_back(self.decoder.target, length)
        self.num_whole = min(self.num_whole, left // PREFILL_TOKENS * PREFILL_TOKENS)
        return left
