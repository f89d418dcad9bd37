"""Joins a model's tokenizer, chat template and end tokens: what stands between text and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Unpack

from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import EdgeSpecError, UsageError
from edge_spec.text.chat_template import ChatTemplate, PromptOptions
from edge_spec.text.control_tokens import ControlTokens, literals_of
from edge_spec.text.fitting import fitted, with_arguments
from edge_spec.text.plain_messages import Message, Tools, plain_messages
from edge_spec.text.template_traits import TemplateTraits, ToolForm

_LAST = "probe-last"
_PROBE: Sequence[Message] = (
    {"role": "user", "content": "probe-user"},
    {"role": "assistant", "content": "probe-assistant"},
    {"role": "user", "content": _LAST},
)


@dataclass(frozen=True)
class ChatFormat:
    """Turns text and messages into one model's tokens, and its tokens into text."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling: RecommendedSampling = NOTHING_STATED
    parse_special: bool = False  # whether control tokens are read in messages, too

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """The tokens that ask for the assistant's next message; a string is one of the user.

        Messages and tools are fitted to the template (`fitted`). Control tokens are the template's
        alone, unless `parse_special`: what is given stays text. options: `PromptOptions`. Raises
        UsageError for malformed messages and options, UnsupportedModelError for messages that the
        template refuses all the same.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.parse_special:
            return self.tokenizer.encode(self.rendered(messages, tools, **options))
        plain = with_arguments(plain_messages(messages), self.traits)

        def render(messages: Sequence[Message], tools: Tools, options: PromptOptions) -> str:
            return self.rendered(messages, tools, **options)

        try:
            return self.control_tokens.encode(render, plain, tools, options)
        except RecursionError:
            raise _too_deep() from None

    def rendered(
        self, messages: Sequence[Message], tools: Tools = (), **options: Unpack[PromptOptions]
    ) -> str:
        """The text of these tokens. Raises as `chat_prompt` does."""
        template = self.template()
        plain = plain_messages(messages)
        try:
            messages, tools = fitted(plain, tools, self.traits)
        except RecursionError:
            raise _too_deep() from None
        return template.render(messages, tools, **options)

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

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Returns the names that the chat template reads. Raises as `template` does."""
        return self.template().variables()

    def prompt_of(self, text: str) -> list[int]:
        """The tokens that ask for an answer to `text`, or, where the model has no chat template,
        those of the text itself, to be continued."""
        return self.tokenizer.encode(text) if self.chat_template is None else self.chat_prompt(text)

    @cached_property
    def control_tokens(self) -> ControlTokens:
        """Raises UnsupportedModelError as `template` does."""
        template, source = self.template(), self.chat_template or ""

        def around() -> str:
            try:
                return template.render(_PROBE).partition(_LAST)[0]
            except EdgeSpecError:  # it takes other conversations
                return ""

        ends = {*self.eos_ids, *(() if self.bos_id is None else (self.bos_id,))}
        return ControlTokens(self.tokenizer, literals_of(source), ends, around)

    def template(self) -> ChatTemplate:
        """Raises UnsupportedModelError where there is none, or none that compiles."""
        return self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        names = [
            "" if token is None else self.tokenizer.token_text(token)
            for token in (self.bos_id, next(iter(self.eos_ids), None))
        ]
        return ChatTemplate(self.chat_template, *names)


def _too_deep() -> UsageError:
    return UsageError(
        "the messages or tools are nested too deeply", remedy="Give them fewer levels."
    )
