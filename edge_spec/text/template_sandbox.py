"""Runs a chat template in jinja2's sandbox, with a budget of time and memory.

The sandbox keeps a template from what it must not touch, but not from running for ever or filling
the memory: a loop of loops, `'x' * 10**10`, a list of twice itself until its text has no end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edge_spec.text.template_budget import LimitError, TemplateBudget, TemplateLimits
from edge_spec.text.template_checks import (
    COMPARED,
    COPIED,
    FILTERS,
    JOINED,
    MADE,
    NAMING,
    OPERATORS,
    STEP,
    Bounding,
    Generator,
    check_fields,
    check_join,
    check_replace,
    check_search,
    check_width,
    num_parts,
)

MAX_SOURCE_CHARACTERS = 100_000  # the longest published ones have about 20,000
_SHORT = 100  # characters, of a text that takes no time to compare

# No chat template needs these, and they make much of little.
_NO_FILTERS = (
    *("batch", "center", "filesizeformat", "pprint", "slice", "striptags", "urlize"),
    *("wordwrap", "xmlattr"),
)
# What these return is small, or was there before.
_UNCOUNTED = frozenset({"abs", "attr", "count", "d", "default", "first", "last", "length"})
_COMPARING = (
    *("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="),
    *("gt", ">", "greaterthan", "ge", ">=", "lower", "upper"),
)
_NO_TEXT_METHODS = frozenset({"encode", "expandtabs", "maketrans", "translate"})
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_FROM_THE_RIGHT = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
_STRIPPING = frozenset({"lstrip", "rstrip", "strip"})
_SHORTENING = _STRIPPING | {"endswith", "removeprefix", "removesuffix", "split", "startswith"}


class AnswerMarks(Extension):
    """Passes over the tags that tell a trainer which text the assistant wrote: what is between
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
    """An environment whose templates raise LimitError where their Budget ends."""

    intercepted_binops = frozenset(OPERATORS)
    code_generator_class = Generator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", AnswerMarks],
            finalize=lambda value: value if type(value) is str else self._budget.text(value),
            undefined=UndefinedValue,
            optimized=False,  # it would compute before there is a budget
        )
        self._running = threading.local()  # its budget: of the run in this thread
        self.concat = self._joined  # type: ignore[method-assign]
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = self._json
        for name in self.filters.keys() - _UNCOUNTED:
            self.filters[name] = self._bounded(name, self.filters[name])
        tests: dict[str, Any] = self.tests
        for name in _COMPARING:
            tests[name] = self._counted(tests[name])
        self.tests[STEP] = self._step
        self.filters[JOINED] = self._joined
        self.filters[MADE] = lambda value: self._budget.made(value)
        self.filters[COPIED] = lambda value: self._budget.copied(value)
        self.filters[COMPARED] = self._compared

    def compiled(self, source: str) -> Template:
        """Raises LimitError for a source that is too long, and whatever jinja2 and Python's
        compiler raise for one that is none."""
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise LimitError(f"has more than {MAX_SOURCE_CHARACTERS:,} characters")
        code = self.compile(Bounding().visit(self.parse(source)))
        return Template.from_code(self, code, self.make_globals(None))

    def render(
        self, template: Template, limits: TemplateLimits, variables: Mapping[str, Any]
    ) -> str:
        """The text. Raises LimitError, and whatever the template does."""
        self._running.budget = budget = TemplateBudget(limits)
        try:
            parts, size = [], 0
            for part in template.generate(variables):
                size += len(part)
                budget.require(size)
                parts.append(part)
            return "".join(parts)
        finally:
            del self._running.budget

    @property
    def _budget(self) -> TemplateBudget:
        budget: TemplateBudget = self._running.budget
        return budget

    def _step(self, value: object) -> bool:
        self._running.budget.step()
        return True

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        budget = __self._budget
        budget.step()
        for value in args:  # a method may hash it, and a macro's `varargs` nest it once more
            if isinstance(value, tuple):
                budget.weight(value)
        if isinstance(__obj, BuiltinMethodType | MethodType):
            # jinja2 adds these for functions that take its context.
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            if type(__obj.__self__) is str and __obj.__name__ in _SHORTENING:
                if args and __obj.__name__ in _STRIPPING:
                    check_search(budget, __obj.__self__, *args)
                return budget.copied(__obj(*args, **kwargs))
            args = __self._checked(__obj, args, kwargs)
        return budget.made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self._budget
        OPERATORS[operator](budget, left, right)
        return budget.made(self.binop_table[operator](left, right))

    def _compared(self, value: Any) -> Any:
        is_short = type(value) is str and len(value) < _SHORT
        return value if is_short else self._running.budget.read(value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        format = wrapped

        def bounded(*args: Any, **kwargs: Any) -> str:
            check_fields(self._budget, value.__self__, *args, **kwargs)
            return format(*args, **kwargs)

        return update_wrapper(bounded, value)

    def _json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Writes JSON as models were trained with it: transformers' own, which escapes nothing for
        HTML."""
        check_width(indent)
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if indent is None:
            return encoder.encode(value)
        return self._joined(self._read(encoder.iterencode(value)))

    def _joined(self, parts: Iterable[str]) -> str:
        """Joins what a block or a macro has written, or the operands of `~`."""
        budget = self._budget
        parts = [budget.text(part) for part in parts]
        budget.require(sum(map(len, parts)))
        joined: str = budget.made("".join(parts))
        return joined

    def _checked(
        self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """The arguments of a method of one of Python's own types; an iterator is read."""
        owner, name = method.__self__, method.__name__
        if isinstance(owner, int) or (isinstance(owner, str) and name in _NO_TEXT_METHODS):
            raise SecurityError(f"{type(owner).__name__}.{name} is not for templates")
        if not isinstance(owner, str):
            self._budget.read(owner)
            return args
        if name in _PADDING:
            check_width(*args, *kwargs.values())
        elif name in _FROM_THE_RIGHT:
            check_search(self._budget, owner, *args, *kwargs.values())
        elif name == "join" and args:
            args = (self._read(args[0]), *args[1:])
            check_join(self._budget, args[0], owner)
        elif name == "replace":
            check_replace(self._budget, owner, *args, **kwargs)
        return args

    def _read(self, items: Any) -> Any:
        """An iterator's items as a list, each counted."""
        if isinstance(items, str | Undefined | Sequence | Mapping):
            return items
        budget = self._budget
        read: list[Any] = []
        size = 0
        for item in items:
            size += budget.weight(item)
            budget.require(size)
            budget.step()
            read.append(item)
        return read

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter with its arguments looked at before and its result after."""
        passes = hasattr(function, "jinja_pass_arg")
        check = FILTERS.get(name)
        names = name in NAMING

        def bounded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            first, own = (args[:1], args[1:]) if passes else ((), args)
            times = num_parts(*own[1:], *kwargs.values()) if names else 1
            if name == "join":
                own = (self._read(own[0]), *own[1:])
            elif type(own[0]) is not str and isinstance(own[0], Iterator):
                own = (budget.reading(own[0], times), *own[1:])
            if check is not None:
                check(budget, *own, **kwargs)
            budget.take(own[0], times)
            return budget.made(function(*first, *own, **kwargs))

        return update_wrapper(bounded, function)

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self._running.budget.step()
            for value in args:
                self._compared(value)
            return function(*args)

        return counted
