"""Build Hugging Face tokenizers from a GGUF file's vocabulary.

IDs equal llama.cpp's (`llama_tokenize` with `add_special=False, parse_special=True`), except that
letters and digits new in Unicode 16 may be split differently, and that the first of overlapping
special tokens is taken, not the longest. Other vocabularies are refused.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.stored_tensor import damaged
from edge_spec.text.chat_format import END_NAMES

# Raise it when the same metadata gives another tokenizer, to rebuild cached ones.
TOKENIZER_VERSION = 2
_KEYS = "tokenizer.ggml."  # tokenizer_from_gguf reads only these keys and the model's name

_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_PARSED_IN_TEXT = frozenset((_UNKNOWN, _CONTROL, _USER_DEFINED))
# llama.cpp treats these as control tokens, whatever their type in the file: ends, except one that
# it does not know by name, and fill-in-the-middle markers.
_CONTROL_NAMES = END_NAMES - {"\u2581<EOT>"} | {
    form.format(part)
    for forms, parts in (
        (("<|fim_{}|>", "<fim-{}>", "<fim_{}>", "<|code_{}|>", "<|{}|>"), "prefix suffix middle"),
        (("<{}>", "\u2581<{}>"), "PRE SUF MID"),
        (("<\uff5cfim\u2581{}\uff5c>",), "begin hole end"),
    )
    for form in forms
    for part in parts.split()
}
_TAG = "</s>"  # text if the file says so, but still found before text is split
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"'[sStTmMdD]|'[rR][eE]|'[vV][eE]|'[lL][lL]|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_CASED = r"[^\r\n\p{L}\p{N}]?([\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+|[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*)"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# By llama.cpp's tokenizer.ggml.pre: the splits, and whether a word that is a token stays whole.
PRE_TOKENIZERS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    name: (splits, whole_words)
    for names, splits, whole_words in (
        ("default", (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"), False),
        ("gpt-2 phi-2 olmo mpt exaone4 trillion granite-docling", (_GPT2,), False),
        ("smollm starcoder refact command-r codeshell minerva-7b", (r"\p{N}", _GPT2), False),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 glm4 lfm2", (_LLAMA3,), True),
        ("dbrx smaug-bpe", (_LLAMA3,), False),
        ("qwen2 deepseek-r1-qwen stablelm2 megrez", (rf"{_WORD}|\p{{N}}|{_REST}",), False),
        ("tekken", (_TEKKEN,), True),
    )
    for name in names.split()
}


# The types that llama.cpp accepts; it refuses other files.
COLUMNS = {"token_type": ("int32",), "scores": ("float32", "int32")}


class Vocabulary:
    """The keys `tokenizer.ggml.*`. Raises ModelFileError for missing or repeated tokens."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.ids: dict[str, int] = {}  # in order; empty tokens get llama.cpp's names
        for at, token in enumerate(self.texts("tokens")):
            first = self.ids.setdefault(token or f"[EMPTY_{at}]", at)
            if first != at:
                text = reprlib.repr(token)
                raise self.damaged(
                    f"it has two with the same text {text}, the tokens {first} and {at}"
                )
        if not self.ids:
            raise self.damaged("it has no tokens")

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{_KEYS}{key}", default)

    def texts(self, key: str) -> list[str]:
        texts = self.get(key)
        if not isinstance(texts, list) or not {*map(type, texts)} <= {str}:
            raise self.damaged(f"it has no list of {key}")
        return texts

    def numbers(self, key: str, usual: float) -> list[float]:
        """Return a number per token, for a key in COLUMNS; `usual` without one. Extra numbers are
        ignored, as in llama.cpp."""
        values, count = self.get(key), len(self.ids)
        if values is None:
            return [usual] * count
        kind = str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
        of_each = f"{key} for each of its {count} tokens"
        if kind not in COLUMNS[key]:
            expected = " or ".join(COLUMNS[key])
            raise self.damaged(f"its {of_each} are {kind}, expected {expected}")
        if len(values) < count or not np.isfinite(values[:count]).all():
            raise self.damaged(f"it lacks {of_each}, and has {len(values)}")
        return list(values[:count].tolist())

    @cached_property
    def kinds(self) -> list[int]:
        """Return each token's type as llama.cpp sees it."""
        stated = self.numbers("token_type", _NORMAL)
        kinds = [
            _CONTROL if token in _CONTROL_NAMES else int(kind)
            for token, kind in zip(self.ids, stated, strict=True)
        ]
        tag = self.ids.get(_TAG)
        if tag is not None and self.get("token_type") is not None and stated[tag] != _CONTROL:
            kinds[tag] = _USER_DEFINED
        return kinds

    def damaged(self, what: str) -> ModelFileError:
        where = f"the vocabulary of {self.path} is damaged"
        return damaged(f"{where}: {what}")

    def unsupported(self, why: str) -> UnsupportedModelError:
        where = f"the tokenizer of {self.path} is not supported"
        remedy = "Give the model's Hugging Face directory, which has its tokenizer.json."
        return UnsupportedModelError(f"{where}: {why}", remedy=remedy)


def tokenizer_digest(file: GgufFile) -> str:
    """Return a SHA-256 of the tokenizer's metadata, TOKENIZER_VERSION and the library's version."""
    vocabulary = file.digest(key for key in file.metadata if key.startswith(_KEYS))
    made_by = f"{_is_phi3(file.metadata)} {TOKENIZER_VERSION} {tokenizers.__version__}"
    return hashlib.sha256(f"{vocabulary} {made_by}".encode()).hexdigest()


