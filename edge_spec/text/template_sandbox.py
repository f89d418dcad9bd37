"""Runs a chat template in jinja2's immutable sandbox, for a limited time.

The sandbox keeps a template from what it must not touch, not from running for ever. It is ended
between two steps of Python. Products and powers that would make a single step long, such as
`'x' * 10**10`, are refused; beyond that, a template may use as much memory as it fills in its time.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jinja2 import Template, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_SOURCE_CHARACTERS = 100_000  # the longest published ones have about 20,000
_MAX_CHARACTERS = 10_000_000  # of a product or a prompt
_MAX_BITS = 4096  # of an integer
_Result = TypeVar("_Result")


class LimitError(BaseException):
    """Says what a template did too much of; the text completes "the chat template ...".

    No Exception, so that nothing within a template's run catches it.
    """


class AnswerMarks(Extension):
    """Ignores the tags that tell a trainer which text the assistant wrote: what is between
    `generation` and `endgeneration` is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 -- as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class UndefinedValue(Undefined):
    """What a template names that it was not given. A special token that the model does not have
    adds nothing to a text; transformers refuses to add it."""

    def _added(self, other: Any) -> Any:
        is_token = (self._undefined_name or "").endswith("_token")
        return other if is_token and isinstance(other, str) else self._fail_with_undefined_error()

    __add__ = __radd__ = _added


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles and renders with what transformers gives a template."""

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
        """Raises LimitError, and whatever jinja2 and Python's compiler raise."""
        if len(source) > _MAX_SOURCE_CHARACTERS:
            raise LimitError(f"has more than {_MAX_SOURCE_CHARACTERS:,} characters")
        return _run_within(seconds, lambda: self.from_string(source))

    def render_within(
        self, seconds: float, template: Template, given: Mapping[str, Any], num_characters: int
    ) -> str:
        """Raises LimitError, and whatever the template does. num_characters: of what is given,
        which a prompt may show several times."""
        limit = _MAX_CHARACTERS + 16 * num_characters

        def render() -> str:
            parts, size = [], 0
            for part in template.generate(given):
                size += len(part)
                if size > limit:
                    raise LimitError(f"writes more than {limit:,} characters")
                parts.append(part)
            return "".join(parts)

        return _run_within(seconds, render)

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
    """Writes JSON as models were trained with it: transformers' own, which escapes nothing for
    HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _is_long(value: Any, times: Any) -> bool:
    is_repeated = isinstance(value, str | bytes | list | tuple) and isinstance(times, int)
    return is_repeated and len(value) * times > _MAX_CHARACTERS


class _Interruption(BaseException):
    """Raised in a thread by another one."""


def _run_within(seconds: float, run: Callable[[], _Result]) -> _Result:
    """Returns what `run` returns. Raises LimitError in it when the time is over, at the next step
    of Python."""
    thread, lock, is_over = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not is_over:
                _interrupt(thread, _Interruption)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        timer.start()
        try:
            return run()
        finally:
            with lock:
                is_over = True
                _interrupt(thread, None)  # takes back what was not raised yet
            timer.cancel()
    except _Interruption:
        raise LimitError(f"ran for more than {seconds:.0f} s") from None


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
