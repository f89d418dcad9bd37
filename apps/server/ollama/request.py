"""The requests of Ollama's API, read as those of conversations."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from edge_spec.apps.server import other_servers as others
from edge_spec.apps.server.field_names import OtherNames, refusal
from edge_spec.apps.server.messages import Message
from edge_spec.apps.server.refusals import converted
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest


class OllamaChatRequest(ChatRequest):
    """No messages: the model is to be opened."""

    other_names = OtherNames(
        also=others.ANSWER_ALSO,
        harmless=others.OLLAMA_HARMLESS,
        off=others.CHAT_OFF,
    )
    has_origins = False
    stream: bool | None = True
    messages: list[Message] = Field(default_factory=list)
    n: Literal[1] | None = None

    def continued(self) -> CompletionRequest | None:
        """Returns what asks for a continuation, if it does. Raises ApiError."""
        return None

    @model_validator(mode="before")
    @classmethod
    def _speaks_plainly(cls, given: Any) -> Any:
        return _plain(given)


class OllamaGenerateRequest(OllamaChatRequest):
    """No prompt: likewise. raw: it is continued without a template. suffix: a text between both."""

    prompt: str = ""
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _asks_as_a_user(self) -> OllamaGenerateRequest:
        if self.messages:
            raise refusal("messages", "belongs to POST /api/chat: send prompt")
        if self.system and (self.raw or self.suffix):
            raise refusal("system", "is of the chat template, which raw and suffix go without")
        if self.prompt:
            system = [Message(role="system", content=self.system)] if self.system else []
            self.messages = [*system, Message(role="user", content=self.prompt)]
        return self

    def continued(self) -> CompletionRequest | None:
        if not (self.suffix or (self.raw and self.prompt)):
            return None
        asked = self.given(ChatRequest)  # what only a template reads is refused by its name
        for name in ("messages", "top_logprobs"):
            asked.pop(name, None)
        own = {"prompt": self.prompt, "suffix": self.suffix, "logprobs": self.num_logprobs}
        return converted(CompletionRequest, {**asked, **own})


def _plain(given: Any) -> Any:
    """Returns a request with the words for what Ollama says otherwise."""
    if not isinstance(given, dict):
        return given
    told = {name: value for name, value in given.items() if name not in ("options", "format")}
    options = given.get("options") or {}
    if not isinstance(options, dict):
        raise refusal("options", "should be an object")
    format = given.get("format")
    if isinstance(format, dict):
        told["response_format"] = {"type": "json_schema", "schema": format}
    elif format == "json":
        told["response_format"] = {"type": "json_object"}
    elif format:
        raise refusal("format", "is no form that is known here: send json or a JSON Schema")
    if isinstance(told.get("think"), str):
        told["reasoning_effort"] = told.pop("think")
    return {**options, **told}