def _is_phi3(metadata: Mapping[str, Any]) -> bool:
    return "phi3" in str(metadata.get("general.name", "")).lower().replace("-", "")


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return a tokenizer that adds no BOS or EOS, whatever the file says.

    `decode(ids, skip_special_tokens=False)` is exact for byte-level vocabularies, apart from bytes
    without a token. SentencePiece may add a space after special tokens and reads U+2581 as a space.
    Raises UnsupportedModelError if llama.cpp's results cannot be reproduced, ModelFileError for a
    missing or inconsistent vocabulary.
    """
    vocabulary = Vocabulary(metadata, path)
    kind = str(vocabulary.get("model"))
    made = _BY_MODEL.get(kind)
    if made is None:
        raise vocabulary.unsupported(f"its model is {kind!r}; supported: {', '.join(_BY_MODEL)}")
    if _is_phi3(metadata):
        raise vocabulary.unsupported("llama.cpp strips spaces after the special tokens of Phi-3")
    tokenizer = made(vocabulary)
    added = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(vocabulary.ids, vocabulary.kinds, strict=True)
        if kind in _PARSED_IN_TEXT
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    name = str(vocabulary.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise vocabulary.unsupported(f"pre-tokenizer {name!r} is not one of {[*PRE_TOKENIZERS]}")
    splits, whole_words = PRE_TOKENIZERS[name]
    model = models.BPE(vocabulary.ids, _listed_merges(vocabulary), ignore_merges=whole_words)
    steps: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    if missing := sorted(alphabet - vocabulary.ids.keys()):
        # These bytes have no token, but their neighbours must not be merged across them.
        characters = "".join(rf"\x{{{ord(character):x}}}" for character in missing)
        steps.append(pre_tokenizers.Split(Regex(f"[{characters}]"), "removed"))
    for token, kind in zip(vocabulary.ids, vocabulary.kinds, strict=True):
        if kind in _PARSED_IN_TEXT and not token.isascii() and alphabet.issuperset(token):
            raise vocabulary.unsupported(f"special token {token!r} would be decoded as bytes")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _listed_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    ids = vocabulary.ids
    pairs: dict[tuple[str, str], None] = {}  # the first of equal merges counts
    for merge in vocabulary.texts("merges"):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.damaged(f"the merge {merge!r} is not of its tokens")
        pairs[left, right] = None
    return list(pairs)


def _require_bytes(vocabulary: Vocabulary) -> None:
    if any(f"<0x{byte:02X}>" not in vocabulary.ids for byte in range(256)):
        raise vocabulary.damaged("it lacks tokens for the bytes <0x00> to <0xFF>")


def _characters(vocabulary: Vocabulary) -> Tokenizer:
    """Merge characters by listed pairs within lines; spaces are characters (Gemma 4)."""
    _require_bytes(vocabulary)
    merges = _listed_merges(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    for token, token_id in vocabulary.ids.items():
        # llama.cpp never splits these, whatever pairs they consist of.
        if not token.strip("\n") and tokenizer.encode(token).ids != [token_id]:
            raise vocabulary.unsupported(f"no pairs join to its token {token!r}")
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    _require_bytes(vocabulary)
    merges = _scored_merges(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, merges, byte_fallback=True))
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    plain: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.get("add_space_prefix", True):
        normal.insert(0, normalizers.Prepend(_SPACE))
        plain.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(plain)
    return tokenizer


def _scored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return every pair that joins to a token; ranks choose as llama.cpp's scores do."""
    ids, scores = vocabulary.ids, vocabulary.numbers("scores", 0.0)
    scored: list[tuple[float, str]] = []
    for token, kind, score in zip(ids, vocabulary.kinds, scores, strict=True):
        # A special token's text never reaches the merges, unless its spaces are escaped.
        if kind in _PARSED_IN_TEXT and _SPACE not in token:
            continue
        if len(token) > 1 and kind != _BYTE and not ids.keys() >= set(token):
            raise vocabulary.unsupported(f"token {token!r} has a character that is no token")
        scored.append((-score, token))
    scored.sort(key=itemgetter(0))
    ranked: list[tuple[str, str]] = []
    for _, tied in groupby(scored, key=itemgetter(0)):
        ranked += _tied_merges([token for _, token in tied], vocabulary)
    return ranked


def _tied_merges(tokens: Sequence[str], vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return the pairs that join to these tokens of equal score.

    llama.cpp takes the leftmost pair, so a run of spaces grows from the left. Ranks do the same if
    pairs with longer left parts come first.
    """
    ids = vocabulary.ids
    pairs = []
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((left, right))
    if len(tokens) > 1:
        pairs.sort(key=lambda pair: -len(pair[0]))
        _refuse_ambiguous(pairs, vocabulary)
    return pairs


def _refuse_ambiguous(tied: Sequence[tuple[str, str]], vocabulary: Vocabulary) -> None:
    """Raise if a pair overlaps one of another token of equal score: no ranks are then leftmost."""
    joined: dict[str, set[str]] = {}
    for left, right in tied:
        joined.setdefault(left, set()).add(left + right)
    for left, right in tied:
        for token in joined.get(right, set()) - {left + right}:
            if len(set(left + token)) > 1:  # a run of one character keeps its order
                raise vocabulary.unsupported(f"{left + right!r} and {token!r} have equal scores")


_BY_MODEL: Mapping[str, Callable[[Vocabulary], Tokenizer]] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "gemma4": _characters,
}
