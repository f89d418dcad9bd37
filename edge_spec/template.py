"""Chat templates: Jinja programs that come with a model, so they run in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from edge_spec.errors import UnsupportedModelError, UsageError

Message = Mapping[str, str]  # "role" and "content"
ROLES = ("system", "user", "assistant", "tool")


class ChatTemplate:
    """Raises UnsupportedModelError for a template that does not compile or run."""

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if source is None:
            raise UnsupportedModelError(
                "this model has no chat template",
                remedy="Use a chat model, or `generate --raw` for plain continuation.",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        environment.globals |= {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UnsupportedModelError(
                f"the model's chat template does not compile: {error}",
                remedy="Use `generate --raw`, or a model with a valid template.",
            ) from error

    def render(self, messages: Sequence[Message]) -> str:
        """The prompt that asks for the assistant's next message."""
        for message in messages:
            if not isinstance(message, Mapping):
                raise UsageError(
                    f"a message is a {type(message).__name__}",
                    remedy='A message is a mapping: {"role": "user", "content": "..."}.',
                )
            role, content = message.get("role"), message.get("content")
            if role not in ROLES or not isinstance(content, str):
                raise UsageError(
                    f"a message has the role {role!r} and content of {type(content).__name__}",
                    remedy=f"Roles are {', '.join(ROLES)}; content is text.",
                )
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=True)
        except Exception as error:  # it is a program, and may fail in any way
            raise UnsupportedModelError(
                f"the model's chat template refuses these messages: {error}",
                remedy="Check the order of roles, or use `generate --raw`.",
            ) from error


def _refuse(reason: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(reason)
