"""Plain decoding as the library's own programs do it: one token a call, nothing else asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge_spec.errors import SessionError
from edge_spec.runtimes.llamacpp.batch import Batch, view
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS, ContextChoices
from edge_spec.runtimes.llamacpp.weights import GgufWeights

_ROOM = 256  # tokens, after the first ones


class LlamaCppLoop:
    """A context with the library's own choices, over weights that others may use, too."""

    def __init__(
        self, weights: GgufWeights, choices: ContextChoices, tokens: Sequence[int]
    ) -> None:
        """choices: its fastest ones. Raises SessionError, DeviceMemoryError."""
        self._library = weights.library
        self._batch = Batch(self._library.batch_type, PREFILL_TOKENS, 1)
        wanted = replace(choices, num_tokens=len(tokens) + _ROOM)
        self._opened = weights.open_context(self, wanted)
        self._vocab_size = weights.vocab_size
        self._length = 0
        for start in range(0, len(tokens), PREFILL_TOKENS):
            part = tokens[start : start + PREFILL_TOKENS]
            self._decode(self._batch.chain(part, self._length, is_scored=False), len(part))
        self._library.synchronize(self._opened.handle)  # or the first step would pay for it

    def step(self, token: int) -> None:
        self._decode(self._batch.chain([token], self._length), 1)
        self._library.logits(self._opened.handle)  # waits for them

    def logits(self) -> np.ndarray:
        """[vocab] float32, of the last step, in the library's own buffer."""
        address = self._library.logits(self._opened.handle)
        logits: np.ndarray = view(self._library, address, 1, self._vocab_size)[0]
        return logits

    def close(self) -> None:
        self._opened.free()

    def _decode(self, batch: object, count: int) -> None:
        status = self._library.decode(self._opened.handle, batch)
        if status:
            raise SessionError(
                f"{self._library.name} failed to score {count} tokens (status {status})",
                remedy="Give a shorter --context.",
            )
        self._length += count
