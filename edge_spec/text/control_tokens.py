"""Keeps the text of a conversation from becoming tokens that only the chat template may write.

A template is a program: it cuts, joins and searches what it is given, so that no look at a message
alone tells what stands in the prompt. Marks are therefore put within what begins and ends control
tokens in what is given, and the template is rendered with them. Where the prompt spells a control
token with a character after a mark in it, that is text like any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.given_encoding import fresh_characters, occurrences, pattern_of, touches
from edge_spec.text.plain_messages import Message

# Whatever a tokenizer calls them.
CONTROL_TEXT = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# Tokens such as <think> and <tool_call>, not runs of spaces or "```".
_TAG = re.compile(r"[<\[{|].*[>\]}|]")
_STRUCTURE = re.compile(r"think|thought|reason|tool|function")  # in the name of a tag
_SPEAKERS = ("system", "assistant")  # whose text may have tags
_LONGEST = 100  # characters of what a template looks for
_SYMBOL = re.compile(r"[^\w\s\"'\\]")  # quotes are none, since templates escape them
ANSWER, FOLLOW_UP = "First answer.", "Second question."
CONVERSATION: Sequence[Message] = (
    {"role": "user", "content": "First question."},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": FOLLOW_UP},
)
_SIGN = "\u263a"  # before a text, so that a tokenizer puts no space before the text itself
Render = Callable[..., str]  # called with what is given


class ControlTokens:
    """Encodes conversations of one model. Any thread may call.

    Control tokens are those that the tokenizer calls special, those that end or begin a text, those
    of the form <|name|>, and others that the template writes around messages. A tag is another
    added token that the template writes, or one of thoughts and tools, such as <think>: it is read
    in what the assistant and the system say, as histories have it, and is text in all else. Other
    added tokens, such as runs of spaces, are text anyway.
    """

    def __init__(self, codec: TextCodec, template: ChatTemplate, ends: Collection[int]) -> None:
        """ends: tokens that end or begin a text."""
        self._codec = codec
        self._template = template
        self._ends = ends

    @cached_property
    def _around(self) -> str:
        """What the template writes around short messages; "" where it takes other conversations."""
        try:
            return self._template.render(CONVERSATION).partition(FOLLOW_UP)[0]
        except EdgeSpecError:
            return ""

    @cached_property
    def control(self) -> frozenset[str]:
        """Returns the texts of the control tokens."""
        return frozenset(
            text
            for text, (token, is_special) in self._added.items()
            if is_special
            or token in self._ends
            or CONTROL_TEXT.fullmatch(text)
            or (_TAG.fullmatch(text) and text in self._around)
        )

    @cached_property
    def tags(self) -> frozenset[str]:
        """Returns the texts of the tags."""
        written = "\0".join(self._template.literals)
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
        return not self._around or any(text in self._around for text in self.control)

    def encode(self, render: Render, *given: Any) -> list[int]:
        """Returns the tokens of `render(*given)`, whose first argument is messages."""
        texts: list[str] = []
        _mapped(given, texts.append)
        fresh, whole = fresh_characters(*texts, *self._template.literals), "\0".join(texts)
        mark = next(each for each in fresh if json.dumps(each)[1:-1] not in whole)
        prompt = render(*self._marked(given, mark)).replace(json.dumps(mark)[1:-1], mark)
        if mark not in prompt:
            return self._codec.encode(prompt)
        parts = prompt.split(mark)
        prompt, places = "".join(parts), [*accumulate(map(len, parts[:-1]))]
        read = occurrences(self._pattern, prompt)
        if self._codec.reads_variants or any(touches(places, *span) for span in read):
            return self._codec.encode_given(prompt, places, self._ids)
        return self._codec.encode(prompt)

    def _marked(self, given: tuple[Any, ...], mark: str) -> tuple[Any, ...]:
        """Return the same with a mark within each beginning and end of a control token."""

        def marking(spelling: _Spelling) -> Callable[[str], str]:
            def marked(text: str) -> str:
                if spelling.is_within(text):
                    at = len(text) - len(text.lstrip()) + 1
                    return text[:at] + mark + text[at:]
                parts = spelling.kept.split(text)
                parts[::2] = [spelling.pairs.sub(rf"\g<0>{mark}", each) for each in parts[::2]]
                return "".join(parts)

            return marked

        own, foreign = map(marking, self._spellings)
        messages = [
            {
                name: value
                if name == "role"
                else _mapped(value, own if _has_tags(message, name) else foreign)
                for name, value in message.items()
            }
            for message in given[0]
        ]
        return (messages, *(_mapped(each, foreign) for each in given[1:]))

    @cached_property
    def _spellings(self) -> tuple[_Spelling, _Spelling]:
        """Returns those of what the assistant and the system say, and of all else."""
        literals, variants = self._template.literals, self._codec.reads_variants
        return (
            _Spelling.of(self.control, {*literals, *self.tags}, reads_variants=variants),
            _Spelling.of(self.control | self.tags, literals, reads_variants=variants),
        )

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.control | self.tags)

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._added[text][0] for text in self.control | self.tags)


class _Spelling(NamedTuple):
    """How a text spells control tokens. pairs: matches the former of its first two characters and
    of its last two. kept: what templates look for, or what is read, in a group; no control token
    has a part in it. joined: all of them, with others between."""

    pairs: re.Pattern[str]
    kept: re.Pattern[str]
    joined: str

    @classmethod
    def of(
        cls, control: Collection[str], kept: Collection[str], *, reads_variants: bool
    ) -> _Spelling:
        """reads_variants: in other characters, too, so that any sign may begin or end one."""
        joined, known = "\0".join(control), pattern_of(control)
        beginnings = {text[:n] for text in control for n in range(1, len(text))}
        ends = {text[-n:] for text in control for n in range(1, len(text))}
        apart = [
            text
            for text in kept
            if 1 < len(text) < _LONGEST and _SYMBOL.search(text)
            if not known.search(text) and text not in joined
            if not any(text[:n] in ends or text[-n:] in beginnings for n in range(1, len(text)))
        ]
        pairs = sorted({text[:2] for text in control} | {text[-2:] for text in control})
        within = [f"{re.escape(each[0])}(?={re.escape(each[1])})" for each in pairs if each[1:]]
        if reads_variants:
            within = [f"{_SYMBOL.pattern}(?=.)", f".(?={_SYMBOL.pattern})"]
        return cls(
            re.compile("|".join(within) or "(?!)", re.IGNORECASE | re.DOTALL),
            re.compile(f"({pattern_of(apart).pattern})"),
            joined.lower(),
        )

    def is_within(self, text: str) -> bool:
        """Says whether a text is a part of a control token, and no word that templates look for."""
        text = text.strip().lower()
        return len(text) > 1 and bool(_SYMBOL.search(text)) and text in self.joined


def _has_tags(message: Mapping[str, Any], name: str) -> bool:
    return name == "content" and message["role"] in _SPEAKERS


def _mapped(value: Any, change: Callable[[str], Any]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


class PlainText:
    """Encodes texts within a prompt, in which no control token is read. Any thread may call."""

    def __init__(self, codec: TextCodec, control: Collection[int]) -> None:
        """control: tokens that are not read beside those that the tokenizer calls special, and
        those of the form <|name|>."""
        self._codec = codec
        self.beginning = codec.encode("")  # of every prompt
        self._control = frozenset(control).union(
            token
            for text, (token, is_special) in codec.added_tokens().items()
            if is_special or CONTROL_TEXT.fullmatch(text)
        )

    def tokens(self, text: str) -> list[int]:
        ids = self._codec.encode_given(text, range(len(text)), self._control)
        return ids[len(self.beginning) :]

    def following(self, text: str) -> list[int]:
        """Returns the tokens of a text that goes on with another one: no space is put before it."""
        if not self._puts_spaces:
            return self.tokens(text)
        sign = self.tokens(_SIGN)
        ids = self.tokens(_SIGN + text)
        return ids[len(sign) :] if ids[: len(sign)] == sign else self.tokens(text)

    @cached_property
    def _puts_spaces(self) -> bool:
        first = self.tokens("a")[:1]
        return bool(first) and self._codec.token_text(first[0]).startswith("\u2581")
