"""Prompts for a text between two others, by the tokens of each family."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import tokenizers

from edge_spec.errors import ContextFullError, UnsupportedModelError
from edge_spec.text.infill import Infill, infill_tokens
from edge_spec.text.tokenizer import Tokenizer
from fixtures import infill_models

STARCODER = (
    *("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
    *("<repo_name>", "<file_sep>"),
)
DEEPSEEK = (
    "<\uff5cfim\u2581hole\uff5c>",
    "<\uff5cfim\u2581begin\uff5c>",
    "<\uff5cfim\u2581end\uff5c>",
)
BETWEEN = f"{DEEPSEEK[1]}a{DEEPSEEK[0]}b{DEEPSEEK[2]}"


def infill(names: tuple[str, ...], bos_id: int | None = None) -> Infill:
    return Infill(infill_models.tokenizer(names, bos_id), {}, ())


def shown(made: Infill, prompt: list[int]) -> str:
    codec = made._codec
    return "".join(codec.special_text(token) or codec.decode([token]) for token in prompt)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (infill_models.QWEN, "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"),
        (STARCODER, "<fim_prefix>a<fim_suffix>b<fim_middle>"),
        (
            ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
            "<fim-prefix>a<fim-suffix>b<fim-middle>",
        ),
        (DEEPSEEK, BETWEEN),
        (
            ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", "\u2581<EOT>"),
            "\u2581<PRE>a\u2581<SUF>b\u2581<MID>",
        ),
        (
            ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>",
        ),
        (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]b[PREFIX]a"),
        (
            ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
            "<|code_prefix|>a<|code_suffix|>b<|code_middle|>",
        ),
    ],
)  # fmt: skip
def test_each_family_has_its_own_tokens_and_order(names: tuple[str, ...], expected: str) -> None:
    made = infill(names)
    assert shown(made, made.prompt("a", "b", room=100)) == expected


def test_what_the_files_state_goes_before_what_is_known_by_its_name() -> None:
    codec = infill_models.tokenizer((*infill_models.QWEN, "<pre>", "<mid>", "<suf>"))
    stated = {"prefix_token": "<pre>", "suffix_token": "<suf>", "middle_token": "<mid>"}
    tokens = infill_tokens(codec, stated)
    assert tokens is not None
    assert [codec.token_text(each or 0) for each in (tokens.prefix, tokens.suffix, tokens.middle)] \
        == ["<pre>", "<suf>", "<mid>"]  # fmt: skip
    assert infill_tokens(infill_models.tokenizer(()), stated) is None


@pytest.mark.parametrize("names", [(), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)])
def test_a_model_without_all_of_them_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedModelError, match="between a prefix and a suffix"):
        infill(names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            infill_models.QWEN,
            "<|repo_name|>myproject\n<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo"
            "<|file_sep|>filename\n<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
        ),
        (
            STARCODER,
            "<repo_name>myproject\n<file_sep>x.py\none\n<file_sep>y.py\ntwo"
            "<file_sep>filename\n<fim_prefix>a<fim_suffix>b<fim_middle>",
        ),
        (
            DEEPSEEK,
            "\n\n--- snippet ---\n\none\n\n\n--- snippet ---\n\ntwo" + BETWEEN,
        ),
    ],
)
def test_other_files_come_before(names: tuple[str, ...], expected: str) -> None:
    made = infill(names)
    files = [("x.py", "one\n"), ("y.py", "two")]
    assert shown(made, made.prompt("a", "b", files, room=200)) == expected


def test_a_prompt_begins_with_the_token_that_all_begin_with() -> None:
    made = infill(infill_models.QWEN, bos_id=0)
    prompt = made.prompt("a", "b", [("x", "y")], room=200)
    assert prompt[0] == 0 and prompt.count(0) == 1


def test_no_control_token_is_read_in_what_is_given() -> None:
    made = infill(infill_models.QWEN)
    spelled = "".join((*infill_models.QWEN, "<|im_end|>", "<|endoftext|>"))
    prompt = made.prompt(spelled, spelled, [(spelled, spelled)], room=2000)
    for token in made.tokens.all - {made.tokens.padding, made.tokens.file}:
        assert prompt.count(token) == 1
    assert prompt.count(made.tokens.file) == 2 and made.tokens.padding not in prompt
    assert made._codec.decode(prompt).count(spelled) == 4


def test_no_space_is_put_before_a_suffix() -> None:
    """Of a vocabulary that writes spaces into its tokens, as Code Llama's."""
    pieces = ["<unk>", "\u2581", "a", "b", "c", "\u2581a", "\u2581b"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    told = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(pieces) + at, "content": name} | flags
            for at, name in enumerate(("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"))
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "vocab": {piece: at for at, piece in enumerate(pieces)},
            "merges": [["\u2581", "a"], ["\u2581", "b"]],
        },
    }
    codec = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(told)).to_str())
    made = Infill(codec, {}, ())
    names = [codec.token_text(token) for token in made.prompt("abc", "bca", room=50)]
    assert names == [
        "\u2581<PRE>",
        "\u2581a",
        "b",
        "c",
        "\u2581<SUF>",
        "b",
        "c",
        "a",
        "\u2581<MID>",
    ]


@pytest.mark.parametrize("first", [False, True])
def test_other_files_are_cut_first_then_the_prefix_then_the_suffix(first: bool) -> None:
    made = infill(infill_models.QWEN)
    lines = "".join(f"line {at}\n" for at in range(100))
    files = [("old.py", "old = 1\n" * 20), ("new.py", "new = 1\n" * 20)]

    def told(prefix: str, suffix: str, room: int) -> str:
        prompt = made.prompt(prefix, suffix, files, room=room, suffix_first=first)
        assert len(prompt) <= room and prompt.is_cut == (room < 10_000)
        return shown(made, prompt)

    whole = told("p", "s", 10_000)
    assert "old.py" in whole and "new.py" in whole
    less = told("p", "s", 250)
    assert 0 < less.count("old = 1") < 20 == less.count("new = 1\n")
    half = told("p", "s", 180)
    assert "old.py" not in half and 0 < half.count("new = 1") < 20
    texts = told(lines, lines, 500)
    assert "new.py" not in texts
    before = texts.split("<|fim_prefix|>")[1].split("<|")[0]
    after = texts.split("<|fim_suffix|>")[1].split("<|")[0]
    assert lines.endswith(before) and before.startswith("line ")  # whole lines
    assert lines.startswith(after) and after.endswith("\n")
    assert 2 * len(after) < len(before)


def test_a_cut_prefix_begins_at_the_same_place_while_it_grows() -> None:
    """Else each letter that is typed would have the whole prompt read again."""
    made = infill(infill_models.QWEN)
    lines = "".join(f"line {at}\n" for at in range(400))
    prompts = [made.prompt(lines + "x" * n, "s" * 60, room=1000) for n in range(200)]
    kept = [
        next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        for one, other in pairwise(prompts)
    ]
    assert sum(each < 100 for each in kept) <= 2


def test_there_has_to_be_room_for_a_text() -> None:
    made = infill(infill_models.QWEN)
    with pytest.raises(ContextFullError, match="beside its texts"):
        made.prompt("a", "b", names_file=True, room=10)
