"""Sessions of models whose layers are attention and recurrence in turns, such as Qwen 3.5.

A recurrent layer has one state for all of the text. The library keeps those after each of the
last rows of a pass, so that rejected draft tokens of a chain can be dropped before the next one.
Whatever was committed is read again where it is rolled back: with drafts and without, the states
then come from the same passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge_spec.core.model import Forward, require_rollback
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnsupportedModelError
from edge_spec.runtimes.llamacpp.library import PREFILL_TOKENS, ContextChoices
from edge_spec.runtimes.llamacpp.session import LlamaCppSession
from edge_spec.runtimes.llamacpp.transfer import write_sequence
from edge_spec.runtimes.llamacpp.weights import GgufWeights

KEPT_STATES = 7  # of each layer beside the last one: as many rows of a pass can be dropped
NO_BRANCHES = "its recurrent layers have one state for the text, which branches would share"
# Whose states llama.cpp keeps as it says: tried in random orders of passes, commits and rollbacks.
# It keeps those of Nemotron-H, too, which was not tried.
REWINDABLE = frozenset({"qwen35", "lfm2", "lfm2moe"})
_TRIED_TOKENS = 256  # of the context that is asked whether it keeps states


class HybridSession(LlamaCppSession):
    """The text that was committed is kept, to be read again."""

    def __init__(self, weights: GgufWeights, choices: ContextChoices, context_length: int) -> None:
        super().__init__(weights, choices, context_length)
        self._most_rows = choices.kept_states + 1
        self._text: list[int] = []  # that the cache may hold, uncommitted tokens included
        self._has_kept = True  # some of the last pass's rows
        self._saved: np.ndarray | None = None  # the sequence of the committed tokens

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))  # which may read again what is before them
        self._text[self.length :] = tokens
        super().prefill(tokens)
        self._saved, self._has_kept = None, True

    def forward(self, tree: TokenTree) -> Forward:
        if len(tree) > self._most_rows or not tree.is_chain:
            raise ValueError(
                f"a pass of this model takes a chain of up to {self._most_rows} rows: {NO_BRANCHES}"
            )
        tokens = tree.tokens.tolist()
        self._reserve(len(tokens))
        self._text[self.length :] = tokens
        self._has_kept = False
        return super().forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        super().commit(rows)
        self._saved, self._has_kept = None, True

    def rollback(self, length: int) -> None:
        """Reads the text up to `length` again, where it is not the one that is committed."""
        require_rollback(self.length, length)
        if length < self.length:
            self._context()
            self._read_again(length)

    def state(self) -> dict[str, np.ndarray]:
        """Is not known in this form."""
        return {}

    def _drop_uncommitted(self, memory: int) -> None:
        """Drops a pass. Where nothing of it was kept the library has no state before it, and does
        not say so: the text is read again, and saved for the next time."""
        if self._has_kept and self._library.sequence_remove(memory, 0, self.length, -1):
            return
        length, saved = self.length, self._saved
        if saved is None:
            self._read_again(length)
            self._saved = self._read_sequence()
        else:
            self._library.sequence_remove(memory, 0, -1, -1)
            write_sequence(self._library, self._context(), saved, 0)
        self._has_kept = True

    def _read_again(self, length: int) -> None:
        """Raises SessionError; what was read until then is what the session has."""
        text = self._text[:length]
        self._library.sequence_remove(self._library.memory(self._context()), 0, -1, -1)
        self.length = self._cached = 0
        for start in range(0, length, PREFILL_TOKENS):
            self.prefill(text[start : start + PREFILL_TOKENS])


def require_known_hybrid(architecture: str, path: object) -> None:
    """Raises UnsupportedModelError where the library is known to keep no states."""
    if architecture not in REWINDABLE:
        raise _no_states(path)


def rewindable(weights: GgufWeights, choices: ContextChoices, path: object) -> ContextChoices:
    """Returns the choices of contexts of one sequence that keep as many states as the library
    agrees to, KEPT_STATES at most. Opens a small one to see.

    Raises UnsupportedModelError where the library keeps none.
    """
    chosen = replace(choices, num_sequences=1, kept_states=KEPT_STATES)
    owner = _Owner()
    opened = weights.open_context(owner, replace(chosen, num_tokens=_TRIED_TOKENS))
    kept = weights.library.kept_states(opened.handle)
    opened.free()
    if kept < 1:
        raise _no_states(path)
    return replace(chosen, kept_states=min(kept, KEPT_STATES))


class _Owner:
    """Owns a context, which is freed at the latest when this is collected."""


def _no_states(path: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path} has layers with a recurrent state, which llama.cpp does not take back reliably "
        "in this architecture: speculation and chat need that",
        remedy=f"Use a model of attention alone, or of {', '.join(sorted(REWINDABLE))}.",
    )
