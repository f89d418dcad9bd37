"""The target's cache and the text that it holds, from one answer to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from edge_spec.core.features import collects
from edge_spec.core.metrics import PlainRate
from edge_spec.core.model import Restorable, keep_place
from edge_spec.core.session_errors import TranslatedErrors, roll_back, translate_errors
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import (
    LEAST_TOKENS,
    LONGEST_TAIL,
    PREFILL_TOKENS,
    KeptState,
    PromptCache,
    PromptReading,
    common,
    whole_passes,
)
from edge_spec.errors import EdgeSpecError

_USUAL_TAIL = 16  # that ask for the answer, until it is known how many do
_MOST_KEPT = 8  # times the tokens that are given up: a conversation that is larger costs too much
_REMEMBERED_TAILS = 4


class Conversation:
    """The target's KV cache and the tokens that it holds, so that prompts share a prefix.

    noise: the margin of a choice below which the cache may make another one of it than if it had
    been written by plain decoding. num_whole: tokens at the beginning of the cache that passes of
    PREFILL_TOKENS have written.
    """

    def __init__(
        self,
        decoder: Decoder,
        plain_rate: PlainRate,
        prompts: PromptCache | None = None,
        keeps_places: bool = False,
    ) -> None:
        """prompts: of all conversations on the model. keeps_places: whether the session reads text
        again where it is rolled back, but to places that it was asked to keep."""
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
                self._keep(target)
            found = self.prompts.conversation(prompt, shared + LEAST_TOKENS)
            if found is None or found[0].noise > self.noise:
                return shared
            taken, length = found
            with suppress(ValueError), TranslatedErrors(ValueError):
                target.restore(taken.state or {}, len(taken.tokens))
                self.tokens = taken.tokens.tolist()
                self.num_whole, self.noise = taken.num_whole, taken.noise
                self._num_prompted = taken.num_prompted or 0
                self._has_gone_on = taken.has_gone_on
                return length
        except BaseException:  # an interrupt, too: what the cache holds is not known
            self.failed = True
            raise
        return shared

    def put_away(self) -> None:
        """Keeps it for the disk, where conversations are kept there and it can tell its state."""
        target = self.decoder.target
        if self.prompts.files is None or self.failed or collects(target):
            return
        if self._has_gone_on and isinstance(target, Restorable):
            with suppress(EdgeSpecError):
                self._keep(target)

    def _keep(self, target: Restorable) -> None:
        """Keeps this conversation as it is, if it is worth that."""
        if len(self.tokens) < LEAST_TOKENS:
            return
        with translate_errors:
            state = target.state()
        if state:
            tokens, prompted = np.array(self.tokens, np.int32), self._num_prompted
            self.prompts.keep(
                KeptState(tokens, state, prompted, self.num_whole, self.noise, self._has_gone_on)
            )

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
            self.decoder.batch.prefill(target, prompt[start:end])
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
        self.num_whole = min(self.num_whole, whole_passes(left))
        return left
