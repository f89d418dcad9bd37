"""Compares our renderer with transformers' on a folder of chat templates, and counts constructs.

    python benchmarks/template_parity.py FOLDER

FOLDER holds templates as *.jinja. Each is rendered with the conversations of
tests/fixtures/chat_templates.py: as they are, in our sandbox, and fitted, as `chat_prompt` does.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import Environment, nodes
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerFast

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import AnswerMarks, ChatTemplate
from edge_spec.text.plain_messages import plain_messages
from edge_spec.text.template_traits import TemplateTraits, fitted

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fixtures.chat_templates import CONVERSATIONS, SPECIAL_TOKENS

_VARIABLES = ("messages", "tools", "documents", "enable_thinking", "reasoning_effort")
_LISTED = {
    nodes.Scope: "generation",
    nodes.AssignBlock: "set as a block",
    nodes.Macro: "macro",
    nodes.CallBlock: "call block",
    nodes.FilterBlock: "filter block",
    nodes.Break: "break",
    nodes.Continue: "continue",
    nodes.Slice: "slice",
    nodes.NSRef: "namespace attribute set",
    nodes.Concat: "~",
}
Render = Callable[[Any, Any, Any], str | None]


def constructs(source: str) -> Iterator[str]:
    """Returns the names of what a template uses beside plain output, loops and conditions."""
    environment = Environment(extensions=["jinja2.ext.loopcontrols", AnswerMarks])
    tree = environment.parse(source)
    for node in tree.find_all(nodes.Node):
        if type(node) in _LISTED:
            yield _LISTED[type(node)]
        elif isinstance(node, nodes.Filter):
            options = ", ".join(sorted(each.key for each in node.kwargs))
            yield f"filter {node.name}" + (f" ({options})" if node.name == "tojson" else "")
        elif isinstance(node, nodes.Test):
            yield f"is {node.name}"
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr):
            yield f".{node.node.attr}()"
        elif isinstance(node, nodes.Call) and isinstance(node.node, nodes.Name):
            if node.node.name in ("namespace", "raise_exception", "strftime_now", "range", "dict"):
                yield f"{node.node.name}()"
        elif isinstance(node, nodes.Getattr) and getattr(node.node, "name", None) == "loop":
            yield f"loop.{node.attr}"
        elif isinstance(node, nodes.For):
            yield from (["for with unpacking"] if isinstance(node.target, nodes.Tuple) else [])
            yield from (["for with if"] if node.test is not None else [])
    read = find_undeclared_variables(tree)
    yield from (name for name in read if name in _VARIABLES or name.endswith("_token"))
    yield from re.findall(r"\breasoning_content\b|\btool_calls\b|\btool_call_id\b", source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    used: Counter[str] = Counter()
    plain: Counter[str] = Counter()
    fitting: Counter[str] = Counter()
    files = sorted(parser.parse_args().folder.glob("*.jinja"))
    for file in files:
        source = file.read_text(encoding="utf-8")
        used.update(set(constructs(source)))
        template = ChatTemplate(source, special_tokens=SPECIAL_TOKENS)
        traits, theirs = TemplateTraits(template.render), _theirs(source)
        for name, (messages, tools, options) in CONVERSATIONS.items():
            expected = theirs(messages, tools, options)
            found = _verdict(_ours(template, messages, tools, options), expected)
            plain[found] += 1
            if found == "differs" and not template.reads_parts:
                print("differs:", file.stem, name)
            given = fitted(plain_messages(messages), tools or (), traits)
            found = _verdict(_ours(template, *given, options), expected)
            if found == "differs":
                found = _why(template, traits, messages, tools)
            fitting[found] += 1
    print(f"{len(files)} templates, {len(CONVERSATIONS)} conversations")
    for title, counts in (("as they are", plain), ("fitted", fitting), ("constructs", used)):
        print(f"\n{title}")
        for what, count in counts.most_common():
            print(f"{count:6} {what}")


def _ours(template: ChatTemplate, messages: Any, tools: Any, options: Any) -> str | None:
    try:
        return template.render(messages, tools or (), **options)
    except EdgeSpecError:
        return None


def _theirs(source: str) -> Render:
    words = {token: id for id, token in enumerate(SPECIAL_TOKENS.values())}
    model = tokenizers.models.WordLevel(words, unk_token="<pad>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), **SPECIAL_TOKENS
    )
    tokenizer.chat_template = source

    def render(messages: Any, tools: Any, options: Any) -> str | None:
        asked = {"add_generation_prompt": not options.get("continue_final_message"), **options}
        values = asked.pop("template_kwargs", {})
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, **asked, **values
                )
            )
        except Exception:  # a template may fail in any way
            return None

    return render


def _verdict(ours: str | None, theirs: str | None) -> str:
    if ours == theirs:
        return "refused by both" if ours is None else "equal"
    if ours is None:
        return "refused by ours"
    return "refused by transformers" if theirs is None else "differs"


def _why(template: ChatTemplate, traits: TemplateTraits, messages: Any, tools: Any) -> str:
    has_calls = any(message.get("tool_calls") for message in messages)
    if template.reads_parts:
        return "differs: contents are parts"
    if traits.native_tools is None and (tools or has_calls):
        return "differs: tools or calls are text"
    if not traits.takes(plain_messages(messages)):
        return "differs: speakers are arranged"
    return "differs: arguments are an object" if has_calls else "differs"


if __name__ == "__main__":
    main()
