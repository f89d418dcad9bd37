"""Encodes a text in which some added tokens are text like any other, by a tokenizer of the
`tokenizers` library.

The library reads an added token wherever a text spells it, or nowhere. So the tokens that are to be
read get other texts, which the rest cannot have, in a tokenizer that knows no others: it cuts the
text at the same places, and makes of what is between them what it always does.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

_NO_STEPS = {"type": "Sequence", "normalizers": []}
_PRIVATE = range(0xE000, 0x110000)  # most of it means nothing in any text
_END = ""  # of a token, in a tree of their characters


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
    tokenizer: tokenizers.Tokenizer,
    text: str,
    given: Sequence[int],
    control: Collection[int],
    renamed: Callable[[], tokenizers.Tokenizer],
) -> list[int]:
    """As `TextCodec.encode_given`. renamed: makes `without_names` of the tokenizer, which takes
    long for a large vocabulary."""
    encoded = _encoded(tokenizer, text)
    places = [each for each in _places(tokenizer, encoded, text) if each.token in control]
    read = [each for each in places if not touches(given, each.start, each.end)]
    if len(read) == len(places):
        ids: list[int] = encoded.ids
        return ids
    ids = _encoded_reading(tokenizer, tokenizer, text, read, control)
    if sum(token in control for token in ids) > len(read):
        # The vocabulary has them beside its other tokens, as that of a Unigram model has.
        ids = _encoded_reading(renamed(), tokenizer, text, read, control)
    return ids


def changes_text(normalizer: tokenizers.normalizers.Normalizer | None) -> bool:
    """Says whether a normalizer does anything: some files have an empty list of them."""
    return normalizer is not None and json.loads(normalizer.__getstate__()) != _NO_STEPS


def without_added_from(tokenizer: tokenizers.Tokenizer, first: int) -> tokenizers.Tokenizer:
    """Returns one that does not know added tokens from this one on, or the same where it has none
    of them, or where the others would have other numbers without them."""
    added = tokenizer.get_added_tokens_decoder()
    if all(token < first for token in added):
        return tokenizer
    made = _alike(tokenizer, tokenizer, "decoder")
    made.add_tokens([one for token, one in sorted(added.items()) if token < first])
    is_same = all(made.token_to_id(one.content) == id for id, one in added.items() if id < first)
    return made if is_same else tokenizer


def without_names(tokenizer: tokenizers.Tokenizer, tokens: Collection[int]) -> tokenizers.Tokenizer:
    """Returns the tokenizer without added tokens, and with these under names that no text has."""
    told = json.loads(tokenizer.to_str())
    told["added_tokens"], told["post_processor"] = [], None
    names = {
        added.content: f"{secrets.token_hex(16)}{token}"
        for token, added in tokenizer.get_added_tokens_decoder().items()
        if token in tokens
    }
    _rename(told["model"], names)
    return tokenizers.Tokenizer.from_str(json.dumps(told))


def json_of_text(tokenizer: tokenizers.Tokenizer) -> str:
    """Returns the tokenizer.json with special tokens under names that no text has. The library
    cannot open it where tokens are joined to special ones."""
    whole: str = tokenizer.to_str()
    names = {
        _quoted(added.content): _quoted(f"{secrets.token_hex(16)}{token}")
        for token, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    }
    return pattern_of(names).sub(lambda found: names[found.group()], whole)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): token for text, token in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if not names.keys() & {*pair, "".join(pair)}
        ]


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


def _encoded_reading(
    like: tokenizers.Tokenizer,
    tokenizer: tokenizers.Tokenizer,
    text: str,
    read: Sequence[Place],
    control: Collection[int],
) -> list[int]:
    """like: whose model is used, which knows no added tokens."""
    edge = next(fresh_characters(text))
    names = {token: f"{edge}{token}{edge}" for token in {each.token for each in read}}
    added = tokenizer.get_added_tokens_decoder()
    made = _knowing(like, tokenizer, names, control)
    ids = {made.token_to_id(one.content): id for id, one in added.items() if id not in control}
    ids |= {made.token_to_id(name): token for token, name in names.items()}
    parts, end = [], 0
    for each in read:
        parts += [text[end : each.start], names[each.token]]
        end = each.end
    found = _encoded(made, "".join([*parts, text[end:]])).ids
    return [ids.get(token, token) for token in found]


def _knowing(
    like: tokenizers.Tokenizer,
    tokenizer: tokenizers.Tokenizer,
    names: Mapping[int, str],
    control: Collection[int],
) -> tokenizers.Tokenizer:
    """Returns one that knows tokens of `control` by these names alone, with ids of its own."""
    added, num_unused = tokenizer.get_added_tokens_decoder(), 0
    while True:
        made = _alike(like, tokenizer)
        unused = [AddedToken(f"{secrets.token_hex(16)}{n}") for n in range(num_unused)]
        named = [_renamed(added[token], name, made) for token, name in names.items()]
        made.add_tokens([one for token, one in added.items() if token not in control])
        made.add_tokens([*unused, *named])
        # The library numbers them from the count of the vocabulary on, which may have gaps.
        if all(like.model.id_to_token(made.token_to_id(name)) is None for name in names.values()):
            return made
        num_unused = 2 * num_unused + 64


def _alike(
    like: tokenizers.Tokenizer, tokenizer: tokenizers.Tokenizer, *more: str
) -> tokenizers.Tokenizer:
    """Returns one with the model of `like`, and without added tokens."""
    made = tokenizers.Tokenizer(like.model)
    for part in ("normalizer", "pre_tokenizer", *more):
        if getattr(tokenizer, part) is not None:
            setattr(made, part, getattr(tokenizer, part))
    return made


def _renamed(one: AddedToken, name: str, made: tokenizers.Tokenizer) -> AddedToken:
    normalizer = made.normalizer
    is_kept = normalizer is None or name in normalizer.normalize_str(name)
    return AddedToken(
        name,
        single_word=one.single_word,
        lstrip=one.lstrip,
        rstrip=one.rstrip,
        normalized=one.normalized and is_kept,
        special=True,
    )
