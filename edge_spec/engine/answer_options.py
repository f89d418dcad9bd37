"""The options of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from edge_spec.core.sampling import SamplingParams
from edge_spec.text.grammar import Grammar


class AnswerOptions(TypedDict, total=False):
    """Options of `generate`, `chat` and `stream`."""

    max_tokens: int | None  # None: until the model ends its text or the context is full
    stop: str | Sequence[str]  # the text ends before the first of these
    sampling: SamplingParams  # greedy where not given
    grammar: Grammar | None  # what the text has to look like
    logprobs: int | None  # scores tokens and that many alternatives beside each; None: does not
    domain: str  # of text, such as "code": what a draft is accepted in is counted for each


class ChatOptions(AnswerOptions, total=False):
    """Options of `chat` and `stream`."""

    tools: Sequence[Mapping[str, Any]]  # that the model may call, as OpenAI has them
