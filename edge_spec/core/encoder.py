"""Describes what an encoder-decoder has beside its decoder, as part of a model's description."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Encoder:
    """Says what an encoder-decoder has beside its decoder: layers that read the source, which every
    layer of the decoder attends to. Heads, MLPs and embeddings are of the decoder's sizes."""

    num_layers: int
    start_id: int  # the token that every answer begins with: the source ends before the first one
    ends_source: bool = False  # it also ends the source: the answer begins with the second one
    forced_id: int | None = None  # the answer's second token, whatever the scores are

    def answer_start(self, tokens: Sequence[int]) -> int | None:
        """Returns where the answer begins, None where the source has not ended."""
        found = None
        for _ in range(2 if self.ends_source else 1):
            try:
                found = tokens.index(self.start_id, 0 if found is None else found + 1)
            except ValueError:
                return None
        return found

    @property
    def beginning(self) -> tuple[int, ...]:
        """Returns the tokens of every answer that are not chosen."""
        return (self.start_id,) if self.forced_id is None else (self.start_id, self.forced_id)
