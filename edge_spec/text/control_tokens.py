"""Keeps the text of a conversation from becoming tokens that only the chat template may write.

A template is a program: it cuts, joins and searches what it is given, so that no look at a message
alone tells what stands in the prompt. Each character that a control token may be made of is
therefore followed by a mark while the template is rendered, one that nothing given has. Where the
prompt spells a control token with such a character in it, that is text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any

from edge_spec.core.text_codec import TextCodec
from edge_spec.text.given_encoding import fresh_character, touches
from edge_spec.text.marks import Marker, mapped, marked_places, texts_of
from edge_spec.text.template_reading import TemplateReading
from edge_spec.text.token_search import occurrences, pattern_of

# Whatever a tokenizer calls them.
CONTROL = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# Tokens such as <think> and <tool_call>, not runs of spaces or "```".
_TAG = re.compile(r"[<\[{|].*[>\]}|]")
_STRUCTURE = re.compile(r"think|thought|reason|tool|function")  # in the name of a tag
_SPEAKERS = ("system", "assistant")  # whose text may have tags
_SYMBOL = r"[^\w\s]"
_SHORT = 4096  # characters of a text that is looked at in no time
_LONGEST = 100  # characters of a token, or of what a template looks for
Render = Callable[..., str]  # called with what is given


class ControlTokens:
    """Encodes conversations of one model. Any thread may call.

    Control tokens are those that the tokenizer calls special, those that end or begin a text, those
    of the form <|name|>, and others that the template writes around messages. A tag is another
    added token that the template writes, or one of thoughts and tools, such as <think>: it is read
    in what the assistant and the system say, as histories have it, and is text in all else. Other
    added tokens, such as runs of spaces, are text anyway.
    """

    def __init__(
        self,
        codec: TextCodec,
        template: TemplateReading,
        ends: Collection[int],
        around: Callable[[], str],
    ) -> None:
        """ends: tokens that end or begin a text. around: renders a conversation of short messages,
        "" where that cannot be."""
        self._codec = codec
        self._template = template
        self._literals = template.literals
        self._ends = ends
        self._around = around

    @cached_property
    def control(self) -> frozenset[str]:
        """Returns the texts of the control tokens."""
        around = self._around()
        return frozenset(
            text
            for text, (token, is_special) in self._added.items()
            if is_special
            or token in self._ends
            or CONTROL.fullmatch(text)
            or (_TAG.fullmatch(text) and text in around)
        )

    @cached_property
    def tags(self) -> frozenset[str]:
        """Returns the texts of the tags."""
        written = "\0".join(self._literals)
        others = self._added.keys() - self.control
        return frozenset(
            text
            for text in others
            if _TAG.fullmatch(text) and (_STRUCTURE.search(text) or text in written)
        )

    @cached_property
    def _added(self) -> Mapping[str, tuple[int, bool]]:
        return self._codec.added_tokens()

    @property
    def are_between_messages(self) -> bool:
        """Says whether the template writes any between messages, else one can imitate others."""
        around = self._around()
        return not around or any(text in around for text in self.control)

    def written_by_text(self) -> list[str]:
        """Returns ends and beginnings of a text that are tokens like any other, so that text
        becomes them."""
        codec = self._codec
        found = {token: codec.decode([token]) or codec.token_text(token) for token in self._ends}
        return [
            text
            for token, text in found.items()
            if token in codec.encode_given(text, range(len(text)), self._ids)
        ]

    def encode(self, render: Render, *given: Any) -> list[int]:
        """Returns the tokens of `render(*given)`, whose first argument is messages."""
        texts = list(texts_of(given))
        if not any(map(self._may_take_part, texts)):
            return self._codec.encode(render(*given))
        mark = fresh_character(*texts, *self._literals)
        marked = render(*self._marked(given, mark))
        marked = marked.replace(json.dumps(mark)[1:-1], mark)
        text, places = marked.replace(mark, ""), marked_places(marked, mark)
        read, forged = [], False
        for start, end in occurrences(self._pattern, text):
            if touches(places, start, end):
                forged = True
            else:
                read.append(text[start:end])
        if not forged and not self._reads_variants:
            plain = render(*given)
            if plain == text or self._spelled(plain) == read:
                return self._codec.encode(plain)
        return self._codec.encode_given(text, places, self._ids)

    def _may_take_part(self, text: str) -> bool:
        """Says whether a part of this may become a part of a control token in a prompt: only then
        has the template to be rendered with marks."""
        stripped = text.strip()
        looks = self._reads_variants or self._template.rewrites or len(text) < _SHORT
        if looks and not self._symbols.search(text):  # a long one is faster searched for the tokens
            return stripped in self._names
        return (
            self._reads_variants
            or self._template.rewrites
            or bool(self._pattern.search(text))
            or any(cut in text for cut in self._template.cuts)
            or self._is_joined(text)
            or (stripped != text and self._is_joined(stripped))
        )

    def _is_joined(self, text: str) -> bool:
        """Says whether it goes on with a control token, begins one, or is what is within one."""
        if text in self._names or (
            len(text) < _LONGEST and self._symbols.search(text) and text in self._joined
        ):
            return True
        beginnings, ends = self._parts
        return any(
            text[-n:] in beginnings or text[:n] in ends
            for n in range(1, min(len(text), self._longest))
        )

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.control | self.tags), default=0)

    @cached_property
    def _joined(self) -> str:
        return "\0".join(self.control | self.tags)

    @cached_property
    def _parts(self) -> tuple[frozenset[str], frozenset[str]]:
        return _parts(self.control | self.tags)

    def _spelled(self, text: str) -> list[str]:
        return [text[start:end] for start, end in occurrences(self._pattern, text)]

    @cached_property
    def _reads_variants(self) -> bool:
        return self._codec.reads_variants

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._added[text][0] for text in self.control | self.tags)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.control | self.tags)

    @cached_property
    def _symbols(self) -> re.Pattern[str]:
        """Matches what a control token has at least one of."""
        if self._reads_variants:
            return re.compile(_SYMBOL)
        texts = self.control | self.tags
        found = {*re.findall(_SYMBOL, "".join(texts))}
        found |= {text[0] for text in texts if found.isdisjoint(text)}
        return re.compile(f"[{re.escape(''.join(sorted(found)))}]" if found else r"(?!)")

    @cached_property
    def _names(self) -> frozenset[str]:
        """Returns words that the template may make a control token of, such as the name in
        <|name|>, unless it has them itself."""
        before = {each[at:] for each in self._literals for at in range(-_LONGEST, 0)}
        after = {each[:end] for each in self._literals for end in range(1, _LONGEST)}
        found = {
            word.group()
            for text in self.control | self.tags
            for word in re.finditer(r"\w+", text)
            if text[: word.start()] in before and text[word.end() :] in after
        }
        return frozenset(found.difference(self._literals))

    def _marked(self, given: tuple[Any, ...], mark: str) -> tuple[Any, ...]:
        own, foreign = (
            Marker(mark, self._may_take_part, self._symbols, self._names, kept)
            for kept in (self._own, self._foreign)
        )
        messages = [
            {
                name: value
                if name == "role"
                else mapped(value, own if _has_tags(message, name) else foreign)
                for name, value in message.items()
            }
            for message in given[0]
        ]
        return (messages, *(mapped(each, foreign) for each in given[1:]))

    @cached_property
    def _own(self) -> tuple[str, ...]:
        """Returns what a template may look for in the text of the assistant or the system."""
        return self._sought(self.control, self.tags)

    @cached_property
    def _foreign(self) -> tuple[str, ...]:
        """Returns what it may look for in other text."""
        return self._sought(self.control | self.tags, ())

    def _sought(self, control: Collection[str], more: Collection[str]) -> tuple[str, ...]:
        """Returns texts of the template that no control token has a part in."""
        pattern, joined = pattern_of(control), "\0".join(control)
        beginnings, ends = _parts(control)
        return tuple(
            text
            for text in {*self._literals, *more}
            if 1 < len(text) < _LONGEST
            and self._symbols.search(text)
            and not pattern.search(text)
            and text not in joined
            and not any(text[:n] in ends or text[-n:] in beginnings for n in range(1, len(text)))
        )


def _parts(texts: Collection[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Returns what these begin and end with."""
    return (
        frozenset(text[:n] for text in texts for n in range(1, len(text))),
        frozenset(text[-n:] for text in texts for n in range(1, len(text))),
    )


def _has_tags(message: Mapping[str, Any], name: str) -> bool:
    return name == "content" and message["role"] in _SPEAKERS
