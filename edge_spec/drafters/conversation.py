"""Says which prompts belong together: what is learnt from one text stays out of others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def continues(earlier: Sequence[int], prompt: Sequence[int]) -> bool:
    """Says whether a prompt goes on where an earlier one stood: the next turn of the same chat, or
    the same question again. A system message that two chats share does not make them one."""
    return 0 < len(earlier) <= len(prompt) and tuple(prompt[: len(earlier)]) == tuple(earlier)


def restored_prompt(tokens: np.ndarray) -> tuple[int, ...]:
    """The prompt that a snapshot holds. Raises ValueError for an array that is none."""
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise ValueError(f"a prompt of shape {tokens.shape} and type {tokens.dtype}")
    return tuple(tokens.tolist())
