"""Chat templates: Jinja programs that come with a model, so they run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, TypedDict, Unpack

from edge_spec.core.model_info import SpecialTokens
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.plain_messages import THOUGHTS, Message, Tools, plain_messages
from edge_spec.text.thoughts import Reasoning

# Of the wall clock, for one run of a template: published ones take milliseconds.
_SECONDS, _SECONDS_A_CHARACTER = 5.0, 2e-5
_SHOWN = 500  # characters of a template's own error
_MAX_PATTERN_CHARACTERS = 100
# Ends the text of a message that is continued. A template that strips it of its last space would
# strip the text of its own.
_MARK = "edge-spec-goes-on-from-here "
_PROBE = "probe-content"
_TAKEN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class PromptOptions(TypedDict, total=False):
    """Options of a prompt, as transformers' `apply_chat_template` has them."""

    # By name, such as "enable_thinking": what else the template is given.
    template_kwargs: Mapping[str, Any] | None
    # Whether the prompt ends where the assistant begins; None: unless a message is continued.
    add_generation_prompt: bool | None
    # Whether the prompt ends with the last message's content; a name: with that part of it, such as
    # "reasoning_content".
    continue_final_message: bool | str
    # Whether the model thinks before it answers: "auto", as its template has it, "off", or the
    # number of tokens after which a thought is ended.
    reasoning: Reasoning | None


