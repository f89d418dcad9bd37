"""The composition root: text in, stream of text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Literal, overload

from edge_spec import plugins
from edge_spec.control.numerics import Numerics
from edge_spec.control.policy import Policy
from edge_spec.decoder import Decoder, Limits
from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import ContextFullError, UsageError
from edge_spec.generation import Conversation, Generation, Request
from edge_spec.metrics import PlainRate
from edge_spec.model import Model
from edge_spec.results import GenerationResult
from edge_spec.sampling import Sampler, SamplingParams
from edge_spec.template import ChatTemplate, Message
from edge_spec.tokenizer import Tokenizer

GREEDY = SamplingParams()


@dataclass(frozen=True)
class TextFormat:
    """What stands between text and tokens for one model."""

    tokenizer: Tokenizer
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None


@dataclass(frozen=True)
class Parts:
    """What an engine is composed of; `edge_spec.load` does it."""

    name: str
    runtime: str
    model: Model
    text: TextFormat
    drafters: Sequence[Drafter]
    policy: Policy
    numerics: Numerics
    min_rows: int = 1  # of a pass; more in exact mode


class Engine:
    """One model with its drafters and one KV cache. Use it from one thread at a time.

    Prompts that begin like the text before them reuse its part of the cache, so a conversation
    is continued by passing all of its messages. Starting a generation ends the one before it.
    """

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.last: GenerationResult | None = None
        self._session = parts.model.open_session()
        self._conversation = Conversation(
            Decoder(self._session, parts.drafters, parts.policy), PlainRate()
        )
        self._running: Generation | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the cache and the model."""
        self._end_running()
        self._session.close()
        self.parts.model.close()

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: Literal[False] = False,
    ) -> GenerationResult: ...

    @overload
    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: Literal[True],
    ) -> Generation: ...

    def chat(
        self,
        messages: str | Sequence[Message],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: bool = False,
    ) -> GenerationResult | Generation:
        """The assistant's next message; a string is one message of the user.

        Raises UsageError for malformed messages, ContextFullError if they do not fit.
        """
        prompt = self.chat_prompt(messages)
        generation = self._start(prompt, max_tokens, stop, sampling)
        return generation if stream else generation.finish()

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: Literal[False] = False,
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: Literal[True],
    ) -> Generation: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        sampling: SamplingParams = GREEDY,
        stream: bool = False,
    ) -> GenerationResult | Generation:
        """The continuation of a text, or of token ids, without a chat template."""
        ids = self.parts.text.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        generation = self._start(ids, max_tokens, stop, sampling)
        return generation if stream else generation.finish()

    def set_drafter(self, names: str) -> None:
        """From the next answer on: "auto", "none", or drafters' names joined by commas.

        Raises UsageError for a name that is not installed, and then changes nothing.
        """
        drafters = plugins.load_drafters(names)
        self._end_running()
        conversation = self._conversation
        conversation.decoder = replace(conversation.decoder, drafters=drafters)

    def chat_prompt(self, messages: str | Sequence[Message]) -> list[int]:
        """The tokens that ask for the assistant's next message."""
        text = self.parts.text
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        names = [
            "" if token is None else text.tokenizer.token_text(token)
            for token in (text.bos_id, next(iter(text.eos_ids), None))
        ]
        return text.tokenizer.encode(ChatTemplate(text.chat_template, *names).render(messages))

    def _start(
        self,
        prompt: Sequence[int],
        max_tokens: int | None,
        stop: str | Sequence[str],
        sampling: SamplingParams,
    ) -> Generation:
        model = self.parts.model
        context_length = model.config.context_length
        vocab_size = model.config.vocab_size
        if max_tokens is not None and max_tokens < 1:
            raise UsageError(f"max_tokens is {max_tokens}", remedy="It has to be 1 or more.")
        if not prompt:
            raise UsageError("the prompt is empty", remedy="Give it at least one token.")
        if not all(0 <= token < vocab_size for token in prompt):
            raise UsageError(
                "the prompt has a token outside the vocabulary",
                remedy=f"Tokens are 0 to {vocab_size - 1}.",
            )
        if not all(0 <= token < vocab_size for token in sampling.logit_bias):
            raise UsageError(
                "logit_bias has a token outside the vocabulary",
                remedy=f"Tokens are 0 to {vocab_size - 1}.",
            )
        longest = context_length - self.parts.min_rows + 1
        if len(prompt) > longest:
            raise ContextFullError(
                f"the prompt has {len(prompt)} tokens, the context holds {longest}",
                remedy="Shorten the prompt or begin a new conversation.",
            )
        limits = Limits(
            max_tokens=context_length if max_tokens is None else max_tokens,
            stop_ids=frozenset(self.parts.text.eos_ids),
            context_length=longest,
            max_rows=model.capabilities.max_rows,
        )
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._end_running()
        generation = Generation(
            self._conversation,
            Request(tuple(prompt), limits, stops),
            Sampler(sampling, prompt, self.parts.numerics.tie_margin),
            self.parts.text.tokenizer,
        )
        self._running, self.last = generation, generation.result
        return generation

    def _end_running(self) -> None:
        if self._running is not None:
            self._running.close()
            self._running = None
