"""The fields of requests. What would change the answer is honoured, or refused by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, WithJsonSchema, model_validator

from edge_spec.apps.server.fields import (
    ALSO,
    HARMLESS,
    LEAVE_OUT,
    MAX_INT,
    OFF,
    Body,
    Count,
    JsonObject,
    Whole,
    refusal,
    whole,
)
from edge_spec.apps.server.forms import FormRequest, ReasoningRequest
from edge_spec.apps.server.messages import MAX_TOOLS, Choice, Content, Message, Tool, joined
from edge_spec.apps.validation import by_kind, chosen_by
from edge_spec.core.sampling import LEAST_PENALTY

MAX_CHOICES = 16
MAX_STOPS = 256
NO_LIMIT = -1  # of the tokens of an answer; -2 in llama.cpp, which tells the two apart
_SEEDS = 2**64


def limit(value: int) -> int:
    if value in (-1, -2):
        return NO_LIMIT
    if not 1 <= value <= MAX_INT:
        raise ValueError(f"{value} should be from 1 to {MAX_INT}, or -1 for no limit")
    return value


def _scores(value: Any) -> Any:
    """Returns None for false, which asks for no scores as chat requests do."""
    return None if value is False else value


def _all_whole(value: Any) -> Any:
    """Reads a list at once: prompts are long."""
    is_plain = not isinstance(value, list) or float not in set(map(type, value))
    return value if is_plain else [whole(each) for each in value]


def _prompt_tag(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    first = value[0] if isinstance(value, list) and value else None
    return {str: "<texts>", list: "<lists>", int: "<tokens>", float: "<tokens>"}.get(type(first))


Limit = Annotated[
    Whole,
    AfterValidator(limit),
    WithJsonSchema(
        {"anyOf": [{"enum": [-1, -2]}, {"type": "integer", "minimum": 1, "maximum": MAX_INT}]}
    ),
]
Alternatives = Annotated[Whole, Field(ge=0, le=20)]
Stop = Annotated[str, Field(max_length=1000)]
Stops = Annotated[
    Annotated[Stop, Tag("<text>")]
    | Annotated[list[Stop], Field(max_length=MAX_STOPS), Tag("<list>")],
    by_kind("a text, or a list of texts", {str: "<text>", list: "<list>"}),
]
TokenId = Annotated[Whole, Field(ge=0, le=MAX_INT)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biased = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Biases = dict[Biased, Bias]
TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_INT)]], Field(min_length=1), BeforeValidator(_all_whole)
]
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[str], Field(max_length=MAX_CHOICES), Tag("<texts>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_CHOICES), Tag("<lists>")],
    chosen_by(_prompt_tag, "a text, token ids, or a list of one of them"),
]


class Speculative(Body):
    """drafter: None is the server's own. tokens: tell where each token came from."""

    drafter: Annotated[str, Field(max_length=200)] | None = None
    tokens: bool = False


class StreamOptions(Body):
    harmless = frozenset(("include_obfuscation", "continuous_usage_stats"))
    include_usage: bool | None = False


class Prediction(Body):
    """What most of the answer is expected to be, such as a file before a small change."""

    type: Literal["content"]
    content: Content

    @property
    def text(self) -> str:
        return joined(self.content)


class AnswerRequest(FormRequest):
    """The fields of every request for an answer. Other servers' names of them are understood,
    members that change no answer are taken, and any other is refused by name."""

    also = ALSO
    harmless = HARMLESS
    off = OFF
    has_origins: ClassVar[bool] = True  # of tokens, in answers of its API
    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_completion_tokens: Limit | None = None  # goes before max_tokens, its older name
    max_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None  # -1 and 0: all tokens
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=LEAST_PENALTY, le=10)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    logit_bias: Biases | None = None
    ignore_eos: bool | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**64)] | None = None  # -1: a fresh one
    stop: Stops | None = None
    stop_token_ids: list[TokenId] | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    n_probs: Alternatives | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def asks_origins(self) -> bool:
        """Says whether the answer is to tell where each token came from."""
        return self.speculative is not None and self.speculative.tokens

    @property
    def limit(self) -> int | None:
        """Returns None where the request does not say, NO_LIMIT where it wants none."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Returns how many alternatives are told beside each token; None: tokens are not scored."""
        return self.n_probs or None

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(stop for stop in given if stop)

    @model_validator(mode="after")
    def _asks_what_has_a_place(self) -> AnswerRequest:
        if self.asks_origins and not self.has_origins:
            raise refusal(
                "speculative", f"asks for what has no place in a message of this API: {LEAVE_OUT}"
            )
        return self

    def given(self, kind: type[Body]) -> dict[str, Any]:
        """Returns those of its fields that were sent and that `kind` has, too, as JSON has them."""
        names = set(kind.model_fields)
        # Without warnings: members of unions are found by what a request has, not by what was read.
        return self.model_dump(include=names, exclude_unset=True, by_alias=True, warnings=False)

    def seed_of(self, choice: int) -> int | None:
        """Choices with the same seed would be the same."""
        return None if self.seed in (None, -1) else (self.seed + choice) % _SEEDS


class ChatRequest(AnswerRequest, ReasoningRequest):
    """Asks for the assistant's next message."""

    shown_as: ClassVar[Mapping[str, str]] = {}  # other APIs' names of fields, for refusals
    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = False
    top_logprobs: Alternatives | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[Literal["text"]] | None = None
    documents: list[JsonObject] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def template_kwargs(self) -> JsonObject:
        """Returns what the chat template is given by name."""
        named = super().template_kwargs
        return {**named, "documents": list(self.documents)} if self.documents else named

    @property
    def goes_on(self) -> bool | None:
        """Says whether the answer goes on with the last message."""
        return self.continue_final_message or self.messages[-1].prefix

    @property
    def num_logprobs(self) -> int | None:
        num_asked = max(self.top_logprobs or 0, self.n_probs or 0)
        return num_asked if self.logprobs or num_asked else None

    @model_validator(mode="after")
    def _fits(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "needs logprobs: true")
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal(
                "continue_final_message",
                "goes on with a message, add_generation_prompt begins one: send one of them",
            )
        kwargs = self.chat_template_kwargs or {}
        for name in ("messages", "tools"):
            if name in kwargs:
                raise refusal("chat_template_kwargs", f"has {name}: send them beside it")
        for name, value in self.template_kwargs.items():
            if kwargs.get(name, value) != value:
                raise refusal(
                    "chat_template_kwargs", f"has another {name} than the request: send one of them"
                )
        return self


class CompletionRequest(AnswerRequest):
    """Asks for the continuation of a text."""

    prompt: Prompt
    logprobs: Annotated[Alternatives | None, BeforeValidator(_scores)] = None
    best_of: Count | None = None
    echo: bool | None = False
    suffix: str | None = None  # what follows the answer; "": nothing is known of it

    @property
    def num_logprobs(self) -> int | None:
        if self.logprobs is None:
            return self.n_probs or None
        return max(self.logprobs, self.n_probs or 0)

    @model_validator(mode="after")
    def _fits(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.num_choices:
            raise refusal("best_of", "is not supported, but where it is n: leave it out")
        if self.echo and self.num_logprobs is not None:
            raise refusal("echo", "goes without logprobs: the prompt's tokens are not scored")
        if self.suffix and self.echo:
            raise refusal("echo", "goes without suffix: the text is known on both sides")
        if self.suffix and not isinstance(self.prompt, str):
            raise refusal("suffix", "needs a prompt that is one text")
        return self
