"""What the tokens of a vocabulary are: those that two models share, so that one can draft for the
other, and those that a text is likely made of."""

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
_FIRST = 49152  # tokens; of answers of Qwen2.5-Coder 3.5 in 100 tokens are others
_OF_SCRIPT = 4096  # tokens of one writing, which may all come later
_SPACES = "Ġ▁ "  # the first as vocabularies have it that spell bytes, the second as others have it
_LATIN = "LATIN"
_AS_BYTES = {ord(spelled): byte for spelled, byte in BYTES.items()}
_LARGEST_SHARE = 0.75  # of a vocabulary; a part that is hardly smaller saves too little


@dataclass(frozen=True)
class Vocabulary:
    """Identifies what token ids mean: what is kept is used with the same tokenizer alone."""

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


def frequent_tokens(
    vocabulary: Mapping[str, int],
    vocab_size: int,
    first: int | None = None,
    of_script: int | None = None,
) -> np.ndarray | None:
    """[tokens] int64 in rising order, of the most frequent ones; None where these are nearly all.
    vocabulary: token -> id. first: so many of all; of_script: so many of each writing.

    Vocabularies are made by joining what is frequent, the most frequent first, so that ids are in
    about this order. The first ones alone would leave out whole writings, such as Chinese in most
    of them: of each writing the first ones are taken. So are those without letters, of which many
    control what is written.
    """
    first = _FIRST if first is None else first
    of_script = _OF_SCRIPT if of_script is None else of_script
    if vocab_size * _LARGEST_SHARE <= first:
        return None
    later = range(first, vocab_size)
    taken = [*range(first), *_of_scripts(vocabulary, later, of_script)]
    return np.array(taken, np.int64) if len(taken) <= _LARGEST_SHARE * vocab_size else None


def _of_scripts(vocabulary: Mapping[str, int], later: range, most: int) -> Iterator[int]:
    """Yields those of the later tokens that are among the first `most` of their writing."""
    is_bytes = _SPACES[0] in vocabulary and _SPACES[1] not in vocabulary
    counts: Counter[str] = Counter()
    for token, spelled in sorted((token, spelled) for spelled, token in vocabulary.items()):
        script = _script(spelled, is_bytes)
        counts[script] += 1
        if token in later and counts[script] <= most:
            yield token


def _script(spelled: str, is_bytes: bool) -> str:
    """Returns the name of the writing of its first letter; "" where it has none."""
    if (first := spelled.lstrip(_SPACES)[:1]).isascii() and first.isalpha():  # most of them
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
