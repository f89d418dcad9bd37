"""Turn a request of any API into work for an engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

from edge_spec import Grammar, SamplingParams
from edge_spec.apps.server.answer import OpenModel, Work
from edge_spec.apps.server.errors import ApiError, refused
from edge_spec.apps.server.schema import NO_LIMIT, AnswerBody, Request
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.text.parts.answer_form import SWITCHES, AnswerForm

_OF_THOUGHTS = frozenset((*SWITCHES, "reasoning_effort"))  # in chat templates
_SEEDS = 2**64


def read(model: OpenModel, request: Request) -> Work:
    """Return the work that a request asks of a model. Changes nothing, so any thread may call it.
    Raises EdgeSpecError, ApiError, UnicodeEncodeError."""
    if request.messages:
        return _chat(model, request)
    prompts: list[Sequence[int]]
    if (gap := request.gap) is not None:
        limit = request.max_tokens or model.options.sampling.limit(None)
        room = {"max_tokens": None if limit == NO_LIMIT else limit, **gap.options}
        prompts = [model.engine.infill_prompt(gap.prefix, gap.suffix, gap.files, **room)]
    else:
        encode = model.engine.encode
        prompts = [encode(p) if isinstance(p, str) else p for p in request.prompts]
    return _work(model, request, prompts, _grammar(request))


def _chat(model: OpenModel, request: Request) -> Work:
    text = model.engine.parts.text
    tools = () if request.tool_choice == "none" else request.tools
    shown = [_without_strict(tool) for tool in tools]
    _require_read(model, request)
    options: Any = {"reasoning": model.options.sampling.thoughts, **request.prompt_options}
    try:
        prompt = model.engine.chat_prompt(request.messages, shown, **options)
    except UnsupportedModelError as error:
        field = request.messages_field
        told = f"Change {field}, or continue a text with POST /v1/completions."
        raise ApiError(400, f"{error.shown}. {told}", param=field) from error
    form = text.answer_form(prompt, shown, **options)
    if form is not None and request.thoughts == "in text":
        form = replace(form, tells_thought=False)
    return _work(model, request, [prompt], _chat_grammar(model, request, tools), form)


def _chat_grammar(
    model: OpenModel, request: Request, tools: Sequence[dict[str, Any]]
) -> Grammar | None:
    required = request.tool_choice == "required"
    calls = model.engine.parts.text.tool_form() if tools else None
    if calls is None:
        if required:
            raise refused("tool_choice", "asks for a call: send tools, too.")
        return _grammar(request)
    if request.form is not None and request.form[1].kind != "json-schema":
        told = "does not go with tools: send a JSON Schema, or no tools."
        raise refused(request.form[0], told)
    several = request.parallel_tool_calls
    if several is None:  # a model not trained to call tools repeats the first call
        several = model.engine.parts.text.knows_tools
    name, text = request.tool_name, _grammar(request)
    if name is not None:
        several, tools = False, [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise refused("tool_choice", f"names {name}, which tools do not have.")
    with _naming("tools"):
        return calls.grammar(list(tools), required=required, several=several, text=text)


def _require_read(model: OpenModel, request: Request) -> None:
    """Raises ApiError for a template variable that is set but that the template does not read.
    Variables for thoughts are exempt, as models that cannot think may be asked to."""
    given = request.prompt_options.get("template_kwargs", {}).items()
    asked = {name for name, value in given if value and name not in _OF_THOUGHTS}
    for name in sorted(asked - model.engine.parts.text.template_variables) if asked else ():
        field = name if name == "documents" else "chat_template_kwargs"
        told = f"gives this model's chat template {name}, which it does not read"
        raise refused(field, f"{told}: leave it out, or ask for another model.")


def _work(
    model: OpenModel,
    request: Request,
    prompts: Sequence[Sequence[int]],
    grammar: Grammar | None,
    form: AnswerForm | None = None,
) -> Work:
    body = request.body
    if body.ignore_eos and grammar is not None:
        told = "keeps an answer of a given form from its end: leave one of them out."
        raise refused("ignore_eos", told)
    limit = request.max_tokens or model.options.sampling.limit(form)
    asked: dict[str, Any] = {
        "max_tokens": None if limit == NO_LIMIT else limit,
        **body.options(),
        "logprobs": request.logprobs,
        "grammar": grammar,
        "form": form,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    sampling = _sampling(model, request)
    choices = [
        {**given, "sampling": sampling if seed is None else replace(sampling, seed=seed)}
        for seed in _seeds(body)
    ]
    return Work(
        model=model,
        request=request,
        prompts=[prompt for prompt in prompts for _ in choices],
        options=[options for _ in prompts for options in choices],
    )


def _sampling(model: OpenModel, request: Request) -> SamplingParams:
    """Return the sampling. Raises ApiError for penalties over only the last tokens."""
    given = request.body.sampling()
    if request.body.ignore_eos:
        ends = dict.fromkeys(model.engine.parts.text.eos_ids, -inf)
        given["logit_bias"] = {**given.get("logit_bias", {}), **ends}
    params, last = replace(model.options.sampling.params, **given), request.body.repeat_last_n
    if params.penalized and last not in (None, -1) and last < model.engine.context_length:
        told = "but penalties are of all tokens: leave it out or send -1."
        raise refused("repeat_last_n", f"is {last}, {told}")
    return params


def _seeds(body: AnswerBody) -> Iterator[int | None]:
    """Yield a seed for each choice, as the same seed would repeat the answer."""
    seed = None if body.seed == -1 else body.seed
    for choice in range(body.num_choices):
        yield None if seed is None else (seed + choice) % _SEEDS


def _without_strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool without `strict`, which is not for the model."""
    function = {name: each for name, each in tool["function"].items() if name != "strict"}
    return {**tool, "function": function}


def _grammar(request: Request) -> Grammar | None:
    """Return the grammar of an answer without calls. Raises ApiError for an unsupported schema."""
    if request.form is None:
        return None
    field, grammar = request.form
    if grammar.kind == "json-schema":
        with _naming(field):
            grammar.held()
    return grammar


@contextmanager
def _naming(field: str) -> Iterator[None]:
    """Add the field's name to a refusal."""
    try:
        yield
    except UsageError as error:
        raise ApiError(400, f"{field}: {error}", param=field.partition(".")[0]) from error
