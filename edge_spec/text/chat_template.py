"""Run models' chat templates (Jinja programs) in jinja2's immutable sandbox.

The sandbox limits access, not time, so a template is interrupted between two Python bytecodes after
`_SECONDS`. Products and powers that would make one step long, such as `'x' * 10**10`, are refused.
Memory is only limited by what can be filled in that time.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, TypedDict, TypeVar, Unpack

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_spec.core.model_info import SpecialTokens
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.parts.answer_form import Reasoning
from edge_spec.text.plain_messages import THOUGHTS, Message, Tools, plain_messages

_MAX_SOURCE_CHARACTERS = 100_000  # the longest published ones have about 20,000
_MAX_CHARACTERS = 10_000_000  # in a product
_MAX_BITS = 4096  # in an integer
_Result = TypeVar("_Result")


class LimitError(BaseException):
    """A template exceeded a limit; the text completes "the chat template ...". Not an Exception, so
    that nothing in the running template catches it."""


class AnswerMarks(Extension):
    """Render the content of `generation` tags, which mark the assistant's text for trainers."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class UndefinedValue(Undefined):
    """An undefined variable. Adding a missing special token adds nothing, where transformers
    refuses."""

    def _added(self, other: Any) -> Any:
        is_token = (self._undefined_name or "").endswith("_token")
        return other if is_token and isinstance(other, str) else self._fail_with_undefined_error()

    __add__ = __radd__ = _added


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Gives templates what transformers gives them."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", AnswerMarks],
            undefined=UndefinedValue,
        )
        self.filters["tojson"] = _write_json

    def compile_within(self, seconds: float, source: str) -> Template:
        """Raises LimitError, and what jinja2 and Python's compiler raise."""
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise LimitError(f"has more than {_MAX_SOURCE_CHARACTERS:,} characters")
        return _run_within(seconds, lambda: self.from_string(source))

    def render_within(self, seconds: float, template: Template, given: Mapping[str, Any]) -> str:
        """Raises LimitError, and what the template raises."""
        return _run_within(seconds, lambda: template.render(given))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            if (bits * abs(right) if operator == "**" else bits + right.bit_length()) > _MAX_BITS:
                raise LimitError(f"computes with numbers of more than {_MAX_BITS:,} bits")
        elif _is_long(left, right) or _is_long(right, left):
            raise LimitError(f"makes a value of more than {_MAX_CHARACTERS:,} characters")
        return super().call_binop(context, operator, left, right)


def _write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does, without HTML escapes: models were trained on it."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _is_long(value: Any, times: Any) -> bool:
    is_repeated = isinstance(value, str | bytes | list | tuple) and isinstance(times, int)
    return is_repeated and len(value) * times > _MAX_CHARACTERS


class _Interruption(BaseException):
    """Raised in one thread by another."""


def _run_within(seconds: float, run: Callable[[], _Result]) -> _Result:
    """Raises LimitError at the next bytecode after the time."""
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_Interruption)
                )

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        timer.start()
        try:
            return run()
        finally:
            # An interruption that is already pending is raised in `cancel` at the latest. Do not
            # clear it: CPython 3.11 would then check for one at every bytecode, and debuggers and
            # profilers would hang.
            with lock:
                is_over = True
            timer.cancel()
    except _Interruption:
        raise LimitError(f"ran for more than {seconds:.0f} s") from None


# Wall-clock time for one run; published templates take milliseconds.
_SECONDS = 10.0
_SHOWN = 500  # characters of a template's own error
_MAX_PATTERN_CHARACTERS = 100
# Marks the end of the message to continue. A template that strips this trailing space would also
# strip the message's own.
_MARK = "edge-spec-goes-on-from-here "
_PROBE = "probe-content"
_TAKEN = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


class PromptOptions(TypedDict, total=False):
    """Options of a prompt, as in transformers' `apply_chat_template`."""

    # Further template variables by name, such as "enable_thinking".
    template_kwargs: Mapping[str, Any] | None
    # Whether the prompt opens the assistant's message. None: yes, unless a message is continued.
    add_generation_prompt: bool | None
    # Whether the prompt ends with the last message's content. A string names another field to
    # continue, such as "reasoning_content".
    continue_final_message: bool | str
    # Whether the model thinks before it answers: "auto" (as its template does), "off", or the
    # maximum number of tokens of a thought.
    reasoning: Reasoning | None


