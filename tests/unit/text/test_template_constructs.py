"""Constructs of published chat templates render as transformers renders them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import ChatTemplate
from fixtures.chat_templates import (
    CONVERSATIONS,
    EXPRESSIONS,
    FIRST,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOOLS,
)

LISTED = "Tools:" + "".join(
    f"\n{json.dumps(tool, ensure_ascii=False)}{names}"
    for tool, names in zip(TOOLS, (" city* unitc|f", " note numbers*"), strict=True)
)


def rendered(source: str, messages: Any, tools: Any = None, options: Any = None) -> str | None:
    """None: it is refused."""
    template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
    try:
        return template.render(messages, tools or (), **(options or {}))
    except EdgeSpecError:
        return None


@pytest.mark.parametrize(("expression", "text"), EXPRESSIONS.items())
def test_an_expression_renders(expression: str, text: str) -> None:
    assert rendered("{{ " + expression + " }}", FIRST) == text


@pytest.mark.parametrize(
    ("template", "conversation", "text"),
    [
        (
            "turns",
            "turns",
            '<system>\ns<user>\n1+1?<assistant>\n 2 \n<user>\n<b>&"{{ x }}<assistant>',
        ),
        ("alternating", "turns", '<s>[s\n\n1+1?] 2</s>[<b>&"{{ x }}]'),
        ("alternating", "a later system message", None),
        ("alternating", "continued after a space", "<s>[Where?] It is"),
        ("turns", "continued after a space", "<user>\nWhere?<assistant>\nIt is \n"),
        (
            "tools",
            "two calls",
            f"{LISTED}\n<user>Weather?\n<assistant>I look.{{1: weather city=Z\u00fcrich;unit=c;}}"
            "{2: add numbers=[1, 2.5];note=null;}\n"
            "<results>[weather sunny][add 3.5]</results>\n<assistant>",
        ),
        (
            "tools",
            "arguments as text",
            LISTED + '\n<user>Weather?\n<assistant>{1: weather {"city":"Bern"}}\n'
            "<results>[weather sunny]</results>\n<assistant>",
        ),
        ("tools", "no thoughts", "\n<user>1+1?\n<assistant>()"),
        (
            "macros",
            "tools and a system message",
            '<s>Use them.<tools>weather.city: String, weather.unit: "c"/"f";'
            "add.numbers: list of Number, add.note: string;</tools>"
            "<user>Weather?</user><assistant>",
        ),
        ("namespaces", "documents", "What?||0['What?']highTOLD"),
    ],
)
def test_a_conversation_renders(template: str, conversation: str, text: str | None) -> None:
    prompt = rendered(TEMPLATES[template], *CONVERSATIONS[conversation])
    assert prompt == text


@pytest.mark.slow
def test_transformers_renders_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    vocabulary = {token: id for id, token in enumerate(SPECIAL_TOKENS.values())}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(
            tokenizers.models.WordLevel(vocabulary, unk_token="<pad>")
        ),
        **SPECIAL_TOKENS,
    )

    def theirs(source: str, messages: Any, tools: Any = None, options: Any = None) -> str | None:
        asked = {"add_generation_prompt": True, **(options or {})}
        if asked.get("continue_final_message"):
            asked["add_generation_prompt"] = False
        values = asked.pop("template_kwargs", {})
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=tools, chat_template=source, tokenize=False, **asked, **values
                )
            )
        except Exception:  # a template may fail in any way
            return None

    for expression, text in EXPRESSIONS.items():
        assert theirs("{{ " + expression + " }}", FIRST) == text, expression
    for name, source in TEMPLATES.items():
        for conversation, (messages, tools, options) in CONVERSATIONS.items():
            ours = rendered(source, messages, tools, options)
            assert ours == theirs(source, messages, tools, options), (name, conversation)
