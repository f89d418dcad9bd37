"""Options with few values, and the default bound on draft tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from edge_spec.errors import UsageError

DEFAULT_DRAFT_TOKENS = 15  # in a round, at most

_Mode = TypeVar("_Mode", bound=StrEnum)


class LosslessMode(StrEnum):
    """`--lossless`: what must stay identical to plain decoding."""

    AUTO = "auto"  # bit-identical wherever that is cheap
    ALWAYS = "always"  # bit-identical at any cost
    TIES = "ties"  # near ties may differ


class DraftOverlap(StrEnum):
    """`--draft-overlap`: whether drafting continues while the target verifies."""

    AUTO = "auto"  # if the draft has a device of its own, while that is faster
    ON = "on"
    OFF = "off"


class JacobiInit(StrEnum):
    """`--jacobi`: how Jacobi decoding guesses its first draft tokens."""

    RANDOM = "random"  # any token of the text, as in Fu et al. 2024
    REPEAT_LAST = "repeat-last"
    NGRAM = "ngram"  # what followed the last two tokens, or the last one, before


def parse_mode(kind: type[_Mode], text: str, flag: str) -> _Mode:
    """Return the mode of this name. Raises a UsageError that names the flag."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{flag} is {text!r}", remedy=f"Choose: {', '.join(kind)}.") from None
