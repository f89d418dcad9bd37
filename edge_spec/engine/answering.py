"""Ways to ask an engine for an answer, and what it tells of its model."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from edge_spec.core.sampling import SamplingParams
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.generation import Generation
from edge_spec.engine.request import AnswerOptions, ChatOptions, context_length_of
from edge_spec.engine.results import GenerationResult
from edge_spec.text.chat_template import PromptOptions
from edge_spec.text.infill import InfillPrompt, room_beside
from edge_spec.text.parts.answer_form import Reasoning
from edge_spec.text.plain_messages import Message, Tools

_log = logging.getLogger(__name__)


class Answering(ABC):
    """Answers prompts with one model: messages of a conversation, a text, or tokens."""

    parts: EngineComponents

    @abstractmethod
    def _start(self, prompt: Sequence[int], **options: Unpack[AnswerOptions]) -> Generation:
        """Begins an answer."""

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Generation: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        stream: bool = False,
        tools: Tools = (),
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        reasoning: Reasoning | None = None,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """Returns the assistant's next message; a string is one message of the user. With `stream`,
        returns what is iterated for it piece by piece.

        options: `ChatOptions`; tools that the chat template does not know are described in a
        message of the system. template_kwargs: what else the template is given.
        continue_final_message: the answer goes on with the last message. reasoning: "auto", the
        model thinks before it answers if it does so by itself; "off", it does not; a number, it
        does, for so many tokens at most. Raises UsageError for malformed messages, tools or
        options, ContextFullError if the messages do not fit.
        """
        asked: PromptOptions = {
            "template_kwargs": template_kwargs,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "reasoning": reasoning,
        }
        prompt = self.chat_prompt(messages, tools, **asked)
        if "form" not in options:
            options["form"] = self.parts.text.answer_form(prompt, tools, **asked)
        generation = self._start(prompt, **options)
        return generation if stream else generation.finish()

    def stream(
        self, messages: str | Sequence[Message], **options: Unpack[ChatOptions]
    ) -> Generation:
        """Answers as `chat` does, piece by piece: iterate for `Chunk`s."""
        return self.chat(messages, stream=True, **options)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> Generation: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """Continues a text, or token ids, without a chat template.

        options: `AnswerOptions`. Raises UsageError for an empty prompt or malformed options,
        ContextFullError if the prompt does not fit.
        """
        if hasattr(prompt, "tolist"):  # an array's
            prompt = prompt.tolist()
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        generation = self._start(ids, **options)
        return generation if stream else generation.finish()

    @overload
    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        files: Mapping[str, str] | None = None,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult: ...

    @overload
    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        files: Mapping[str, str] | None = None,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> Generation: ...

    def infill(
        self,
        prefix: str,
        suffix: str,
        *,
        files: Mapping[str, str] | None = None,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerationResult | Generation:
        """Writes what stands between two texts, such as those around a cursor.

        files: texts of other files by their names, the most important last. What does not fit the
        context is left out: of the files first, then the prefix from its beginning and the suffix
        from its end. options: `AnswerOptions`. Raises UnsupportedModelError for a model that was
        not trained for it.
        """
        others = tuple((files or {}).items())
        prompt = self.infill_prompt(prefix, suffix, others, max_tokens=options.get("max_tokens"))
        generation = self._start(prompt, **options)
        return generation if stream else generation.finish()

    def infill_prompt(
        self,
        prefix: str,
        suffix: str,
        files: Sequence[tuple[str, str]] = (),
        *,
        max_tokens: int | None = None,
        names_file: bool = False,
        suffix_first: bool | None = None,
    ) -> InfillPrompt:
        """Returns the tokens that ask for what stands between two texts, as `Infill.prompt`.
        max_tokens: of the answer, for which room is left."""
        room = room_beside(self.context_length, max_tokens)
        return self.parts.text.infill.prompt(
            prefix, suffix, files, room=room, names_file=names_file, suffix_first=suffix_first
        )

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.parts.name

    @property
    def runtime(self) -> str:
        """The name of the runtime that the model runs on."""
        return self.parts.runtime

    @property
    def context_length(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return context_length_of(self.parts)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text, without a chat template."""
        return self.parts.text.tokenizer.encode(text)

    def chat_prompt(
        self,
        messages: str | Sequence[Message],
        tools: Tools = (),
        **options: Unpack[PromptOptions],
    ) -> list[int]:
        """Returns the tokens that ask for the assistant's next message, or for the rest of the last
        one. options: `PromptOptions`."""
        return self.parts.text.chat_prompt(messages, tools, **options)

    def chat_sampling(self, **asked: float | None) -> SamplingParams:
        """Returns how the model's makers mean answers in a conversation to be drawn, else
        temperature 0.7, top-p 0.95 and min-p 0.05; what is asked for, by the names of
        SamplingParams, goes before each.

        `chat` is greedy all the same unless it is given this. Raises UsageError for a value out of
        its range.
        """
        recommended = self.parts.text.sampling
        if recommended.ignored:
            unused = ", ".join(recommended.ignored)
            _log.warning("%s: of its makers' sampling this is not used: %s", self.name, unused)
        return recommended.with_asked(asked)
