"""Options whose value is one of a few words, and the most draft tokens that a policy takes."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from edge_spec.errors import UsageError

DEFAULT_DRAFT_TOKENS = 15  # a round, at most

_Mode = TypeVar("_Mode", bound=StrEnum)


class LosslessMode(StrEnum):
    """What a user wants kept: `--lossless`."""

    AUTO = "auto"  # bit-identical wherever that is cheap
    ALWAYS = "always"  # at any price
    TIES = "ties"  # near ties may differ


class DraftOverlap(StrEnum):
    """Whether the draft goes on drafting while the target verifies: `--draft-overlap`."""

    AUTO = "auto"  # where the draft has a device of its own, as long as that is faster
    ON = "on"
    OFF = "off"


class JacobiInit(StrEnum):
    """How Jacobi's first draft tokens are made: `--jacobi`."""

    RANDOM = "random"  # any token of the text, as Fu et al. 2024 do
    REPEAT_LAST = "repeat-last"
    NGRAM = "ngram"  # what followed the last two tokens, or the last one, when they came before


def parse_mode(kind: type[_Mode], text: str, flag: str) -> _Mode:
    """Return the mode of this name. Raises UsageError that names the flag."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{flag} is {text!r}", remedy=f"Choose: {', '.join(kind)}.") from None
