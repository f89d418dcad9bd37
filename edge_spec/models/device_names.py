"""Says whether drafts may go on while the target verifies: `--draft-overlap`, and whether two names
of devices stand for one chip, which libraries call differently."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

from edge_spec.errors import UsageError

_NUMBERED = re.compile(r"(.*?):?(\d*)")
_PROVIDERS = ("openvino-", "coreml-")  # of onnxruntime, before the kind of their devices
_NPUS = ("npu", "qnn", "ane")  # of which no machine has two
_ALL_GPUS = "gpu"  # llama.cpp's name of all that are no processor, and the first one of others


class Chip(NamedTuple):
    """kind: "cpu", "npu", "gpu", or the interface that a GPU is reached by, such as "cuda"."""

    kind: str
    number: int = 0

    def may_be(self, other: Chip) -> bool:
        """Says whether the names may stand for one chip. A GPU has another number with each
        interface, so two interfaces count as two chips."""
        kinds = {self.kind, other.kind}
        if _ALL_GPUS in kinds:
            return not kinds & {"cpu", "npu"}
        return self == other


def share_chip(one: Iterable[str], other: Iterable[str]) -> bool:
    """Says whether models on these devices, by names of any runtime, take turns on a chip."""
    others = [_chip(name) for name in other]
    return any(_chip(name).may_be(each) for name in one for each in others)


def _chip(name: str) -> Chip:
    base = name.lower()
    for prefix in _PROVIDERS:
        base = base.removeprefix(prefix)
    found = _NUMBERED.fullmatch(base)
    kind, number = found.groups() if found else (base, "")
    return Chip("npu") if kind in _NPUS else Chip(kind, int(number or 0))


class DraftOverlap(StrEnum):
    """Says when drafting for the next round goes on while the target verifies."""

    AUTO = "auto"  # where the draft has a device of its own, as long as that is faster
    ON = "on"
    OFF = "off"

    @classmethod
    def parse(cls, text: str) -> DraftOverlap:
        """Raises UsageError."""
        try:
            return cls(text)
        except ValueError:
            raise UsageError(
                f"drafts cannot overlap {text!r}", remedy=f"Choose: {', '.join(cls)}."
            ) from None
