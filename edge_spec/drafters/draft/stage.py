"""What drafts for a draft, so that it reads several tokens a pass: the next level of a cascade."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler
from edge_spec.core.tree import TokenTree, Verdict


class Stage(Protocol):
    """Follows the text, and after it what the draft has written so far."""

    def use_sampler(self, sampler: Sampler) -> None: ...

    def prepare(self, prompt: Sequence[int]) -> None:
        """Reads a prompt before `begin`."""

    def begin(self, prompt: Sequence[int]) -> None: ...

    def propose(self, last: int, num_draft_tokens: int) -> TokenTree:
        """A chain below `last`, the last token of the text and the draft tokens."""

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        """What the draft has written in place of the tree that was proposed last.

        logits: [rows, vocab] of the draft, valid during this call."""

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """The draft has taken over what another model has written."""

    def rollback_draft(self, keep: int) -> None:
        """The draft forgets all of its draft tokens but the first `keep`."""

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        """A round of the target has ended; nothing that was drafted is left."""

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies what belongs to a snapshot of the conversation."""

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises KeyError or ValueError for what is no state of such a stage."""


class NoStage:
    """The draft writes every token in a pass of its own."""

    def use_sampler(self, sampler: Sampler) -> None: ...

    def prepare(self, prompt: Sequence[int]) -> None: ...

    def begin(self, prompt: Sequence[int]) -> None: ...

    def propose(self, last: int, num_draft_tokens: int) -> TokenTree:
        return TokenTree.chain(last)

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None: ...

    def extend_draft(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None: ...

    def rollback_draft(self, keep: int) -> None: ...

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None: ...

    def state_dict(self) -> dict[str, np.ndarray]:
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None: ...
