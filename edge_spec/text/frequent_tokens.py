"""Which tokens of a large vocabulary a text is likely made of, where nothing of it is known yet."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np

from edge_spec.text.token_pieces import BYTES

_FIRST = 49152  # tokens; of answers of Qwen2.5-Coder 3.5 in 100 tokens are others
_OF_SCRIPT = 4096  # tokens of one writing, which may all come later
_SPACES = "Ġ▁ "  # the first as vocabularies have it that spell bytes, the second as others have it
_LATIN = "LATIN"
_AS_BYTES = {ord(spelled): byte for spelled, byte in BYTES.items()}
_LARGEST_SHARE = 0.75  # of a vocabulary; a part that is hardly smaller saves too little


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
