"""What a client asks for, through whichever API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from edge_spec import Chunk, Generation, Grammar

NO_LIMIT = -1  # of the tokens of an answer


@dataclass(frozen=True)
class AskedForm:
    """What an answer has to look like."""

    field: str  # of the body, for refusals
    grammar: Grammar
    is_json: bool = False


@dataclass(frozen=True)
class Gap:
    """Texts to write between. options: further ones of `Engine.infill_prompt`."""

    prefix: str
    suffix: str
    files: Sequence[tuple[str, str]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The bodies of all APIs are read as this. None: the server's own default.

    It has messages, prompts or a gap; without any of them, a model is only to be opened.
    messages: as chat templates read them. messages_field: their name in the body, for refusals.
    tools: functions in OpenAI's form. tool_name: the one tool that has to be called.
    sampling: fields of SamplingParams but for the seed.
    max_tokens: NO_LIMIT where the request wants none. logprobs: the number of alternatives.
    cut: ends the text of an answer early.
    """

    model: str | None = None
    stream: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    messages_field: str = "messages"
    tools: Sequence[dict[str, Any]] = ()
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tool_name: str | None = None
    parallel_tool_calls: bool | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning: Literal["auto", "off"] | int | None = None
    prompts: Sequence[str | Sequence[int]] = ()
    gap: Gap | None = None
    form: AskedForm | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    repeat_last_n: int | None = None
    ignore_eos: bool = False
    num_choices: int = 1
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] | None = None
    prediction: str | None = None
    logprobs: int | None = None
    drafter: str | None = None
    session_id: str | None = None
    cut: Callable[[Generation], Iterator[Chunk]] = iter
    thoughts: Literal["told", "hidden", "in text"] = "told"
    tells_origins: bool = False  # of each token
    tells_usage: bool = False  # in an event of its own at the end of a stream

    @property
    def tells_thoughts(self) -> bool:
        """Says whether the answer has its thoughts beside the text."""
        return self.thoughts != "hidden"
