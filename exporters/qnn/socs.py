"""The processors that a binary can be compiled for, by the names that QNN gives them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from edge_spec.errors import UsageError


class Soc(NamedTuple):
    """model: QNN's number; htp_arch: the version of its NPU."""

    model: int
    htp_arch: int


# Those with an NPU of version 73 or later: functions of older ones cannot share weights. QNN takes
# any name and any version without a word, and compiles for another one.
SOCS: Mapping[str, Soc] = MappingProxyType(
    {
        "SM8550": Soc(43, 73),  # Snapdragon 8 Gen 2
        "SM8650": Soc(57, 75),  # 8 Gen 3
        "SM8750": Soc(69, 79),  # 8 Elite
        "SM8850": Soc(87, 81),  # 8 Elite Gen 5
        "SC8380XP": Soc(60, 73),  # Snapdragon X
        "SC8480XP": Soc(88, 81),  # X2
    }
)


def chosen_soc(asked: str | None) -> str:
    """Raises UsageError for none, and for one that is not known."""
    known = ", ".join(SOCS)
    if asked is None:
        raise UsageError(
            "a binary for an NPU is for one processor, and none is named",
            remedy=f"Add --soc with one of {known}.",
        )
    name = asked.upper()
    if name not in SOCS:
        raise UsageError(f"unknown processor {asked!r}", remedy=f"Choose one of {known}.")
    return name
