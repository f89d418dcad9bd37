"""Keep conversation text from becoming control tokens, which only the chat template may write.

A template cuts, joins and searches its input, so a message alone does not show what ends up in the
prompt. Before rendering, each input character that a control token may contain is therefore
replaced by a placeholder that occurs nowhere else. A control token in the prompt that contains a
placeholder is plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from edge_spec.core.text_codec import TextCodec
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.given_encoding import fresh_characters, occurrences, pattern_of, touches
from edge_spec.text.plain_messages import ROLES

# Control tokens whether or not the tokenizer marks them as special.
CONTROL_TEXT = re.compile(r"<[|\uff5c].*[|\uff5c]>")
# Matches <think> and <tool_call>, not runs of spaces or "```".
_TAG = re.compile(r"[<\[{|].*[>\]}|]")
_STRUCTURE = re.compile(r"think|thought|reason|tool|function")  # in the name of a tag
_SPEAKERS = ("system", "assistant")  # whose text may contain tags
_SYMBOL = r"[^\w\s\"'\\]"  # quotes stay, since templates escape them
_LONGEST = 100  # characters of a template literal
_SIGN = "\u263a"  # precedes a text, so that the tokenizer adds no space to it
Render = Callable[..., str]  # called with messages first


class ControlTokens:
    """Encodes conversations for one model. Any thread may call.

    Control tokens are special tokens, those that end or begin a text, those of the form <|name|>,
    and others that the template writes around messages. Tags are other added tokens that the
    template writes, or that mark thoughts and tools, such as <think>: they are recognized only in
    assistant and system messages, as histories contain them. Other added tokens, such as runs of
    spaces, are always text.
    """

    def __init__(
        self,
        codec: TextCodec,
        template: ChatTemplate,
        around: Callable[[], str],
        ends: Collection[int],
    ) -> None:
        """around: what the template writes around messages; "" if unknown. ends: tokens that end or
        begin a text."""
        self._codec = codec
        self._template = template
        self._find_around = around
        self._ends = ends

    @cached_property
    def _around(self) -> str:
        return self._find_around()

    @cached_property
    def control(self) -> frozenset[str]:
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
        """False if messages are separated by plain text, which a message can imitate."""
        return not self._around or any(text in self._around for text in self.control)

    def encode(self, render: Render, *given: Any) -> list[int]:
        """Return the tokens of `render(*given)`; the first argument is the messages."""
        texts = list(_texts_of(given))
        if not any(map(self._may_take_part, texts)):
            return self._codec.encode(render(*given))
        hidden = self._hidden(texts)
        prompt = render(*self._replaced(given, hidden))
        for private in hidden.values():
            prompt = prompt.replace(json.dumps(private)[1:-1], private)
        shown = {ord(private): character for character, private in hidden.items()}
        places = [at for at, character in enumerate(prompt) if ord(character) in shown]
        prompt = prompt.translate(shown)
        read = list(occurrences(self._pattern, prompt))
        is_forged = any(touches(places, start, end) for start, end in read)
        if not is_forged and not self._codec.reads_variants:
            plain = render(*given)
            if plain == prompt or self._spelled(plain) == self._spelled(prompt):
                return self._codec.encode(plain)
        return self._codec.encode_given(prompt, places, self._ids)

    def _may_take_part(self, text: str) -> bool:
        """Return True if part of the text may end up in a control token."""
        return bool(self._symbols.search(text)) or text.strip() in self._names

    def _hidden(self, texts: Sequence[str]) -> dict[str, str]:
        found = set().union(*texts)
        fresh = fresh_characters(*texts, *self._template.literals)
        letters = set().union(*self._names)
        return {
            each: next(fresh)
            for each in sorted(found)
            if each in letters or self._symbols.match(each)
        }

    def _replaced(self, given: tuple[Any, ...], hidden: Mapping[str, str]) -> tuple[Any, ...]:
        whole = {ord(character): private for character, private in hidden.items()}
        symbols = {code: each for code, each in whole.items() if self._symbols.match(chr(code))}

        def replacing(kept: Collection[str]) -> Callable[[str], str]:
            pairs = [(text.translate(symbols), text) for text in kept]

            def replace(text: str) -> str:
                text = text.translate(whole if text.strip() in self._names else symbols)
                for replaced, plain in pairs:
                    text = text.replace(replaced, plain)
                return text

            return replace

        own, foreign = map(replacing, self._kept)
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
    def _kept(self) -> tuple[Collection[str], Collection[str]]:
        """Texts to keep, so that templates find them: in assistant and system content, and
        elsewhere. None can be part of a control token."""

        def kept(control: Collection[str], tags: Collection[str]) -> Collection[str]:
            pattern, joined = pattern_of(control), "\0".join(control)
            beginnings = {text[:n] for text in control for n in range(1, len(text))}
            ends = {text[-n:] for text in control for n in range(1, len(text))}
            return [
                text
                for text in {*self._template.literals, *tags}
                if 1 < len(text) < _LONGEST
                and self._symbols.search(text)
                and not pattern.search(text)
                and text not in joined
                and not any(
                    text[:n] in ends or text[-n:] in beginnings for n in range(1, len(text))
                )
            ]

        return kept(self.control, self.tags), kept(self.control | self.tags, ())

    def _spelled(self, text: str) -> list[str]:
        return [text[start:end] for start, end in occurrences(self._pattern, text)]

    @cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._added[text][0] for text in self.control | self.tags)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return pattern_of(self.control | self.tags)

    @cached_property
    def _symbols(self) -> re.Pattern[str]:
        """Matches at least one character of each control token and tag."""
        if self._codec.reads_variants:
            return re.compile(_SYMBOL)
        texts = self.control | self.tags
        found = {*re.findall(_SYMBOL, "".join(texts))}
        found |= {text[0] for text in texts if found.isdisjoint(text)}
        return re.compile(f"[{re.escape(''.join(sorted(found)))}]" if found else r"(?!)")

    @cached_property
    def _names(self) -> frozenset[str]:
        """Words that the template may complete to a control token, such as the name in <|name|>."""
        before = {each[at:] for each in self._template.literals for at in range(-_LONGEST, 0)}
        after = {each[:end] for each in self._template.literals for end in range(1, _LONGEST)}
        found = {
            word.group()
            for text in self.control | self.tags
            for word in re.finditer(r"\w+", text)
            if text[: word.start()] in before and text[word.end() :] in after
        }
        return frozenset(found.difference(self._template.literals))


def _has_tags(message: Mapping[str, Any], name: str) -> bool:
    return name == "content" and message["role"] in _SPEAKERS


def _texts_of(value: Any) -> Iterator[str]:
    """Yield all texts but valid roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from _texts_of(name)
            if name != "role" or each not in ROLES:
                yield from _texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_of(each)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(each, change) for name, each in value.items()}
    return [_mapped(each, change) for each in value] if isinstance(value, list | tuple) else value


class PlainText:
    """Encodes texts within a prompt without control tokens. Any thread may call."""

    def __init__(self, codec: TextCodec, control: Collection[int]) -> None:
        """control: unrecognized tokens besides special ones and those of the form <|name|>."""
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
        """Encode a text that follows another one, without a leading space."""
        if not self._puts_spaces:
            return self.tokens(text)
        sign = self.tokens(_SIGN)
        ids = self.tokens(_SIGN + text)
        return ids[len(sign) :] if ids[: len(sign)] == sign else self.tokens(text)

    @cached_property
    def _puts_spaces(self) -> bool:
        first = self.tokens("a")[:1]
        return bool(first) and self._codec.token_text(first[0]).startswith("\u2581")
