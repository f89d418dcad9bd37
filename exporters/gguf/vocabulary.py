"""Express a tokenizer in GGUF's terms: copied from a GGUF file or derived from a tokenizer.json.

GGUF names the pre-tokenizer (`tokenizer.ggml.pre`); a tokenizer.json spells it out, in many ways.
So the name is found by trial: the first that gives the tokenizer.json's IDs on texts that tell all
names apart. Without a match, the vocabulary is refused.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import tokenizers
from gguf.constants import TokenType

from edge_spec.errors import EdgeSpecError, UnsupportedModelError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf_model_info import STOP_TOKENS, TEMPLATE_TOKENS
from edge_spec.exporters.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf
from edge_spec.exporters.stored_tensor import damaged
from edge_spec.text.chat_format import END_NAMES
from edge_spec.text.given_encoding import without_added_from
from edge_spec.text.tokenizer import Tokenizer

# ruff: noqa: RUF001

# Metadata: text, lists of text, arrays, and scalars of Python or numpy.
Pairs = dict[str, Any]


# Pre-tokenizers differ in contractions, runs of digits, punctuation and spaces, line ends, capitals
# inside words, and scripts. All texts are NFC: llama.cpp does not normalize, and NFC tokenizers are
# recognized by the rest.
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


_NO_SCORE = -1e9  # for tokens that no merge makes
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_REMEDY = "Run the directory with --runtime ort, or use a GGUF file from the model's publisher."


def vocabulary_of(checkpoint: StoredCheckpoint) -> Pairs:
    """Return tokens, types, and merges or scores, without added tokens that the model does not
    score. Raises UnsupportedModelError for a tokenizer that llama.cpp does not have,
    ModelFileError for another model's."""
    source, vocab_size = checkpoint.tokenizer_json(), checkpoint.config.vocab_size
    Tokenizer(source)  # raises ModelFileError
    described = json.loads(source)
    model = described["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise UnsupportedModelError(
            f"the tokenizer of {checkpoint.path} is {model.get('type')}, only BPE is supported",
            remedy=_REMEDY,
        )
    added = [token for token in described.get("added_tokens") or () if token["id"] < vocab_size]
    common = _tokens(checkpoint, model, added)
    reference = without_added_from(tokenizers.Tokenizer.from_str(source), vocab_size)
    reference.no_truncation()  # tokenizer.json may ask for it
    reference.no_padding()
    special = {token["content"]: token["id"] for token in added}
    around = [f"{token}a {token} b {token}{token}\n{token}" for token in special]
    texts = [*TEXTS, *special, *around, _sample(reference)]

    def read_by(tokenizer: tokenizers.Tokenizer) -> list[object]:
        """Return the IDs of each text, and the text of each special token."""
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        stated = [tokenizer.decode([id], skip_special_tokens=False) for id in special.values()]
        return [*ids, *stated]

    expected = read_by(reference)
    for candidate in _candidates(common, model):
        with suppress(EdgeSpecError):
            if read_by(tokenizer_from_gguf(candidate, checkpoint.path)) == expected:
                return candidate
    raise UnsupportedModelError(
        f"llama.cpp has no tokenizer that gives the ids of {checkpoint.path}", remedy=_REMEDY
    )