class ChatTemplate:
    """Raises UnsupportedModelError if the template does not compile or run."""

    def __init__(
        self,
        source: str | None,
        bos_token: str = "",
        eos_token: str = "",
        special_tokens: SpecialTokens = MappingProxyType({}),
    ) -> None:
        """special_tokens: by name, such as pad_token; they override the others. Empty ones are
        dropped."""
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
        except (Exception, LimitError) as error:  # from jinja2 or Python's compiler
            raise UnsupportedModelError(
                f"the model's chat template does not compile: {_cut(error)}",
                remedy="Use `generate --raw`, or a model with a valid template.",
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads without setting them."""
        from jinja2.meta import find_undeclared_variables

        return frozenset(find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """The literal texts inside and outside of expressions."""
        tree = self._environment.parse(self.source)
        constants = [each.value for each in tree.find_all(nodes.Const)]
        data = [each.data for each in tree.find_all(nodes.TemplateData)]
        return tuple(text for text in [*constants, *data] if isinstance(text, str))

    def render(
        self, messages: Sequence[Message], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> str:
        """Return the prompt for the assistant's next message, or for the rest of the last one.

        Raises UsageError for malformed or too deeply nested input, and for a last message that
        cannot be continued. Tools that the template does not mention are dropped.
        """
        plain = plain_messages(messages)
        variables = _variables(options)
        field = options.get("continue_final_message")
        if not field:
            return self._rendered(plain, tools, variables)
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
        prompt, mark, rest = self._rendered(plain, tools, variables).rpartition(_MARK.strip())
        if not mark or text.strip() not in prompt:
            raise UsageError(
                "the chat template does not show the last message as it is, so that it cannot be "
                "continued",
                remedy="Leave continue_final_message out.",
            )
        return prompt if rest.startswith(_MARK[-1]) else prompt.rstrip()

    def _rendered(
        self, messages: Sequence[Message], tools: Tools, variables: Mapping[str, Any]
    ) -> str:
        given = {"tools": list(tools) or None, **variables}
        try:
            if self.reads_parts:
                messages = [_in_parts(message) for message in messages]
            return self._run({"messages": messages, **given})
        except LimitError as error:
            raise UnsupportedModelError(
                f"the chat template {error}",
                remedy="Use `generate --raw`, or a model with another template.",
            ) from None
        except Exception as error:  # a template is a program and may fail in any way
            raise UnsupportedModelError(
                f"the model's chat template refuses these messages: {_cut(error)}",
                remedy="Check the order of roles, or use `generate --raw`.",
            ) from error

    def _run(self, given: Mapping[str, Any]) -> str:
        return self._environment.render_within(_SECONDS, self._template, given)

    @cached_property
    def reads_parts(self) -> bool:
        """Whether content must be a list of parts, as in templates of vision models."""
        message = {"role": "user", "content": _PROBE}
        return not self._shows(message) and self._shows(_in_parts(message))

    def _shows(self, message: Message) -> bool:
        given = {"messages": [message], "tools": None, **_variables({})}
        try:
            return _PROBE in self._run(given)
        except Exception:
            return False


def _in_parts(message: Message) -> Message:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def template_kwargs(options: PromptOptions) -> Mapping[str, Any]:
    """Return the caller's own variables. Raises UsageError for what is no mapping of names."""
    own = options.get("template_kwargs") or {}
    if not isinstance(own, Mapping) or not all(isinstance(name, str) for name in own):
        raise UsageError(
            f"template_kwargs is a {type(own).__name__}",
            remedy='It is a mapping of names to values: {"enable_thinking": false}.',
        )
    return own


def _variables(options: PromptOptions) -> dict[str, Any]:
    own = template_kwargs(options)
    if taken := sorted(own.keys() & _TAKEN):
        raise UsageError(
            f"template_kwargs has {taken[0]}", remedy=f"Give {taken[0]} beside template_kwargs."
        )
    asked = options.get("add_generation_prompt")
    if asked is None:
        asked = not options.get("continue_final_message")
    return {"documents": None, **own, "add_generation_prompt": asked}


def _cut(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _now(pattern: str) -> str:
    if len(pattern) > _MAX_PATTERN_CHARACTERS:
        raise ValueError("a date of too many parts")
    return datetime.now().strftime(pattern)


def _refuse(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)
