"""`edge-spec generate [MODEL] PROMPT`: one answer."""

from __future__ import annotations

import sys
from itertools import chain
from json import dumps, loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from edge_spec.engine.generation import Generation
    from edge_spec.text.grammar import Grammar


@options.with_groups
def generate(
    model: Annotated[
        str | None, typer.Argument(help=f"{options.MODEL_HELP}  [default: smollm2]")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Argument(help="A single argument is the prompt; - reads it from stdin."),
    ] = None,
    raw: Annotated[
        bool, typer.Option(help="Continue the text instead of answering it as a chat message.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A file with a JSON Schema that the answer has to fit.")
    ] = None,
    *,
    loading: options.AskedOptions,
    sampling: options.SamplingOptions,
    json: options.Json = False,
) -> None:
    """Answer one prompt."""
    from edge_spec.cli.opening import open_engine, sampling_params

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    params = sampling_params(sampling)
    grammar = None if schema is None else _grammar(schema)
    engine = open_engine(model, loading)
    text = sys.stdin.read() if prompt == "-" else prompt
    with engine:
        start = engine.generate if raw else engine.chat
        generation = start(
            text,
            max_tokens=sampling.max_tokens,
            stop=stop or (),
            sampling=params,
            grammar=grammar,
            stream=True,
        )
        _print(generation, json)


def _grammar(path: Path) -> Grammar:
    """Raises UsageError for a file that is no JSON object."""
    from edge_spec.text.grammar import Grammar

    try:
        schema = loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read the schema {path}: {error}", remedy="Give a file with a JSON Schema."
        ) from None
    if not isinstance(schema, dict):
        raise UsageError(
            f"the schema {path} is no JSON object", remedy='For example {"type": "object"}.'
        )
    return Grammar.json_schema(schema)


def _print(generation: Generation, as_json: bool) -> None:
    """Raises KeyboardInterrupt after what there is of an interrupted answer, EdgeSpecError after
    what there is of one that the model failed in."""
    from edge_spec.cli.progress import ProgressBar

    try:
        with generation.cancelled_by_interrupt():
            with ProgressBar() as generation.progress:
                first = next(generation, None)
            for chunk in generation if first is None else chain([first], generation):
                if not as_json:
                    print(chunk.text, end="", flush=True)
    finally:
        if as_json and generation.result.finish_reason is not None:
            print(dumps(generation.result.to_dict(), ensure_ascii=False))
        elif not as_json:
            print()
    if generation.result.finish_reason == "cancelled":
        raise KeyboardInterrupt
