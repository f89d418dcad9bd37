"""The documents that the server answers with, for its OpenAPI description.

They are written elsewhere, without these classes; a test compares the two.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Document):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDocument(Document):
    error: ErrorDetail


def errors_as(kind: type[Document]) -> dict[int | str, dict[str, Any]]:
    """Describes the answers to requests that fail, in the form of one API."""
    return {
        "4XX": {"model": kind, "description": "The request is refused."},
        "5XX": {"model": kind, "description": "The server fails or is busy."},
    }


class CachedTokens(Document):
    cached_tokens: int


class TokenDetails(Document):
    """Tokens of thoughts, where there are any; of a prediction, those that the answer has, and
    those that it has not."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(Document):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: TokenDetails | None = None


class Timings(Document):
    """Milliseconds and tokens a second, under the names of llama.cpp's server; the last ones are
    edge-spec's own."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int
    draft_n_accepted: int
    speedup: float | None
    acceptance_rate: float | None
    mean_accepted_length: float | None
    acceptance_histogram: dict[str, int]
    rounds: int
    plain_rounds: int
    plain_reasons: dict[str, int]
    lossless: str
    ttft_ms: float


class Called(Document):
    name: str
    arguments: str


class Call(Document):
    id: str
    type: Literal["function"]
    function: Called


class AnswerMessage(Document):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None  # what the model thought before, where it did
    tool_calls: list[Call] = []


class ChatChoice(Document):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class _Answer(Document):
    id: str
    created: int
    model: str
    usage: Usage
    timings: Timings
    edge_spec: dict[str, Any] = {}


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TextChoice(Document):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class LlamaCppCompletion(Document):
    """The text of an answer, under the names of llama.cpp's server. tokens: where they were asked
    for; truncated: something of the prompt was left out, or the context is full."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[dict[str, Any]] | None = None


class TokenPiece(Document):
    """piece: bytes where it is a part of a character."""

    id: int
    piece: str | list[int]


class SlotDocument(Document):
    """One place for an answer. speculative: whether drafters may write in it."""

    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool


class Tokenized(Document):
    tokens: list[int | TokenPiece]


class Detokenized(Document):
    content: str


class AppliedTemplate(Document):
    prompt: str


class ModelStatus(Document):
    value: Literal["loaded", "loading", "unloaded"]


class ModelEntry(Document):
    """The last two are those of llama.cpp's server; aliases: what requests may call it, too."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    aliases: list[str]
    status: ModelStatus


class ModelList(Document):
    object: Literal["list"]
    data: list[ModelEntry]


class Health(Document):
    status: Literal["ok"]


class SamplingSettings(Document):
    """Settings of sampling, under the names of llama.cpp's server."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    n_predict: int


class GenerationSettings(Document):
    n_ctx: int
    params: SamplingSettings


class OwnProps(Document):
    """Properties that llama.cpp's server does not tell. sampling: `default_generation_settings` in
    words, and who chose them; request_params: those of requests that do not say."""

    sampling: str
    sampling_source: str
    request_params: SamplingSettings


class Props(Document):
    """default_generation_settings: how a conversation is answered, as the page asks for it."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    edge_spec: OwnProps


class Info(Document):
    model: str
    runtime: str
    drafter: str
    drafters: list[str]
    context_length: int
    version: str
