"""The tokens that end an answer: stated, found by name, and written by the chat template."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, models

from edge_spec.text.chat_format import BY_NAME, BY_TEMPLATE, ChatFormat, with_every_end
from edge_spec.text.tokenizer import Tokenizer

SIZE = 1000
TURN = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}END{% endfor %}"


def text_of(
    special: list[str], plain: list[str] | None = None, stated: Any = (), template: Any = None
) -> ChatFormat:
    """Ids are in this order: "a", `special`, `plain`."""
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.add_special_tokens(special)
    library.add_tokens([AddedToken(each, special=False) for each in plain or ()])
    sources = dict.fromkeys(stated, "a file")
    codec = Tokenizer(library.to_str())
    return ChatFormat(codec, template, tuple(stated), None, end_sources=sources)


def ends(*args: Any, **kwargs: Any) -> dict[str, str]:
    text = with_every_end(text_of(*args, **kwargs), SIZE)
    assert tuple(text.end_sources) == text.eos_ids
    return {text.tokenizer.token_text(id): by for id, by in text.end_sources.items()}


@pytest.mark.parametrize(
    "name",
    [
        *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>"),
        *("<\uff5cend\u2581of\u2581sentence\uff5c>", "[EOT]", "<turn|>", "\u2581<EOT>"),
        *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),  # of a text with a gap in it
    ],
)
@pytest.mark.parametrize("is_special", [True, False])
def test_ends_are_known_by_their_names(name: str, is_special: bool) -> None:
    special, plain = ([name], []) if is_special else ([], [name])
    assert ends(["<|x|>", *special], plain, stated=[1]) == {"<|x|>": "a file", name: BY_NAME}


@pytest.mark.parametrize(
    ("special", "plain", "expected"),
    [
        # The end of a thought where an answer ends otherwise.
        (["<|end|>", "<|return|>", "<|call|>"], [], {"<|return|>", "<|call|>"}),
        (["<|end|>", "<|calls|>", "<|flush|>"], [], {"<|calls|>", "<|flush|>"}),
        (["<|end|>", "<|return|>"], [], {"<|end|>", "<|return|>"}),
        # HTML, unless the vocabulary has both as special tokens, or no other end.
        (["<eos>"], ["<s>", "</s>"], {"<eos>"}),
        (["<s>", "</s>"], [], {"</s>"}),
        (["<s>", "</s>", "<|im_end|>"], [], {"</s>", "<|im_end|>"}),
        ([], ["</s>"], {"</s>"}),
        (["<s>", "</s>", "<|tool_response>"], [], {"<|tool_response>"}),
        (["<s>", "</s>", "<|plamo:eos|>"], [], set()),
        (["<|fim_prefix|>", "<|im_start|>"], ["<think>"], set()),
    ],
)
def test_what_stands_within_answers_is_no_end(
    special: list[str], plain: list[str], expected: set[str]
) -> None:
    assert set(ends(special, plain)) == expected


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("<|stop|>", {"<|stop|>"}),
        ("\n<|stop|><|x|>", {"<|stop|>"}),
        ("</answer><|stop|>", {"<|stop|>"}),  # a tag is text
        ("<|plain|><|stop|>", {"<|plain|>"}),  # not called special, and yet one
        ("", set()),  # the next message begins at once
        ("\n\n", set()),
    ],
)
def test_what_the_template_writes_after_an_answer_ends_one(end: str, expected: set[str]) -> None:
    special, plain = ["<|start|>", "<|stop|>", "<|x|>"], ["</answer>", "<|plain|>"]
    found = ends(special, plain, template=TURN.replace("END", end))
    assert found == dict.fromkeys(expected, BY_TEMPLATE)


@pytest.mark.parametrize(
    "template", ["{% for", "{{ raise_exception('no') }}", "{{ messages[0].content }}", "", None]
)
def test_a_template_that_does_not_take_a_conversation_adds_no_end(template: str | None) -> None:
    assert ends(["<|start|>", "<|stop|>"], template=template, stated=[2]) == {"<|stop|>": "a file"}


def test_tokens_that_the_model_does_not_score_are_no_ends() -> None:
    text = text_of(["<|im_end|>", "<|x|>"], stated=[2, 500])
    assert with_every_end(text, 2).eos_ids == (1,)


def test_the_chat_template_knows_the_first_end_that_is_stated_and_no_other() -> None:
    for stated, known in (((2,), "<|x|>"), ((), "")):
        text = text_of(["<|im_end|>", "<|x|>"], stated=stated, template="{{ eos_token }}!")
        assert with_every_end(text, SIZE).rendered([{"role": "user", "content": ""}]) == f"{known}!"