def _sample(reference: tokenizers.Tokenizer) -> str:
    """Return a text of tokens from all over the vocabulary."""
    step = max(reference.get_vocab_size() // _NUM_SAMPLED, 1)
    text = reference.decode(list(range(0, reference.get_vocab_size(), step)))
    return unicodedata.normalize("NFC", text)


def _tokens(
    checkpoint: StoredCheckpoint, model: Mapping[str, Any], added: Sequence[Mapping[str, Any]]
) -> Pairs:
    vocab_size = checkpoint.config.vocab_size
    ids = model["vocab"] | {token["content"]: token["id"] for token in added}
    by_id = {token_id: token for token, token_id in ids.items()}
    if len(by_id) != len(ids) or max(by_id, default=0) >= vocab_size:
        raise damaged(
            f"the tokenizer of {checkpoint.path} has {len(ids)} tokens with ids up to "
            f"{max(by_id, default=0)}, the model scores {vocab_size}"
        )
    kinds = np.full(vocab_size, TokenType.UNUSED, np.int32)
    kinds[list(by_id)] = TokenType.NORMAL
    for token in added:
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    if model.get("byte_fallback"):
        kinds[[ids[token] for token in ids if _BYTE.fullmatch(token)]] = TokenType.BYTE
        if (unknown := model.get("unk_token")) in ids:
            kinds[ids[unknown]] = TokenType.UNKNOWN
    tokens = [by_id.get(token_id, f"[PAD{token_id}]") for token_id in range(vocab_size)]
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def _candidates(common: Pairs, model: Mapping[str, Any]) -> Iterator[Pairs]:
    """Yield every vocabulary that might give these tokens in llama.cpp."""
    tokens = common["tokenizer.ggml.tokens"]
    merges = [each.split(" ", 1) if isinstance(each, str) else each for each in model["merges"]]
    if model.get("byte_fallback"):
        ranks: dict[str, int] = {}
        for left, right in merges:
            ranks.setdefault(left + right, len(ranks))
        # llama.cpp first merges the token with the highest score.
        scores = [-float(ranks[token]) if token in ranks else _NO_SCORE for token in tokens]
        common = common | {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": np.array(scores, np.float32),
        }
        if (unknown := model.get("unk_token")) in tokens:
            common["tokenizer.ggml.unknown_token_id"] = tokens.index(unknown)
        for prefix in (True, False):
            yield common | {"tokenizer.ggml.add_space_prefix": prefix}
        return
    listed = [" ".join(merge) for merge in merges]
    common = common | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": listed}
    names: dict[object, str] = {}  # the first name of equal rules
    for name, rules in PRE_TOKENIZERS.items():
        names.setdefault(rules, name)
    # "default" comes last: it means no name, and rarely fits.
    for pre in sorted(names.values(), key=lambda name: name == "default"):
        yield common | {"tokenizer.ggml.pre": pre}


def tokenizer_metadata(checkpoint: StoredCheckpoint, stated: Pairs) -> Pairs:
    """Return the keys `tokenizer.*`; those of a GGUF source (`stated`) are copied.

    Raises UnsupportedModelError for a tokenizer.json whose IDs llama.cpp would not reproduce.
    """
    if stated:
        return {key: value for key, value in stated.items() if key.startswith("tokenizer.")}
    return vocabulary_of(checkpoint) | _special_tokens(checkpoint)


def _special_tokens(checkpoint: StoredCheckpoint) -> Pairs:
    """Return BOS, ends and templates. Raises UnsupportedModelError for more ends than GGUF has keys
    and llama.cpp knows by name."""
    tokenizer = tokenizers.Tokenizer.from_str(checkpoint.tokenizer_json())
    named = _named_tokens(checkpoint, tokenizer)
    main = named.get("eos")  # EOS to chat templates and other programs
    stops = sorted(checkpoint.eos_ids, key=lambda stop: (stop != main, stop))
    if len(stops) > len(STOP_TOKENS):
        stops = [
            stop for stop in stops if stop == main or tokenizer.id_to_token(stop) not in END_NAMES
        ]
    if len(stops) > len(STOP_TOKENS):
        raise UnsupportedModelError(
            f"{checkpoint.path} ends texts with any of {len(stops)} tokens, a GGUF file names at "
            f"most {len(STOP_TOKENS)}",
            remedy="Leave the important ones in generation_config.json.",
        )
    metadata: Pairs = {f"tokenizer.ggml.{name}_token_id": id for name, id in named.items()}
    metadata |= {
        f"tokenizer.ggml.{name}_token_id": stop
        for name, stop in zip(STOP_TOKENS, stops, strict=False)
    }
    if checkpoint.bos_id is not None:
        metadata["tokenizer.ggml.bos_token_id"] = checkpoint.bos_id
    # Written even if false: llama.cpp's default depends on the kind of vocabulary.
    metadata["tokenizer.ggml.add_bos_token"] = checkpoint.adds_bos and checkpoint.bos_id is not None
    if checkpoint.chat_template is not None:
        metadata["tokenizer.chat_template"] = checkpoint.chat_template
    for name, template in checkpoint.named_templates.items():
        metadata[f"tokenizer.chat_template.{name}"] = template
    if checkpoint.named_templates:
        metadata["tokenizer.chat_templates"] = list(checkpoint.named_templates)
    return metadata


def _named_tokens(checkpoint: StoredCheckpoint, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    texts = {key: checkpoint.special_tokens.get(name) for key, name in TEMPLATE_TOKENS.items()}
    ids = {key: tokenizer.token_to_id(text) for key, text in texts.items() if isinstance(text, str)}
    return {key: token for key, token in ids.items() if token is not None}
