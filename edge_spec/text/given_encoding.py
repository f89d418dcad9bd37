"""Encodes a text in which some added tokens are text like any other, by a tokenizer of the
`tokenizers` library.

The library reads an added token wherever a text spells it. So the text is cut within those that are
not to be read, and its pieces are encoded one by one.
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
_PRIVATE = range(0xE000, 0x110000)  # most of it means nothing in any text
_END = ""  # of a token, in a tree of their characters
_SIGN = "\u263a"


class Place(NamedTuple):
    """Where a text spells an added token."""

    start: int
    end: int
    token: int


def fresh_characters(*texts: str) -> Iterator[str]:
    """Yields those that none of these has: no text can forge what they stand for."""
    used = set().union(*texts)
    return (each for each in map(chr, _PRIVATE) if each not in used)


def touches(given: Sequence[int], start: int, end: int) -> bool:
    """Says whether one of these places, which are in order, is from `start` up to `end`."""
    at = bisect_left(given, start)
    return at < len(given) and given[at] < end


def pattern_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of these, the longest that begins at a place; nothing where there are none.

    Common beginnings are shared: a list of alternatives is tried one after the other, and some
    vocabularies have thousands of special tokens.
    """
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile(_written(tree) if tree else r"(?!)")


def occurrences(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, int]]:
    """Yields where each begins and ends, also those that overlap."""
    found = pattern.search(text)
    while found:
        yield found.span()
        found = pattern.search(text, found.start() + 1)


def _written(node: dict[str, Any]) -> str:
    """Returns the pattern of what may follow. A token is a hundred characters at most."""
    branches = [re.escape(each) + _written(after) for each, after in node.items() if each != _END]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and _END not in node else f"(?:{'|'.join(branches)})"
    return f"{joined}?" if _END in node else joined


def encode_given(
    tokenizer: tokenizers.Tokenizer, text: str, given: Sequence[int], control: Collection[int]
) -> list[int]:
    """As `TextCodec.encode_given`."""
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
    """Return the tokens of a text that is cut at these places, and where added tokens were read. A
    piece that goes on with another one is encoded after a sign, so that no space is put before it.
    """
    ids: list[int] = []
    places: list[Place] = []
    sign = _encoded(tokenizer, _SIGN).ids
    for start, end in pairwise([0, *cuts, len(text)]):
        piece, before = text[start:end], _SIGN if start and sign else ""
        encoded = _encoded(tokenizer, before + piece)
        own = len(sign) if before else 0
        if encoded.ids[:own] != sign[:own]:  # it is joined to what follows it
            own, before, encoded = 0, "", _encoded(tokenizer, piece)
        ids += encoded.ids[own:]
        move = start - len(before)
        read = _places(tokenizer, encoded, before + piece)
        places += [Place(each.start + move, each.end + move, each.token) for each in read]
    return ids, places


def changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    """Says whether a normalizer does anything: some files have an empty list of them."""
    return normalizer is not None and json.loads(normalizer.__getstate__()) != _NO_STEPS


def without_added_from(tokenizer: tokenizers.Tokenizer, first: int) -> tokenizers.Tokenizer:
    """Returns one that does not know added tokens from this one on, or the same where it has none
    of them, or where the others would have other numbers without them."""
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
    """Returns where added tokens were read, without the spaces that some take with them."""
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
            if spelled == content:  # or it stands for what the vocabulary does not know
                places.append(Place(start, end, token))
    return places
