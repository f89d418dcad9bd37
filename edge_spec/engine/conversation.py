"""The target's cache and the text that it holds, from one answer to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edge_spec.control.concurrency import Concurrency
from edge_spec.core.metrics import PlainRate
from edge_spec.core.session_errors import roll_back, translate_errors
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.prompt_cache import PromptCache
from edge_spec.engine.prompt_files import PREFILL_TOKENS
from edge_spec.engine.prompt_reading import PromptReading


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
    ) -> None:
        """prompts: of all conversations on the model."""
        self.load = load
        self.prompts = prompts or PromptCache()
        self.num_whole = 0
        self.decoder = decoder
        self.plain_rate = plain_rate
        self.noise = decoder.tie_margin
        self.tokens: list[int] = []  # those in the target's cache
        self.failed = False  # the target did: what its session holds is not known

    def reuse(self, prompt: Sequence[int]) -> int:
        """Rolls back to the longest common prefix, short of the pending token; its length. What is
        noisier than the decoder promises is not kept."""
        if self.noise > self.decoder.tie_margin:
            self.tokens = []
        self.noise = self.decoder.tie_margin
        shared = 0
        for cached, token in zip(self.tokens, prompt[:-1], strict=False):
            if cached != token:
                break
            shared += 1
        kept = self.cut(shared)
        self.tokens = list(prompt[:kept])
        return kept

    def read(self, prompt: Sequence[int], end: int) -> None:
        """One pass over the prompt, up to `end`."""
        target = self.decoder.target
        start = target.length
        with translate_errors:
            self.decoder.passes.prefill(target, prompt[start:end])
        if start == self.num_whole and end - start == PREFILL_TOKENS:
            self.num_whole = end

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
