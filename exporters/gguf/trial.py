"""Texts on which two tokenizers of one vocabulary give the same ids only if they split alike."""

# The texts have characters that look like others.
# ruff: noqa: RUF001

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Mapping, Sequence

import tokenizers

# What the ways to split differ in: contractions and their case, runs of digits, of punctuation and
# of spaces, line ends, capitals inside of words, and scripts. All in normal form C: llama.cpp
# normalizes nothing, and tokenizers that do so to C are to be taken for what they are otherwise.
TEXTS = (
    "It's what they'll say: we've won, I'm sure, and you'd know.",
    "IT'S THEY'LL WE'VE I'M YOU'D don'T 'tis o'clock",
    "0 12 345 6789 1234567890 3.14159 1,000,000 2024-02-29T23:59:59 x10y200 v1.2.3-rc4 50% $9.99",
    'Wait... what?! --- (((nested))) [a] {b} #tag @user a/b a_b <=> == != ~^|` *bold* "quoted"',
    "  two   three    spaces at the end   ",
    "\ttab\t\ttabs \t mixed\n",
    "one\ntwo\n\nfour\n\n\nseven \n \n  ten\r\n\r\nend.\n\nNext:\n- item\n  1. more\n",
    "camelCase PascalCase XMLHttpRequest iPhone15Pro SCREAMING_CASE snake_case kebab-case McDONALD",
    "def f(x, *args):\n    return {'a': [1, 2.5e-3], \"b\": x**2}  # why\n\n\tif (i<10) { k++; }\n",
    "https://example.org/a/b?c=d&e=%20f#g /usr/bin\n//\n/* x */\nC:\\dir\\file.txt ../..\n",
    "naïve café Ångström Straße ÉTÉ L'été Łódź İstanbul",
    "“It’s — well…” €5 ½ ² Ⅷ ① → ∑x·y ≤ z",
    "Привет, мир! Ελληνικά 123абв",
    "你好，世界！今天123天。日本語の文、カタカナ。한국어 문장",
    "مرحباً بك ١٢٣ שלום नमस्ते १२३ สวัสดี",
    "ok 😀🚀 👨\u200d👩\u200d👧 ❤\ufe0f👍🏽!",
    "no\u00a0break\u3000wide\u2003em \u200bzero",
)
_NUM_SAMPLED = 4096


class Trial:
    """A tokenizer and its ids for texts about itself and for TEXTS."""

    def __init__(self, reference: tokenizers.Tokenizer, special: Mapping[str, int]) -> None:
        """special: the tokens that are found in a text before it is split, and their ids."""
        reference.no_truncation()  # which a tokenizer.json may ask for
        reference.no_padding()
        self._reference = reference
        self._special = special
        around = [f"{token}a {token} b {token}{token}\n{token}" for token in special]
        self._texts = [*TEXTS, *special, *around, _sample(reference)]
        self._expected = [_ids(reference, text) for text in self._texts]

    def run(self, candidate: tokenizers.Tokenizer) -> tuple[int, str | None]:
        """Returns how many texts have equal ids, and the first difference."""
        found = [_ids(candidate, text) for text in self._texts]
        pairs = list(zip(self._expected, found, strict=True))
        num_equal = sum(expected == ids for expected, ids in pairs)
        for expected, ids in pairs:
            if expected != ids:
                return num_equal, self._describe(expected, ids)
        for token, token_id in self._special.items():
            decoded = candidate.decode([token_id], skip_special_tokens=False)
            if decoded != self._reference.decode([token_id], skip_special_tokens=False):
                return num_equal, f"decodes the token {token!r} as {decoded!r}"
        return num_equal, None

    def _describe(self, expected: Sequence[int], found: Sequence[int]) -> str:
        pairs = zip(expected, found, strict=False)
        shorter = min(len(expected), len(found))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
        near = expected[max(at - 2, 0) : at + 4]
        text = self._reference.decode(near, skip_special_tokens=False)
        return (
            f"makes {found[at : at + 4]} in {reprlib.repr(text)} of what should be "
            f"{list(expected[at : at + 4])}"
        )


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _sample(reference: tokenizers.Tokenizer) -> str:
    """A text of tokens from all over the vocabulary: words that these texts here do not have."""
    step = max(reference.get_vocab_size() // _NUM_SAMPLED, 1)
    text = reference.decode(list(range(0, reference.get_vocab_size(), step)))
    return unicodedata.normalize("NFC", text)
