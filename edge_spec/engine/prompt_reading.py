"""The reading of one prompt: what of it is kept already, and what of it will be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from edge_spec.core.features import collects
from edge_spec.core.model import Restorable, Session, place_before
from edge_spec.core.session_errors import TranslatedErrors, roll_back, translate_errors
from edge_spec.engine.prompt_cache import PromptCache, Reading, whole_passes
from edge_spec.engine.prompt_files import PREFILL_TOKENS, KeptPrompt, PromptFiles

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
