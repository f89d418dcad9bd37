"""The fields of requests to the endpoints that llama.cpp's server has beside OpenAI's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Tag, WithJsonSchema, model_validator

from edge_spec.apps.server import other_servers as others
from edge_spec.apps.server.body import MAX_INT, Body, Whole
from edge_spec.apps.server.field_names import OtherNames, refusal
from edge_spec.apps.server.schema import AnswerRequest, CompletionRequest, TokenId, limit
from edge_spec.apps.validation import by_kind

MAX_FILES = 1024
_KEPT = ("response_fields", "t_max_predict_ms", "n_indent", "samplers", "return_tokens")
# Those that pick among candidates, and those that are off: none of them changes an answer here.
_SAMPLERS = frozenset(
    (
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "typical_p", "top_p", "min_p"),
        *("xtc", "temperature", "infill", "adaptive_p"),
    )
)
_OFF = {name: off for name, off in others.COMPLETION_OFF.items() if name not in _KEPT}
_HARMLESS = others.ANSWER_HARMLESS | {"t_max_prompt_ms"}


def _samplers(names: list[str]) -> list[str]:
    """Takes names of steps by which tokens are drawn: those that are here have an order of their
    own."""
    unknown = next((each for each in names if each not in _SAMPLERS), None)
    if unknown is not None:
        raise ValueError(f"{unknown[:60]!r} is no sampler that is known here; leave it out")
    return names


def _limit(value: int) -> int:
    return value and limit(value)


class LlamaCppRequest(AnswerRequest):
    """What both kinds of completions have. max_tokens: 0 reads the prompt alone, so that it is kept
    for the next request."""

    has_origins = False
    max_tokens: (
        Annotated[
            Whole,
            AfterValidator(_limit),
            WithJsonSchema({"type": "integer", "minimum": -2, "maximum": MAX_INT}),
        ]
        | None
    ) = None
    n: Literal[1] | None = None
    t_max_predict_ms: Annotated[Whole, Field(ge=-1, le=MAX_INT)] | None = None
    n_indent: Annotated[Whole, Field(ge=0, le=MAX_INT)] | None = None
    samplers: Annotated[list[str], AfterValidator(_samplers)] | None = None
    response_fields: list[str] | None = None
    return_tokens: bool | None = None

    @property
    def limit(self) -> int | None:
        return 1 if self.reads_alone else super().limit

    @property
    def reads_alone(self) -> bool:
        """Says whether nothing is to be written."""
        return self.max_tokens == 0 and self.max_completion_tokens is None


class InfillFile(Body):
    """Another file, or a part of one."""

    other_names = OtherNames(
        also={"name": "filename", "content": "text"}, harmless=frozenset(("time",))
    )
    text: str
    filename: str = "tmp"


class InfillRequest(LlamaCppRequest):
    """Asks for what stands between two texts. prompt: what follows input_prefix, such as the line
    of the cursor. spm_infill: whether the suffix comes first; null is the model's own order."""

    other_names = OtherNames(
        also={**others.ANSWER_ALSO, "extra_context": "input_extra"}, harmless=_HARMLESS, off=_OFF
    )
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Field(max_length=MAX_FILES)] | None = None
    prompt: str | None = None
    spm_infill: bool | None = None

    @model_validator(mode="after")
    def _has_text(self) -> InfillRequest:
        """An empty file has no text, and a prompt that is only read may have other files alone."""
        given = {"input_prefix", "input_suffix", "input_extra", "prompt"} & self.model_fields_set
        if not given:
            raise refusal("input_prefix", "is missing: send the text before the cursor")
        return self


class TextRequest(LlamaCppRequest, CompletionRequest):
    """Asks for the continuation of one text."""

    other_names = OtherNames(also=others.ANSWER_ALSO, harmless=_HARMLESS, off=_OFF)

    @model_validator(mode="after")
    def _is_one(self) -> TextRequest:
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            raise refusal(
                "prompt", "is a list of several: send one, or all to POST /v1/completions"
            )
        if self.echo:
            raise refusal("echo", "is not supported: it belongs to POST /v1/completions")
        return self


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str | TokenId], Tag("<list>")],
    by_kind("a text, or a list of texts and token ids", {str: "<text>", list: "<list>"}),
]


class _ModelRequest(Body):
    model: str | None = None


class TokenizeRequest(_ModelRequest):
    """add_special: with the tokens that begin a text. parse_special: reads control tokens that the
    text spells."""

    content: Content = ""
    add_special: bool | None = False
    parse_special: bool | None = True
    with_pieces: bool | None = False


class DetokenizeRequest(_ModelRequest):
    tokens: list[TokenId] = Field(default_factory=list)
