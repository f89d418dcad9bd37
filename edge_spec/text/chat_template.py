"""Chat templates: Jinja programs that come with a model, so they run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from edge_spec.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from edge_spec.text.template_budget import TemplateLimits

# "role" and "content", which is text, or None where an assistant only calls tools; anything else,
# such as "tool_calls", goes to the template as it is.
Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]  # {"type": "function", "function": {...}}, as OpenAI has them
_SHOWN = 500  # characters of a template's own error
_MAX_PATTERN_CHARACTERS = 100
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """Raises UnsupportedModelError for a template that does not compile or run."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        from edge_spec.text.template_sandbox import TemplateSandbox

        if source is None:
            raise UnsupportedModelError(
                "this model has no chat template",
                remedy="Use a chat model, or `generate --raw` for plain continuation.",
            )
        self._environment = environment = TemplateSandbox()
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        environment.globals |= {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.compiled(source)
        except Exception as error:  # of jinja2, of Python's compiler, or RecursionError
            raise UnsupportedModelError(
                f"the model's chat template does not compile: {_cut(error)}",
                remedy="Use `generate --raw`, or a model with a valid template.",
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        limits: TemplateLimits | None = None,
    ) -> str:
        """Returns the prompt that asks for the assistant's next message.

        limits: of time and memory; None: what fits the length of the messages and tools. Raises
        UsageError for messages that are malformed or nested too deeply, and for tools that the
        template does not mention.
        """
        check_messages(messages)
        prompt = self._rendered(messages, tools, limits)
        if tools and prompt == self._rendered(messages, (), limits):
            raise UsageError(
                "this model's chat template knows no tools",
                remedy="Use a model that was trained to call tools, or describe them in a message.",
            )
        return prompt

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, limits: TemplateLimits | None
    ) -> str:
        from edge_spec.text.template_budget import LimitError, TemplateLimits

        named = {"tools": list(tools)} if tools else {}
        try:
            usual = TemplateLimits.of(_num_characters((messages, tools)))
        except RecursionError:
            raise UsageError(
                "the messages or tools are nested too deeply", remedy="Give them fewer levels."
            ) from None
        try:
            return self._environment.render(
                self._template,
                limits or usual,
                messages=list(messages),
                add_generation_prompt=True,
                **named,
            )
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


def _num_characters(value: Any) -> int:
    """Counts the characters in messages or tools, with all that is nested in them."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict | Mapping):  # dict first: it is told fast
        return sum(map(_num_characters, value.values()))
    return sum(map(_num_characters, value)) if isinstance(value, list | tuple) else 0


def _cut(error: Exception) -> str:
    """Its text may be the template's, of any length."""
    text = str(error)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ValueError("a date of too many parts")
    return datetime.now().strftime(pattern)


def check_messages(messages: Sequence[Message]) -> None:
    """Raises UsageError for one that is malformed."""
    for message in messages:
        _check(message)


def _check(message: Message) -> None:
    if not isinstance(message, Mapping):
        raise UsageError(
            f"a message is a {type(message).__name__}",
            remedy='A message is a mapping: {"role": "user", "content": "..."}.',
        )
    role, content = message.get("role"), message.get("content")
    calls_only = content is None and role == "assistant" and message.get("tool_calls")
    if role not in ROLES or not (isinstance(content, str) or calls_only):
        raise UsageError(
            f"a message has the role {role!r} and content of {type(content).__name__}",
            remedy=f"Roles are {', '.join(ROLES)}; content is text.",
        )


def _refuse(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)
