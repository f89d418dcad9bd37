"""Encode a text in which some added tokens are plain text.

The `tokenizers` library recognizes added tokens wherever a text spells them. So the text is cut
inside those that must stay text, and its pieces are encoded separately.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import tokenizers

_NO_STEPS = {"type": "Sequence", "normalizers": []}
_PRIVATE = range(0xE000, 0x110000)  # mostly unassigned code points
_END = ""  # marks the end of a token in a trie
_SIGN = "\u263a"


class Place(NamedTuple):
    """Where a text spells an added token."""

    start: int
    end: int
    token: int


def fresh_characters(*texts: str) -> Iterator[str]:
    """Yield private-use characters that no text contains."""
    used = set().union(*texts)
    return (each for each in map(chr, _PRIVATE) if each not in used)


def touches(given: Sequence[int], start: int, end: int) -> bool:
    """Return True if any of the sorted places is in range(start, end)."""
    at = bisect_left(given, start)
    return at < len(given) and given[at] < end


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match the longest of these texts; nothing if there are none. Built as a trie, since a regex
    tries alternatives in turn, and some vocabularies have thousands of special tokens."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_written(tree) if tree else r"(?!)")


def occurrences(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Yield the span of each match, overlapping ones included."""
    found = pattern.search(text)
    while found:
        yield found.span()
        found = pattern.search(text, found.start() + 1)


def _written(node: dict[str, Any]) -> str:
    """Recursion is as deep as a token is long, about 100 characters."""
    branches = [re.escape(each) + _written(after) for each, after in node.items() if each != _END]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and _END not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if _END in node else joined


def encode_given(
    tokenizer: tokenizers.Tokenizer, text: str, given: Sequence[int], control: Collection[int]
) -> list[int]:
    """Implements `TextCodec.encode_given`."""
    cuts: set[int] = set()
    while True:
        ids, places = _encode_pieces(tokenizer, text, sorted(cuts))
        forged = {
            (each.start + each.end) // 2
            for each in places
            if each.token in control and touches(given, each.start, each.end)
        }
        if forged <= cuts:
            return ids
        cuts |= forged


def _encode_pieces(
    tokenizer: tokenizers.Tokenizer, text: str, cuts: Sequence[int]
) -> tuple[list[int], list[Place]]:
    """Encode a text cut at these places; also return where added tokens were read. A piece after a
    cut is encoded after a sign, so that it gets no leading space."""
    ids: list[int] = []
    places: list[Place] = []
    sign = _encoded(tokenizer, _SIGN).ids
    for start, end in pairwise([0, *cuts, len(text)]):
        piece, before = text[start:end], _SIGN if start and sign else ""
        encoded = _encoded(tokenizer, before + piece)
        own = len(sign) if before else 0
        if encoded.ids[:own] != sign[:own]:  # the sign was merged with the text
            own, before, encoded = 0, "", _encoded(tokenizer, piece)
        ids += encoded.ids[own:]
        move = start - len(before)
        read = _places(tokenizer, encoded, before + piece)
        places += [Place(each.start + move, each.end + move, each.token) for each in read]
    return ids, places


def changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    """Return False also for an empty list of normalizers, as in some files."""
    return normalizer is not None and json.loads(normalizer.__getstate__()) != _NO_STEPS


def without_added_from(tokenizer: tokenizers.Tokenizer, first: int) -> tokenizers.Tokenizer:
    """Return a tokenizer without added tokens from id `first` on; the same one if there are none,
    or if other ids would change."""
    added = tokenizer.get_added_tokens_decoder()
    if all(token < first for token in added):
        return tokenizer
    made = tokenizers.Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if getattr(tokenizer, part) is not None:
            setattr(made, part, getattr(tokenizer, part))
    made.add_tokens([one for token, one in sorted(added.items()) if token < first])
    is_same = all(made.token_to_id(one.content) == id for id, one in added.items() if id < first)
    return made if is_same else tokenizer


def _encoded(tokenizer: tokenizers.Tokenizer, text: str) -> tokenizers.Encoding:
    # A batch lets other threads run meanwhile.
    (encoded,) = tokenizer.encode_batch([text], add_special_tokens=False)
    return encoded


def _places(
    tokenizer: tokenizers.Tokenizer, encoded: tokenizers.Encoding, text: str
) -> list[Place]:
    """Return where added tokens were read, without spaces that some include."""
    added, normalizer = tokenizer.get_added_tokens_decoder(), tokenizer.normalizer
    places = []
    for token, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        one = added.get(token)
        if one is None:
            continue
        at = text.find(one.content, start, end)
        if at >= 0:
            places.append(Place(at, at + len(one.content), token))
        elif one.normalized and normalizer is not None:
            spelled, content = (
                normalizer.normalize_str(each).strip(" \u2581")
                for each in (text[start:end], one.content)
            )
            if spelled == content:  # else it is the unknown token
                places.append(Place(start, end, token))
    return places
