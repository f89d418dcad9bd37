"""Compare two models' vocabularies, and select frequent tokens."""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from edge_spec.errors import UsageError
from edge_spec.text.token_pieces import BYTES

_PADDING = re.compile(r"\[PAD\d*\]|<unused_?\d+>|<\|?(reserved|dummy|extra)\w*\|?>|\[EMPTY_\d+\]")
_SHOWN = 5
_FIRST = 49152  # tokens; 3.5% of the tokens in Qwen2.5-Coder's answers lie beyond
_OF_SCRIPT = 4096  # tokens of each writing system, whose tokens may all have higher ids
_SPACES = "Ġ▁ "  # as spelled by byte-level and by other vocabularies
_LATIN = "LATIN"
_AS_BYTES = {ord(spelled): byte for spelled, byte in BYTES.items()}
_LARGEST_SHARE = 0.75  # of a vocabulary; a larger part saves too little


@dataclass(frozen=True)
class Vocabulary:
    """Identifies a tokenizer, since stored token ids only fit the same one."""

    sha256: str
    size: int  # exceeds every id

    @classmethod
    def of(cls, tokens: Mapping[str, int]) -> Vocabulary:
        """tokens: id by token, as from a tokenizer's `vocabulary()`."""
        listed = sorted((id, token) for token, id in tokens.items())
        digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
        return cls(digest, max(tokens.values(), default=-1) + 1)


def same_vocabulary(target: Mapping[str, int], draft: Mapping[str, int]) -> bool:
    """Return True if both map ids to the same tokens, except for padding and ids of one side.
    target, draft: ids by token."""
    return compare(target, draft).is_same


def require_same_vocabulary(
    target: Mapping[str, int], draft: Mapping[str, int], target_name: str, draft_name: str
) -> None:
    """Raises UsageError with the first differences."""
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
    num_shared: int  # in both
    different: list[tuple[int, str, str]]  # id, the target's token, the draft's

    @property
    def is_same(self) -> bool:
        return self.num_shared > 0 and not self.different


def compare(target: Mapping[str, int], draft: Mapping[str, int]) -> Compared:
    """target, draft: ids by token."""
    if target == draft:  # ten times as fast
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


def frequent_tokens(
    vocabulary: Mapping[str, int],
    vocab_size: int,
    first: int | None = None,
    of_script: int | None = None,
) -> np.ndarray | None:
    """Return the most frequent tokens, [tokens] int64 ascending; None if nearly all are.

    Vocabularies are built by merging the most frequent pieces first, so ids are roughly in this
    order. The first ids alone would drop whole writing systems, such as Chinese, so the first ids
    of each are added; tokens without letters, among them many control tokens, count as one.

    vocabulary: ids by token. first: number overall; of_script: per writing system.
    """
    first = _FIRST if first is None else first
    of_script = _OF_SCRIPT if of_script is None else of_script
    if vocab_size * _LARGEST_SHARE <= first:
        return None
    later = range(first, vocab_size)
    taken = [*range(first), *_of_scripts(vocabulary, later, of_script)]
    return np.array(taken, np.int64) if len(taken) <= _LARGEST_SHARE * vocab_size else None


def _of_scripts(vocabulary: Mapping[str, int], later: range, most: int) -> Iterator[int]:
    is_bytes = _SPACES[0] in vocabulary and _SPACES[1] not in vocabulary
    counts: Counter[str] = Counter()
    for token, spelled in sorted((token, spelled) for spelled, token in vocabulary.items()):
        script = _script(spelled, is_bytes)
        counts[script] += 1
        if token in later and counts[script] <= most:
            yield token


def _script(spelled: str, is_bytes: bool) -> str:
    """Return the writing system of the first letter; "" without letters."""
    if (first := spelled.lstrip(_SPACES)[:1]).isascii() and first.isalpha():  # fast path
        return _LATIN
    if is_bytes:
        raw = spelled.translate(_AS_BYTES).encode("latin-1", errors="ignore")
        spelled = raw.decode(errors="ignore") or spelled
    for letter in spelled:
        if letter.isalpha():
            return _script_of(letter)
    return ""


@cache
def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]