class ChatTemplate:
    """Raises UnsupportedModelError for a template that does not compile or run."""

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: SpecialTokens = MappingProxyType({}),
    ) -> None:
        """special_tokens: by name, such as pad_token, which go before the others. One that is empty
        is not given to the template at all."""
        from edge_spec.text.template_sandbox import LimitError, TemplateSandbox

        if source is None:
            raise UnsupportedModelError(
                "this model has no chat template",
                remedy="Use a chat model, or `generate --raw` for plain continuation.",
            )
        self.source = source
        self._environment = environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        tokens = {"bos_token": bos_token, "eos_token": eos_token, **special_tokens}
        environment.globals |= {name: token for name, token in tokens.items() if token}
        try:
            self._template = environment.compile_within(_SECONDS, source)
        except (Exception, LimitError) as error:  # of jinja2 or Python's compiler
            raise UnsupportedModelError(
                f"the model's chat template does not compile: {_cut(error)}",
                remedy="Use `generate --raw`, or a model with a valid template.",
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Returns the names that the template reads and does not set."""
        from jinja2.meta import find_undeclared_variables

        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Returns the texts in the template, in its expressions and between them."""
        from jinja2 import nodes

        tree = self._environment.parse(self.source)
        constants = [each.value for each in tree.find_all(nodes.Const)]
        data = [each.data for each in tree.find_all(nodes.TemplateData)]
        return tuple(text for text in [*constants, *data] if isinstance(text, str))

    def render(
        self, messages: Sequence[Message], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> str:
        """Returns the prompt that asks for the assistant's next message, or for the rest of the
        last message.

        Raises UsageError for messages and options that are malformed or nested too deeply, for
        tools that the template does not mention, and for a last message that cannot be continued.
        """
        plain = plain_messages(messages)
        variables = _variables(options)
        field = options.get("continue_final_message")
        if not field:
            return self._told(plain, tools, variables)
        if variables["add_generation_prompt"]:
            raise UsageError(
                "continue_final_message and add_generation_prompt exclude each other",
                remedy="Set one of them to false.",
            )
        field = field if isinstance(field, str) else "content"
        text = plain[-1].get(field) if plain else None
        if not isinstance(text, str):
            raise UsageError(
                f"continue_final_message is set, and the last message has no {field}",
                remedy="Give the last message the text to go on with, or leave the option out.",
            )
        fields = [name for name in (field, *THOUGHTS) if name == field or field in THOUGHTS]
        marked = {name: text + _MARK for name in fields if plain[-1].get(name) == text}
        plain[-1] |= marked
        prompt, mark, rest = self._told(plain, tools, variables).rpartition(_MARK.strip())
        if not mark or text.strip() not in prompt:
            raise UsageError(
                "the chat template does not show the last message as it is, so that it cannot be "
                "continued",
                remedy="Leave continue_final_message out.",
            )
        return prompt if rest.startswith(_MARK[-1]) else prompt.rstrip()

    def _told(self, messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any]) -> str:
        """Renders, and raises UsageError for tools that the template does not mention."""
        prompt = self._rendered(messages, tools, variables)
        if tools:
            try:
                without = self._rendered(messages, (), variables)
            except UnsupportedModelError:  # it is made for tools alone
                return prompt
            if prompt == without:
                raise UsageError(
                    "this model's chat template knows no tools",
                    remedy="Use a model that was trained to call tools, or describe them in a "
                    "message.",
                )
        return prompt

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any]
    ) -> str:
        from edge_spec.text.template_sandbox import LimitError

        try:
            length = _num_characters((messages, tools, variables))
        except RecursionError:
            raise UsageError(
                "the messages or tools are nested too deeply", remedy="Give them fewer levels."
            ) from None
        given = {"tools": list(tools) or None, **self._older(tools), **variables}
        try:
            if self.reads_parts:
                messages = [_in_parts(message) for message in messages]
            return self._run({"messages": messages, **given}, length)
        except LimitError as error:
            raise UnsupportedModelError(
                f"the chat template {error}",
                remedy="Use `generate --raw`, or a model with another template.",
            ) from None
        except Exception as error:  # it is a program, and may fail in any way
            raise UnsupportedModelError(
                f"the model's chat template refuses these messages: {_cut(error)}",
                remedy="Check the order of roles, or use `generate --raw`.",
            ) from error

    def _run(self, given: Mapping[str, Any], length: int) -> str:
        seconds = _SECONDS + length * _SECONDS_A_CHARACTER
        return self._environment.render_within(seconds, self._template, given, length)

    def _older(self, tools: Tools) -> dict[str, str]:
        """Returns what templates read that are older than `tools`: what JSON has of them, and when
        it is."""
        values = {}
        if self._reads("functions"):
            values["functions"] = json.dumps(list(tools), indent=2) if tools else ""
        if self._reads("datetime"):
            values["datetime"] = _now("%b %d %Y %H:%M:%S")
        return values

    def _reads(self, name: str) -> bool:
        return name in self.source and name in self.variables

    @cached_property
    def reads_parts(self) -> bool:
        """Says whether a content has to be a list of parts, as in templates of models that see
        pictures: of a text, they show nothing."""
        message = {"role": "user", "content": _PROBE}
        return not self._shows(message) and self._shows(_in_parts(message))

    def _shows(self, message: Message) -> bool:
        given = {"messages": [message], "tools": None, **_variables({})}
        try:
            return _PROBE in self._run(given, len(_PROBE))
        except Exception:
            return False


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _variables(options: PromptOptions) -> dict[str, Any]:
    """Returns what a template is given beside messages and tools. Raises UsageError."""
    own = options.get("template_kwargs") or {}
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise UsageError(
            f"template_kwargs is a {type(own).__name__}",
            remedy='It is a mapping of names to values: {"enable_thinking": false}.',
        )
    if taken := sorted(own.keys() & _TAKEN):
        raise UsageError(
            f"template_kwargs has {taken[0]}", remedy=f"Give {taken[0]} beside template_kwargs."
        )
    asked = options.get("add_generation_prompt")
    if asked is None:
        asked = not options.get("continue_final_message")
    return {"documents": None, **own, "add_generation_prompt": asked}


def _num_characters(value: Any) -> int:
    """Counts the characters in messages or tools, with all that is nested in them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | Mapping):  # dict first: it is told fast
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0


def _cut(error: BaseException) -> str:
    """Its text may be the template's, of any length."""
    text = str(error)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ValueError("a date of too many parts")
    return datetime.now().strftime(pattern)


def _refuse(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)
