"""The target's KV cache and the text in it, across answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from edge_spec.core.features import collects
from edge_spec.core.metrics import PlainRate
from edge_spec.core.model import Restorable, keep_place, place_before
from edge_spec.core.session_errors import TranslatedErrors, roll_back, translate_errors
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import (
    LEAST_TOKENS,
    LONGEST_TAIL,
    PREFILL_TOKENS,
    KeptState,
    PromptCache,
    Reading,
    common,
    whole_passes,
)
from edge_spec.errors import EdgeSpecError

_USUAL_TAIL = 16  # tokens that ask for the answer, until known
_MOST_KEPT = 8  # times the tokens given up; larger conversations cost too much to keep
_REMEMBERED_TAILS = 4
_AGAIN = 1 / 16  # of the unread tokens; so many are read again for the sake of others


class Conversation:
    """The target's KV cache and its tokens, so that prompts share a prefix.

    noise: margin below which the cache may choose differently than one of plain decoding.
    num_whole: leading tokens written by passes of PREFILL_TOKENS.
    """

    def __init__(
        self,
        decoder: Decoder,
        plain_rate: PlainRate,
        prompts: PromptCache | None = None,
        keeps_places: bool = False,
    ) -> None:
        """prompts: of all conversations on the model. keeps_places: rolling the session back makes
        it read text again, except at kept places."""
        self.prompts = prompts or PromptCache()
        self.num_whole = 0
        self.decoder = decoder
        self.plain_rate = plain_rate
        self.noise = decoder.tie_margin
        self.tokens: list[int] = []  # in the target's cache
        self.failed = False  # the target failed; its session's state is unknown
        self._keeps_places = keeps_places
        # Prompt lengths to keep a place at, besides one after each pass before the last of them.
        # The next prompt may diverge where the last ones did: at the end, before what asks for the
        # answer, or where this one diverged.
        self._places: list[int] = []
        self._num_prompted = 0  # length of the last prompt
        self._has_gone_on = False  # prompts have continued earlier ones
        # Tokens at the end of prompts that the next prompts lacked.
        self._tails = deque[int](maxlen=_REMEMBERED_TAILS)
        self._reading = Reading(np.empty(0, np.int32))
        self._taken: list[KeptState] = []  # prefixes of this prompt, for the disk

    def reuse(self, prompt: Sequence[int]) -> int:
        """Roll back to the longest common prefix, or the last place before; return its length.
        Excludes the pending token, and drops a cache noisier than the decoder promises."""
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

    @contextmanager
    def reading(self, prompt: Sequence[int]) -> Iterator[None]:
        """Reuse what is kept of the prompt and keep what others can use, within the block."""
        self._reading = Reading(np.array(prompt, np.int32))
        try:
            yield
        finally:
            self.prompts.remove(self._reading)

    def recall(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Reuse the longest prefix that is kept or being read, if longer than the cache's. May wait
        for another conversation. Call after `reuse`. Raises SessionError."""
        target, prompts, reading = self.decoder.target, self.prompts, self._reading
        is_shared = prompts.is_shared and not collects(target)
        if not isinstance(target, Restorable) or not (is_shared or prompts.files):
            return
        with self._failing():
            if not self._begin_with_kept(is_shared):
                self._give_up_a_little()
            prompts.reach(reading, target.length, self.num_whole)
            if is_shared:
                prompts.add(reading)
                while not cancelled() and prompts.wait(reading, target.length, cancelled):
                    self._begin_with_kept(is_shared)
            prompts.want(reading)
            self._keep_beginning()

    def next_end(self, prompt: Sequence[int]) -> int:
        start = self.decoder.target.length
        end = min(start + PREFILL_TOKENS, len(prompt) - 1)
        return min((place for place in self._places if start < place < end), default=end)

    def read(self, prompt: Sequence[int], end: int) -> None:
        """Read the prompt up to `end` in one pass."""
        target = self.decoder.target
        start = target.length
        with translate_errors:
            self.decoder.batch.prefill(target, prompt[start:end])
        if start == self.num_whole and end - start == PREFILL_TOKENS:
            self.num_whole = end
        if self._keeps_places and end <= self._places[-1]:
            with translate_errors:
                keep_place(target)
        self._keep_beginning()

    def cut(self, length: int) -> int:
        """Roll back to `length` tokens, or to none if a sliding window lost them; return the new
        length."""
        left = roll_back(self.decoder.target, length)
        self.num_whole = min(self.num_whole, whole_passes(left))
        return left

    def end_answer(self) -> None:
        """Write this prompt's prefixes to the disk."""
        if self.prompts.files is not None:
            self.prompts.files.write(self._taken)
        self._taken = []

    def put_away(self) -> None:
        """Keep the conversation for the disk, if that is possible."""
        target = self.decoder.target
        if self.prompts.files is None or self.failed or collects(target):
            return
        if self._has_gone_on and isinstance(target, Restorable):
            with suppress(EdgeSpecError):
                self._keep(target)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Mark the conversation as failed on any error or interrupt: its cache is in an unknown
        state."""
        try:
            yield
        except BaseException:
            self.failed = True
            raise

    def _exchange(self, prompt: np.ndarray, shared: int) -> int:
        """Keep this conversation, unless nearly all of it is continued, and take up the prompt's
        own. Returns the prefix that the cache then shares with the prompt. Raises SessionError."""
        target = self.decoder.target
        if collects(target) or not isinstance(target, Restorable):
            return shared
        with self._failing():
            if _MOST_KEPT * (len(self.tokens) - shared) > len(self.tokens):
                self._keep(target)
            found = self.prompts.conversation(prompt, shared + LEAST_TOKENS)
            if found is None or found[0].noise > self.noise or not self._take_up(found[0]):
                return shared
            taken, length = found
            self._num_prompted = taken.num_prompted or 0
            self._has_gone_on = taken.has_gone_on
            return length

    def restore(self, kept: KeptState) -> None:
        """Load a kept state into the target. Raises ValueError, changing nothing, if the target
        rejects it."""
        target = self.decoder.target
        assert isinstance(target, Restorable) and kept.state is not None
        held, self.tokens = self.tokens, []  # an interrupt may come in between
        try:
            with TranslatedErrors(ValueError):
                target.restore(kept.state, len(kept.tokens))
        except ValueError:
            self.tokens = held
            raise
        self.tokens, self.num_whole = kept.tokens.tolist(), kept.num_whole

    def _take_up(self, kept: KeptState) -> bool:
        """Load a kept state; if the target rejects it, forget it and return False."""
        try:
            self.restore(kept)
        except ValueError as error:
            self.prompts.refuse(kept, error)
            return False
        return True

    def _begin_with_kept(self, in_memory: bool) -> bool:
        """Load the longest kept prefix of the prompt; return False if there is none."""
        length = self.decoder.target.length
        found = self.prompts.beginning(self._reading.prompt[:-1], length, in_memory)
        if found is None or not self._take_up(found[0]):
            return False
        if self.cut(found[1]) < found[1]:
            # A sliding window lost what continuing within a prefix needs.
            self.prompts.can_cut = False
        self.prompts.reach(self._reading, self.decoder.target.length, self.num_whole)
        return True

    def _give_up_a_little(self) -> None:
        """Drop a few tokens beyond whole passes, so that others can reuse what is read next."""
        target, num_tokens = self.decoder.target, len(self._reading.prompt)
        little = self.num_whole + _AGAIN * (num_tokens - target.length)
        given_up = self.num_whole < min(target.length, num_tokens - LONGEST_TAIL)
        may_cut = target.length <= little and place_before(target, self.num_whole) == self.num_whole
        if given_up and may_cut:
            self.cut(self.num_whole)

    def _keep(self, target: Restorable) -> None:
        if len(self.tokens) < LEAST_TOKENS:
            return
        with translate_errors:
            state = target.state()
        if state:
            tokens, prompted = np.array(self.tokens, np.int32), self._num_prompted
            self.prompts.keep(
                KeptState(tokens, state, prompted, self.num_whole, self.noise, self._has_gone_on)
            )

    def _keep_beginning(self) -> None:
        """Keep the target's state if wanted at this length, between passes."""
        target, reading = self.decoder.target, self._reading
        length = target.length
        with self.prompts.changed:
            if length != self.num_whole or length not in reading.wanted:
                # Under the lock: others may want it right after.
                self.prompts.reach(reading, length, self.num_whole)
                return
        assert isinstance(target, Restorable)  # else nothing is wanted
        try:
            with translate_errors:
                state = target.state()
            kept = KeptState(reading.prompt[:length], state, num_whole=length)
            if state and self.prompts.is_shared:
                self.prompts.keep(kept)
            if state and self.prompts.files is not None:
                self._taken.append(kept)
        finally:
            self.prompts.reach(reading, length, self.num_whole)
