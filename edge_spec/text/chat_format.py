"""Joins a model's tokenizer, chat template and end tokens: what stands between text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import UsageError
from edge_spec.text.chat_messages import fitted
from edge_spec.text.chat_template import ChatTemplate, Message, Tools, check_messages
from edge_spec.text.template_traits import TemplateTraits
from edge_spec.text.tool_form import ToolForm


@dataclass(frozen=True)
class ChatFormat:
    """Turns text and messages into one model's tokens, and its tokens into text."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling: RecommendedSampling = NOTHING_STATED

    def chat_prompt(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """The tokens that ask for the assistant's next message; a string is one of the user.

        Messages and tools are fitted to the template (`fitted`). Raises UsageError for malformed
        messages, UnsupportedModelError for those that the template refuses all the same.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.encode(self.rendered(messages, tools))

    def rendered(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of these tokens. Raises as `chat_prompt` does."""
        template = self.template()
        check_messages(messages)
        try:
            messages, tools = fitted(messages, tools, self.traits)
        except RecursionError:
            raise UsageError(
                "the messages or tools are nested too deeply", remedy="Give them fewer levels."
            ) from None
        return template.render(messages, tools)

    def tool_form(self) -> ToolForm:
        """Returns the form in which the model calls tools. Raises UnsupportedModelError as
        `template` does."""
        native = self.traits.native_tools
        return ToolForm() if native is None else native.form

    @property
    def knows_tools(self) -> bool:
        """Says whether the chat template does. Raises UnsupportedModelError as `template` does."""
        return self.traits.native_tools is not None

    @cached_property
    def traits(self) -> TemplateTraits:
        """Returns what the chat template takes. Raises as `template` does."""
        return TemplateTraits(self.template().render)

    def prompt_of(self, text: str) -> list[int]:
        """The tokens that ask for an answer to `text`, or, where the model has no chat template,
        those of the text itself, to be continued."""
        return self.tokenizer.encode(text) if self.chat_template is None else self.chat_prompt(text)

    def template(self) -> ChatTemplate:
        """Raises UnsupportedModelError where there is none, or none that compiles."""
        names = [
            "" if token is None else self.tokenizer.token_text(token)
            for token in (self.bos_id, next(iter(self.eos_ids), None))
        ]
        return ChatTemplate(self.chat_template, *names)
