"""Validates the options of an answer and turns them into a request and a sampler."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict, get_type_hints

from edge_spec.core.sampling import Constraint, Sampler, SamplingParams
from edge_spec.core.sampling_params import is_whole
from edge_spec.drafters.lookup.corpus_index import text_tokens
from edge_spec.drafters.lookup.suffix import ForcedDrafter, PredictionDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.decoder import GenerationLimits
from edge_spec.engine.generation import Request
from edge_spec.errors import ContextFullError, UsageError
from edge_spec.models.asked_options import AskedOptions, meant, require_type
from edge_spec.text.chat_format import MessagePrompt
from edge_spec.text.chat_template import PromptOptions
from edge_spec.text.grammar import Grammar
from edge_spec.text.infill import InfillPrompt
from edge_spec.text.parts.answer_form import AnswerForm
from edge_spec.text.parts.thought_constraint import ThoughtConstraint

GREEDY = SamplingParams()
MAX_ALTERNATIVES = 20
_HELP = {
    "max_tokens": "Without it, an answer goes on until its end, or until the context is full.",
    "stop": "The text ends before the first of these.",
    "stop_token_ids": "The text ends before the first of these tokens.",
    "sampling": "Write SamplingParams(temperature=...), or engine.chat_sampling().",
    "grammar": "Write Grammar.json_schema(...), Grammar.regex(...) or Grammar.lark(...).",
    "logprobs": f"Alternatives beside each token, 0 to {MAX_ALTERNATIVES}.",
    "prediction": "The text that most of the answer is expected to be.",
    "form": "The parts of the answer, as ChatFormat.answer_form gives them; chat does so itself.",
}


class AnswerOptions(TypedDict, total=False):
    """Options of `generate`, `chat` and `stream`."""

    max_tokens: int | None  # None: until the model ends its text or the context is full
    stop: str | Sequence[str] | None  # the text ends before the first of these
    stop_token_ids: Sequence[int] | None  # and before the first of these tokens
    sampling: SamplingParams  # greedy if not given
    grammar: Grammar | None  # that the text must follow
    logprobs: int | None  # scores tokens, each with that many alternatives; None: no scores
    prediction: str | None  # expected text of most of the answer: drafted and verified
    form: AnswerForm | None  # the parts it may have; None: all text


class ChatOptions(AnswerOptions, PromptOptions, total=False):
    """Options of `chat` and `stream`."""

    tools: Sequence[Mapping[str, Any]]  # for the model to call, in OpenAI's format


ANSWER_NAMES = (
    *AnswerOptions.__annotations__,
    *(field.name for field in fields(SamplingParams)),
)


def request_of(parts: EngineComponents, prompt: Sequence[int], options: AnswerOptions) -> Request:
    """Build a request. Raises UsageError for unknown options or what this model cannot do,
    ContextFullError for a prompt that does not fit."""
    _check_options(options)
    max_tokens, stop = options.get("max_tokens"), options.get("stop") or ()
    stop_token_ids = options.get("stop_token_ids") or ()
    if max_tokens is not None and max_tokens < 1:
        raise UsageError(f"max_tokens is {max_tokens}", remedy="It has to be 1 or more.")
    _require_tokens(prompt)
    _check_tokens(parts, "the prompt", prompt)
    _check_tokens(parts, "stop_token_ids", stop_token_ids)
    if not prompt:
        raise UsageError("the prompt is empty", remedy="Give it at least one token.")
    encoder = parts.model.config.encoder
    if encoder is not None and encoder.answer_start(prompt) is None:
        raise UsageError(
            "the prompt is a source that does not end",
            remedy=f"End it with the tokens that begin an answer, the last one {encoder.start_id}.",
        )
    context_length = context_length_of(parts)
    require_room(prompt, context_length)
    ends = prompt.ends if isinstance(prompt, InfillPrompt) else ()
    limits = GenerationLimits(
        max_tokens=context_length if max_tokens is None else max_tokens,
        stop_ids=frozenset((*parts.text.eos_ids, *stop_token_ids, *ends)),
        context_length=context_length,
        max_rows=parts.model.capabilities.verified_rows,
        min_rows=parts.min_rows,
    )
    sampler = _sampler(parts, prompt, options)
    drafters: list[Drafter] = [] if sampler.constraint is None else [ForcedDrafter()]
    prediction = _predicted_tokens(parts, options.get("prediction"))
    if prediction is not None:
        drafters.append(PredictionDrafter(prediction))
    return Request(
        tuple(prompt),
        limits,
        sampler,
        stops=(stop,) if isinstance(stop, str) else tuple(stop),
        begins_text=encoder is not None or isinstance(prompt, MessagePrompt),
        form=options.get("form"),
        drafters=drafters,
        prediction=prediction,
    )


def require_room(prompt: Sequence[int], context_length: int) -> None:
    if len(prompt) > context_length:
        raise ContextFullError(
            f"the prompt has {len(prompt)} tokens, the context holds {context_length}",
            remedy="Shorten the prompt or begin a new conversation.",
        )


def _predicted_tokens(parts: EngineComponents, text: str | None) -> list[int] | None:
    """Return the predicted text's tokens, at most as many as the context holds."""
    if text is None:
        return None
    tokenizer = parts.text.tokenizer
    return text_tokens(text, tokenizer, tokenizer.encode(""))[: context_length_of(parts)]


