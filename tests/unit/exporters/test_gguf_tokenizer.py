"""Tokenizers from GGUF metadata: equal to llama.cpp, and refused where they would not be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_spec.errors import ModelFileError, UnsupportedModelError
from edge_spec.exporters.gguf_reader import GgufFile
from edge_spec.exporters.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf

FIXTURE = Path(__file__).parents[2] / "fixtures" / "tokenizer_smollm2.json"
PATH = Path("some.gguf")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

# GPT-2's stand-ins for bytes: printable Latin-1 for itself, the others from U+0100 on.
PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
SYMBOLS = [chr(byte if byte in PRINTABLE else 256 + OTHERS.index(byte)) for byte in range(256)]


def metadata(model: str, tokens: dict[str, int], **more: Any) -> dict[str, Any]:
    """The metadata of a vocabulary of these tokens and their types."""
    keys = {
        "model": model,
        "tokens": list(tokens),
        "token_type": np.array(list(tokens.values()), np.int32),
    } | more
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def byte_level(merges: str = "", special: dict[str, int] | None = None, **more: Any) -> Any:
    """All bytes, `merges` such as "a+b ab+c" with the tokens they make, and `special`."""
    pairs = [pair.split("+") for pair in merges.split()]
    tokens = dict.fromkeys([*SYMBOLS, *("".join(pair) for pair in pairs)], NORMAL)
    listed = [" ".join(pair) for pair in pairs]
    more = {"pre": "gpt-2", "merges": listed} | more
    return metadata("gpt2", tokens | (special or {}), **more)


def sentencepiece(scores: dict[str, float], special: dict[str, int] | None = None) -> Any:
    """Bytes, the characters of `scores` and its tokens."""
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL} | (special or {})
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    pieces = dict.fromkeys([SPACE, *"".join(scores), *scores], NORMAL)
    values = [scores.get(token, 0.0) for token in tokens | pieces]
    return metadata("llama", tokens | pieces, scores=np.array(values, np.float32))


def build(of: dict[str, Any]) -> Tokenizer:
    """The tokenizer as it is after it was saved and loaded."""
    return Tokenizer.from_str(tokenizer_from_gguf(of, PATH).to_str())


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


@pytest.mark.model
def test_the_demo_model_is_tokenized_as_by_llama_cpp(demo_gguf: Path) -> None:
    tokenizer = build(GgufFile(demo_gguf).metadata)
    vocabulary = tokenizer.get_vocab()
    texts = json.loads(FIXTURE.read_text())["texts"]
    assert len(texts) > 250
    num_exact = 0
    for entry in texts:
        text = entry["text"]
        ids = tokenizer.encode(text).ids
        assert ids == entry["ids"], text
        # The vocabulary has no token for some bytes of control and private characters.
        kept = bytes(byte for byte in text.encode() if SYMBOLS[byte] in vocabulary)
        decoded = tokenizer.decode(ids, skip_special_tokens=False)
        assert decoded == kept.decode("utf-8", "replace"), text
        num_exact += decoded == text
    assert num_exact >= len(texts) - 10


WORD = {"abc": NORMAL}  # no merge leads to it
MERGED: list[tuple[dict[str, Any], str, list[str]]] = [
    # By rank, then from the left; the first of equal merges counts.
    (byte_level("b+c a+b a+a ab+c"), "abc", ["a", "bc"]),
    (byte_level("b+c a+b a+a ab+c"), "abab", ["ab", "ab"]),
    (byte_level("b+c a+b a+a ab+c"), "aaa", ["aa", "a"]),
    (byte_level("a+b b+c a+b"), "abc", ["ab", "c"]),
    # Whole words stay unmerged only where llama.cpp does so.
    *(
        (byte_level("a+b", WORD, pre=pre), "abc", ["abc"])
        for pre in ("llama-bpe", "lfm2", "tekken")
    ),
    *((byte_level("a+b", WORD, pre=pre), "abc", ["ab", "c"]) for pre in ("smaug-bpe", "qwen2")),
    # SentencePiece merges by score, and prefixes a space.
    (sentencepiece({f"{SPACE}a": -2.0, "ab": -1.0}), "ab", [SPACE, "ab"]),
    (sentencepiece({f"{SPACE}a": -1.0, "ab": -2.0}), "ab", [f"{SPACE}a", "b"]),
    (sentencepiece({f"{SPACE}a": -1.0, "ab": -2.0}), "a a", [f"{SPACE}a", f"{SPACE}a"]),
    (sentencepiece({f"{SPACE}a": -1.0, "ab": -2.0}), "", []),
    # As in Llama 2, where all runs of spaces have one score: pairs first would give 2 and 2.
    (sentencepiece({SPACE * 2: -1e9, SPACE * 3: -1e9}), "   ", [SPACE * 3, SPACE]),
]


@pytest.mark.parametrize(("of", "text", "expected"), MERGED)
def test_pairs_are_merged_as_by_llama_cpp(
    of: dict[str, Any], text: str, expected: list[str]
) -> None:
    assert pieces(build(of), text) == expected


@pytest.mark.parametrize("text", ["", "é 🙂\x00\r\n\t ", "<|x|>  <|x|>a", "a  b ", "\ufffd中"])
def test_byte_level_decodes_to_the_exact_text(text: str) -> None:
    tokenizer = build(byte_level("a+b", {"<|x|>": CONTROL, "  ": USER_DEFINED}))
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_a_byte_without_a_token_is_dropped_and_keeps_its_neighbours_apart() -> None:
    of = byte_level("a+b")
    for byte in "é".encode():
        of["tokenizer.ggml.tokens"][byte] = f"no {byte}"
    tokenizer = build(of)
    assert pieces(tokenizer, "abaéb") == ["ab", "a", "b"]
    assert tokenizer.decode(tokenizer.encode("abaéb").ids) == "abab"


def test_nothing_is_added_to_the_text() -> None:
    tokenizer = build(byte_level(add_bos_token=True, add_eos_token=True, bos_token_id=np.int32(5)))
    assert pieces(tokenizer, "a") == ["a"]
    assert tokenizer.encode("").ids == []


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_special_tokens_are_found_in_the_text(model: str) -> None:
    special = {"<c>": CONTROL, "<c><c>d": CONTROL, "<u>": USER_DEFINED, "<?>": UNKNOWN}
    special |= {"<n>": NORMAL, "<o>": UNUSED, "<|im_end|>": NORMAL, "<fim_prefix>": NORMAL}
    of = byte_level("", special) if model == "gpt2" else sentencepiece({"<>nod": 0.0}, special)
    tokenizer = build(of)

    def found(text: str) -> list[str]:
        return [token for token in pieces(tokenizer, text) if token in special]

    assert found("<c><c> <u>\n<?><u>") == ["<c>", "<c>", "<u>", "<?>", "<u>"]
    assert found("<c><c><c>d") == ["<c>", "<c><c>d"]
    assert found("<n><o>< c>") == []
    # llama.cpp knows these by name, although the file says that they are normal.
    assert found("a<|im_end|>b<fim_prefix>") == ["<|im_end|>", "<fim_prefix>"]


def test_control_tokens_can_be_skipped_in_decoding_and_user_defined_ones_not() -> None:
    tokenizer = build(byte_level("", {"<c>": CONTROL, "<u>": USER_DEFINED}))
    assert tokenizer.decode(tokenizer.encode("a<c>b<u>").ids, skip_special_tokens=True) == "ab<u>"


SPLIT_TEXT = "It'S we'll 1234 x²\n\n  <=Éa!\r\n/naïveABC  \t b"
GPT2 = "It|'|S| we|'ll| 1234| x|²|\n\n | <=|Éa|!|\r|\n|/|naïveABC|  \t| b"
SMOLLM = GPT2.replace(" 1234", " |1|2|3|4")  # digits alone, before the rest
# Contractions in capitals too; digits by three without a space; a newline ends a run of spaces
# and belongs to punctuation before it; one character of punctuation belongs to a word after it.
LLAMA3 = "It|'S| we|'ll| |123|4| x|²|\n\n| | <=|Éa|!\r\n|/naïveABC|  \t| b"
QWEN2 = LLAMA3.replace("123|4", "1|2|3|4")  # one digit at a time
# As Qwen 2, but a slash ends punctuation, and a capital after a small letter begins a word.
TEKKEN = QWEN2.replace("!\r\n|/naïveABC", "!\r\n/|naïve|ABC")
# Punctuation alone, then GPT-2, then digits by three.
DEFAULT = "It|'|S| we|'|ll| |123|4| x|²|\n\n  |<=|Éa|!|\r\n|/|naïveABC|  \t| b"
SPLITS = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion", "granite-docling"), GPT2
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"), SMOLLM
    ),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "glm4"), LLAMA3),
    **dict.fromkeys(("falcon-h1", "lfm2", "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), QWEN2),
    "tekken": TEKKEN,
    "default": DEFAULT,
}


@pytest.mark.parametrize("pre", sorted({*SPLITS, *PRE_TOKENIZERS}))
def test_text_is_split_as_the_named_pre_tokenizer_does(pre: str) -> None:
    splitter: Any = build(byte_level(pre=pre)).pre_tokenizer
    spans = [span for _, span in splitter.pre_tokenize_str(SPLIT_TEXT)]
    assert "|".join(SPLIT_TEXT[start:end] for start, end in spans) == SPLITS[pre]


def test_sentencepiece_prefixes_a_space_after_special_tokens_or_never() -> None:
    of = sentencepiece({"ab": -1.0})
    assert pieces(build(of), "<s>ab</s>ab") == ["<s>", SPACE, "ab", "</s>", SPACE, "ab"]
    of["tokenizer.ggml.add_space_prefix"] = False
    tokenizer = build(of)
    assert pieces(tokenizer, "<s>ab b") == ["<s>", "ab", SPACE, "b"]
    assert tokenizer.decode(tokenizer.encode(" ab").ids) == " ab"


def test_sentencepiece_merges_to_a_special_token_whose_spaces_are_escaped() -> None:
    of = sentencepiece({f"{SPACE}a": -1.0})
    at = of["tokenizer.ggml.tokens"].index(f"{SPACE}a")
    of["tokenizer.ggml.token_type"][at] = USER_DEFINED
    assert pieces(build(of), "aa") == [f"{SPACE}a", "a"]


def test_sentencepiece_spells_unknown_characters_in_bytes() -> None:
    tokenizer = build(sentencepiece({"ab": -1.0}))
    encoded = tokenizer.encode("abé\n🙂ab")
    assert encoded.tokens[1:5] == ["ab", "<0xC3>", "<0xA9>", "<0x0A>"]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "abé\n🙂ab"


@pytest.mark.parametrize(
    ("of", "reason"),
    [
        (byte_level(pre="gpt-9"), "'gpt-9' is not one of .*'smollm'"),
        (metadata("bert", {"a": NORMAL}), "'bert'; supported: gpt2, llama, gemma4"),
        (byte_level() | {"general.name": "Phi-3 mini"}, "Phi-3"),
        (byte_level("a+b", {"\u0120ö": USER_DEFINED}), "decoded as bytes"),
        (sentencepiece({"ab": -1.0, "bc": -1.0}), "'ab' and 'bc' have equal scores"),
    ],
)
def test_what_would_differ_is_refused_with_a_remedy(of: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        tokenizer_from_gguf(of, PATH)
    assert str(PATH) in str(caught.value)
    assert "tokenizer.json" in caught.value.remedy


def test_a_character_that_is_no_token_is_refused() -> None:
    of = sentencepiece({"ab": -1.0})
    tokens = of["tokenizer.ggml.tokens"]
    tokens[tokens.index("b")] = "c"
    with pytest.raises(UnsupportedModelError, match="'ab' has a character"):
        tokenizer_from_gguf(of, PATH)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("tokens", None, "no list of tokens"),
        ("tokens", [], "no tokens"),
        ("tokens", np.zeros(300), "no list of tokens"),
        ("tokens", ["a"] * 300, "two with the same text"),
        ("token_type", np.ones(300, np.int64), "are int64, expected int32"),
        ("token_type", 3, "are int, expected int32"),
        ("token_type", np.ones(5, np.int32), "token_type for each of its"),
        ("merges", None, "no list of merges"),
        ("merges", ["a b", "a zz"], "'a zz'"),
        ("merges", ["b a"], "'b a'"),
        ("merges", ["ab"], "'ab'"),
    ],
)
def test_a_damaged_byte_level_vocabulary_names_the_file(key: str, value: Any, reason: str) -> None:
    of = byte_level("a+b")
    of[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError, match=reason) as caught:
        tokenizer_from_gguf(of, PATH)
    assert str(PATH) in str(caught.value)


@pytest.mark.parametrize(
    "scores", [np.zeros(3, np.float32), np.full(400, np.nan, np.float32), np.zeros(400), ["1"]]
)
def test_a_sentencepiece_vocabulary_needs_a_score_for_each_token(scores: Any) -> None:
    of = sentencepiece({"ab": -1.0})
    if isinstance(scores, np.ndarray) and scores.size == 400:
        scores = scores[: len(of["tokenizer.ggml.tokens"])]
    of["tokenizer.ggml.scores"] = scores
    with pytest.raises(ModelFileError, match="scores for each of its"):
        tokenizer_from_gguf(of, PATH)


def test_tokens_without_types_are_normal_but_for_those_that_are_known_by_name() -> None:
    of = byte_level("a+b", {"<c>": CONTROL, "<|im_end|>": CONTROL, "</s>": CONTROL})
    del of["tokenizer.ggml.token_type"]
    tokenizer = build(of)
    assert "<c>" not in pieces(tokenizer, "ab<c>")
    assert pieces(tokenizer, "ab<|im_end|></s>") == ["ab", "<|im_end|>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab<|im_end|></s>").ids) == "ab"


def test_a_tag_of_html_is_text_where_the_file_says_so() -> None:
    """It is found before the text is split, as by llama.cpp, which takes it for an end."""
    tokenizer = build(byte_level("a+b", {"</s>": NORMAL}))
    assert pieces(tokenizer, "ab</s>") == ["ab", "</s>"]
    assert tokenizer.decode(tokenizer.encode("ab</s>").ids) == "ab</s>"


def test_a_sentencepiece_vocabulary_needs_a_token_for_each_byte() -> None:
    of = sentencepiece({"ab": -1.0})
    tokens = of["tokenizer.ggml.tokens"]
    tokens[tokens.index("<0x7F>")] = "other"
    with pytest.raises(ModelFileError, match="<0x00> to <0xFF>"):
        tokenizer_from_gguf(of, PATH)
