"""What stands between text and tokens for one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_spec.core.model import TextCodec
from edge_spec.core.recommended_sampling import NOTHING_STATED, RecommendedSampling
from edge_spec.text.chat_template import ChatTemplate, Message, Tools


@dataclass(frozen=True)
class ChatFormat:
    """What stands between text and tokens for one model."""

    tokenizer: TextCodec
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling: RecommendedSampling = NOTHING_STATED

    def chat_prompt(self, messages: str | Sequence[Message], tools: Tools = ()) -> list[int]:
        """The tokens that ask for the assistant's next message; a string is one of the user.

        Raises UsageError for malformed messages, and for tools where the template ignores them.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.tokenizer.encode(self.rendered(messages, tools))

    def rendered(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """The text of these tokens. Raises as `chat_prompt` does."""
        return self.template().render(messages, tools)

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
