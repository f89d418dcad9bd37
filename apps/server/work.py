"""From a request to what an engine is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge_spec import Engine, SamplingParams
from edge_spec.apps.server.answer import Work
from edge_spec.apps.server.errors import ApiError
from edge_spec.apps.server.options import ServerOptions
from edge_spec.apps.server.schema import ChatRequest, CompletionRequest, for_template


class Desk:
    """Reads requests for one model. Any thread may ask it: it changes nothing."""

    def __init__(self, engine: Engine, options: ServerOptions, drafter: str) -> None:
        self.model = engine.parts.name
        self._engine = engine
        self._options = options
        self.drafter = drafter

    def check_model(self, model: str | None) -> None:
        """Raises ApiError."""
        if model is not None and model != self.model:
            raise ApiError(
                404,
                f"There is no model {model!r} here. There is {self.model!r}.",
                code="model_not_found",
                param="model",
            )

    def chat(self, request: ChatRequest) -> Work:
        """Raises EdgeSpecError, UnicodeEncodeError."""
        messages = [for_template(message) for message in request.messages]
        prompt = self._engine.chat_prompt(messages)
        count = request.max_completion_tokens or request.max_tokens
        return self._work(request, [prompt], count)

    def completion(self, request: CompletionRequest) -> Work:
        """Raises EdgeSpecError, UnicodeEncodeError."""
        return self._work(request, self._prompts(request.prompt), request.max_tokens)

    def _work(
        self,
        request: ChatRequest | CompletionRequest,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
    ) -> Work:
        choices = [
            {
                "max_tokens": max_tokens or self._options.max_tokens,
                "stop": request.stops,
                "sampling": self._sampling(request, choice),
            }
            for choice in range(request.num_choices)
        ]
        speculative = request.speculative
        return Work(
            prompts=[prompt for prompt in prompts for _ in choices],
            options=[options for _ in prompts for options in choices],
            drafter=(speculative and speculative.drafter) or self.drafter,
            session_id=request.session_id,
        )

    def _sampling(self, request: ChatRequest | CompletionRequest, choice: int) -> SamplingParams:
        given: dict[str, Any] = {
            name: getattr(request, name)
            for name in (
                "temperature",
                "top_k",
                "top_p",
                "min_p",
                "presence_penalty",
                "repetition_penalty",
            )
            if getattr(request, name) is not None
        }
        if request.seed is not None:
            given["seed"] = request.seed_of(choice)
        if request.logit_bias:
            given["logit_bias"] = {int(id): bias for id, bias in request.logit_bias.items()}
        own = self._options.sampling
        return SamplingParams(**{**vars(own), **given})

    def _prompts(self, prompt: Any) -> list[Sequence[int]]:
        encode = self._engine.parts.text.tokenizer.encode
        if isinstance(prompt, str):
            return [encode(prompt)]
        if isinstance(prompt[0], int):
            return [prompt]
        return [encode(each) if isinstance(each, str) else each for each in prompt]
