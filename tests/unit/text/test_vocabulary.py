"""Whether two models speak the same vocabulary."""

from __future__ import annotations

import re

import pytest

from edge_spec.errors import UsageError
from edge_spec.text.vocabulary import compare as compared
from edge_spec.text.vocabulary import require_same_vocabulary, same_vocabulary

WORDS = [f"word{id}" for id in range(20)]


def vocabulary(tokens: list[str]) -> dict[str, int]:
    return {token: id for id, token in enumerate(tokens)}


def compare(target: list[str], draft: list[str]) -> None:
    assert same_vocabulary(vocabulary(target), vocabulary(draft))
    require_same_vocabulary(vocabulary(target), vocabulary(draft), "big", "small")


def refusal(target: list[str], draft: list[str]) -> str:
    assert not same_vocabulary(vocabulary(target), vocabulary(draft))
    with pytest.raises(UsageError) as caught:
        require_same_vocabulary(vocabulary(target), vocabulary(draft), "big", "small")
    text = str(caught.value)
    assert "the draft small has another vocabulary than big" in text
    assert "\n" not in text
    assert len(text) < 800
    return text


def replaced(tokens: list[str], changes: dict[int, str]) -> list[str]:
    return [changes.get(id, token) for id, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (WORDS, WORDS),
        (WORDS, WORDS[:15]),  # one of them is padded further
        (WORDS[:15], WORDS),
        ([*WORDS, "[PAD20]", "[PAD21]"], WORDS),
        ([*WORDS, "[PAD20]"], [*WORDS, "[PAD]"]),
        ([*WORDS, "[PAD20]"], [*WORDS, "<tool_call>"]),  # one knows a token that the other pads
        ([*WORDS, "<tool_call>"], [*WORDS, "[PAD20]"]),
        ([*WORDS, "<|reserved_special_token_3|>"], [*WORDS, "<|fim|>"]),
        ([*WORDS, "<unused7>"], [*WORDS, "<unused_8>"]),
        ([*WORDS, "[EMPTY_20]"], [*WORDS, "<dummy00001>"]),
    ],
)
def test_equal_but_for_padding_passes(target: list[str], draft: list[str]) -> None:
    compare(target, draft)


@pytest.mark.parametrize(
    "name", ["PAD", "[PAD", "x[PAD1]", "[PAD1]x", "<unused>", "<|reserved|> x", "[PAD1", "padding"]
)
def test_what_only_resembles_padding_counts(name: str) -> None:
    assert "1 of 20" in refusal(WORDS, replaced(WORDS, {7: name}))


@pytest.mark.parametrize(
    ("target", "draft", "told"),
    [
        (WORDS, replaced(WORDS, {7: "other"}), "1 of 20 tokens differ (7 is 'word7' and 'other')"),
        (WORDS, WORDS[::-1], "20 of 20"),
        (WORDS, ["<s>", *WORDS], "20 of 20"),
        (WORDS, replaced(WORDS, {3: "word4", 4: "word3"}), "2 of 20"),
        (
            [*WORDS, "<|im_end|>"],
            [*WORDS, "</s>"],
            "1 of 21 tokens differ (20 is '<|im_end|>' and '</s>')",
        ),
        (["<s>", *WORDS], ["<|begin_of_text|>", *WORDS], "1 of 21"),
    ],
)
def test_tokens_that_differ_are_counted_and_shown(
    target: list[str], draft: list[str], told: str
) -> None:
    assert told in refusal(target, draft)


def test_the_first_five_of_many_differences_are_shown() -> None:
    text = refusal(WORDS, [f"other{id}" for id in range(20)])
    assert "20 of 20 tokens differ" in text
    assert re.findall(r"(\d+) is ", text) == ["0", "1", "2", "3", "4"]


def test_a_draft_that_knows_only_the_first_tokens_is_the_same() -> None:
    """As of a draft of the same family whose tokens were added later."""
    compare(WORDS, WORDS[:3])
    compare(WORDS[:3], [*WORDS, "<|new|>"])


@pytest.mark.parametrize("letter", ["x", "\n", "\0", "\u2581", "\U0001f600", "\\"])
def test_long_and_strange_tokens_are_cut(letter: str) -> None:
    long = [f"{letter * 4000}{id}" for id in range(20)]
    refusal(long, WORDS)
    refusal(WORDS, long)


def test_vocabularies_without_a_common_id_are_refused() -> None:
    for target, draft in (([], WORDS), (WORDS, []), ([], [])):
        assert "0 of 0" in refusal(target, draft)
    with pytest.raises(UsageError):
        require_same_vocabulary({"a": 0}, {"a": 1}, "big", "small")


def test_equal_vocabularies_share_each_id_once() -> None:
    twice = {"a": 0, "b": 1, "also b": 1}
    assert compared(twice, dict(twice)) == (2, [])
    assert not compared({}, {}).is_same
