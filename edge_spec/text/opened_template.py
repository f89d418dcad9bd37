"""A chat template of one model, with what it takes and what only it may write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

from edge_spec.core.model_info import SpecialTokens
from edge_spec.core.text_codec import TextCodec
from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_template import ChatTemplate
from edge_spec.text.control_tokens import ControlTokens
from edge_spec.text.parts.answer_form import ThoughtForm
from edge_spec.text.parts.thought_forms import thought_form
from edge_spec.text.plain_messages import Message
from edge_spec.text.template_reading import TemplateReading
from edge_spec.text.template_traits import TemplateTraits

_LAST = "probe-last"
_PROBE: Sequence[Message] = (
    {"role": "user", "content": "probe-user"},
    {"role": "assistant", "content": "probe-assistant"},
    {"role": "user", "content": _LAST},
)


class OpenedTemplate:
    """Raises UnsupportedModelError where there is no template, or none that compiles."""

    def __init__(
        self,
        source: str | None,
        special_tokens: SpecialTokens,
        codec: TextCodec,
        ends: Collection[int],
    ) -> None:
        """ends: tokens that end or begin a text."""
        self.template = ChatTemplate(source, special_tokens=special_tokens)
        self.traits = TemplateTraits(self.template.render, codec.added_tokens)
        self._source = source or ""
        self._codec = codec
        self._ends = ends

    @cached_property
    def thought(self) -> ThoughtForm | None:
        """Returns how the model writes its thoughts; None where it has none."""

        def render(messages: Sequence[Message], add_generation_prompt: bool, **own: Any) -> str:
            return self.template.render(
                messages, add_generation_prompt=add_generation_prompt, template_kwargs=own
            )

        return thought_form(self._source, render, self._codec.added_tokens())

    @cached_property
    def control_tokens(self) -> ControlTokens:
        def around() -> str:
            try:
                return self.template.render(_PROBE).partition(_LAST)[0]
            except EdgeSpecError:  # it takes other conversations
                return ""

        return ControlTokens(self._codec, TemplateReading.of(self._source), self._ends, around)
