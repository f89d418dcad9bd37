"""Says whether two models share a vocabulary, so that one can draft for the other."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from edge_spec.errors import UsageError

_PADDING = re.compile(r"\[PAD\d*\]|<unused_?\d+>|<\|?(reserved|dummy|extra)\w*\|?>|\[EMPTY_\d+\]")
_SHOWN = 5


@dataclass(frozen=True)
class Vocabulary:
    """Identifies what token ids mean, so that what is kept is used with the tokenizer it was made
    with."""

    sha256: str
    size: int  # ids are below it

    @classmethod
    def of(cls, tokens: Mapping[str, int]) -> Vocabulary:
        """tokens: token -> id, as a tokenizer's `vocabulary()` returns them."""
        listed = sorted((id, token) for token, id in tokens.items())
        digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
        return cls(digest, max(tokens.values(), default=-1) + 1)


def same_vocabulary(target: Mapping[str, int], draft: Mapping[str, int]) -> bool:
    """target, draft: token -> id. Ids that only one of them has, and padding, may differ."""
    return compare(target, draft).is_same


def require_same_vocabulary(
    target: Mapping[str, int], draft: Mapping[str, int], target_name: str, draft_name: str
) -> None:
    """Raises UsageError that lists the first differences, unless `same_vocabulary`."""
    num_shared, different = compared = compare(target, draft)
    if compared.is_same:
        return
    shown = "; ".join(
        f"{id} is {reprlib.repr(token)} and {reprlib.repr(other)}"
        for id, token, other in islice(different, _SHOWN)
    )
    raise UsageError(
        f"the draft {draft_name} has another vocabulary than {target_name}: {len(different)} of "
        f"{num_shared} tokens differ ({shown})",
        remedy="Choose a draft of the same family.",
    )


class Compared(NamedTuple):
    num_shared: int  # ids that both have
    different: list[tuple[int, str, str]]  # id, the target's token, the draft's

    @property
    def is_same(self) -> bool:
        return self.num_shared > 0 and not self.different


def compare(target: Mapping[str, int], draft: Mapping[str, int]) -> Compared:
    """target, draft: token -> id."""
    if target == draft:  # a tenth of the time
        return Compared(len(set(target.values())), [])
    of_target = {id: token for token, id in target.items()}
    of_draft = {id: token for token, id in draft.items()}
    different = [
        (id, token, of_draft[id])
        for id, token in sorted(of_target.items())
        if of_draft.get(id, token) != token
        and not (_PADDING.fullmatch(token) or _PADDING.fullmatch(of_draft[id]))
    ]
    return Compared(len(of_target.keys() & of_draft.keys()), different)