def _sampler(parts: EngineComponents, prompt: Sequence[int], options: AnswerOptions) -> Sampler:
    sampling, logprobs = options.get("sampling", GREEDY), options.get("logprobs")
    _check_tokens(parts, "logit_bias", sampling.logit_bias)
    if logprobs is not None and not 0 <= logprobs <= MAX_ALTERNATIVES:
        raise UsageError(f"logprobs is {logprobs}", remedy=f"It has to be 0 to {MAX_ALTERNATIVES}.")
    return Sampler(
        sampling,
        prompt,
        sampled_drafts=False if parts.speculation_factory.lossless.always else None,
        constraint=_constraint(parts, options),
        num_alternatives=logprobs,
    )


def _constraint(parts: EngineComponents, options: AnswerOptions) -> Constraint | None:
    """Return the constraint for an answer's grammar and its thought's budget. The grammar begins
    after the thought unless it covers thoughts itself."""
    grammar, form = options.get("grammar"), options.get("form")
    inner = None if grammar is None else parts.grammars.compile(grammar)
    if form is None or form.thought is None or form.is_closed:
        return inner
    if grammar is not None and not grammar.is_of_answer:
        return inner
    if inner is None and form.budget is None:
        return None
    size, ends = parts.model.config.vocab_size, parts.text.eos_ids
    return ThoughtConstraint(form, form.thought, parts.text.pieces, size, ends, inner)


def context_length_of(parts: EngineComponents) -> int:
    """Return the most tokens of prompt and answer: the last pass must fit with all its rows."""
    return parts.model.config.context_length - parts.min_rows + 1


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise UsageError for an unknown option, suggesting the intended one, or a wrong type."""
    taken = get_type_hints(AnswerOptions)
    for name, value in options.items():
        if name in taken:
            require_type(name, value, taken[name], _HELP[name])
            continue
        loading = [each.name for each in fields(AskedOptions)]
        names = [*ANSWER_NAMES, *ChatOptions.__annotations__, *loading]
        found = meant(name, names, {})
        if found is None:
            remedy = f"There are {', '.join(taken)}."
        elif found in loading:
            remedy = f"edge_spec.load takes {found}."
        else:
            remedy = how_to_give(found)
        raise UsageError(f"answers have no option {name}", remedy=remedy)


def how_to_give(name: str) -> str:
    """Return how to pass one of ANSWER_NAMES."""
    if name in ChatOptions.__annotations__ and name not in AnswerOptions.__annotations__:
        return f"Give chat or stream {name}=...."
    if name in AnswerOptions.__annotations__:
        return f"Give each answer {name}=..., as chat and generate take it."
    return f"Give each answer sampling=SamplingParams({name}=...)."


def _require_tokens(prompt: Any) -> None:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str | bytes | bytearray)
    # The first check is fast, since prompts are long.
    if not is_list or not all(type(token) is int or is_whole(token) for token in prompt):
        raise UsageError(
            f"the prompt is {reprlib.repr(prompt)}",
            remedy="It is a text, or a list of token ids.",
        )


def _check_tokens(parts: EngineComponents, where: str, tokens: Iterable[int]) -> None:
    vocab_size = parts.model.config.vocab_size
    if not all(0 <= token < vocab_size for token in tokens):
        raise UsageError(
            f"{where} has a token outside the vocabulary",
            remedy=f"Tokens are 0 to {vocab_size - 1}.",
        )
