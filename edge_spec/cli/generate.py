"""`edge-spec generate [MODEL] PROMPT`: one answer."""

from __future__ import annotations

import logging
import sys
from itertools import chain
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json
from edge_spec.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_spec.engine.generation import Generation
    from edge_spec.loader.place import PlacedModels
    from edge_spec.text.grammar import Grammar
    from edge_spec.text.parts.answer_form import AnswerForm
    from edge_spec.text.thoughts import Reasoning

_log = logging.getLogger(__name__)


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
    suffix: Annotated[
        str | None,
        typer.Option(help="Write what stands between the prompt and this text, as in code."),
    ] = None,
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
    from edge_spec.cli.opening import open_engine
    from edge_spec.text.parts.answer_form import TEXT_TOKENS, answer_tokens
    from edge_spec.text.thoughts import read_reasoning

    if model is None:
        raise UsageError("there is no prompt", remedy="Run: edge-spec generate [MODEL] PROMPT.")
    if prompt is None:
        model, prompt = "smollm2", model
    params = sampling.params()
    grammar = None if schema is None else _grammar(schema)
    text = sys.stdin.read() if prompt == "-" else prompt
    limit = sampling.max_tokens
    between = None
    if suffix is not None:
        between = _Between(suffix, TEXT_TOKENS if limit is None else limit)
    asked = _Asked(text, raw, between, read_reasoning(sampling.reasoning))
    with open_engine(model, loading, screen=asked.encode) as engine:
        generation = engine.generate(
            asked.tokens,
            max_tokens=answer_tokens(asked.form) if limit is None else limit,
            stop=stop or (),
            sampling=params,
            grammar=grammar,
            form=asked.form,
            stream=True,
        )
        _print(generation, json)


class _Between(NamedTuple):
    """What the answer stands before, and how long it may be."""

    suffix: str
    max_tokens: int


class _Asked:
    """The prompt: its tokens are known when the model's header is, before the weights are read.

    form: which parts the answer may have.
    """

    def __init__(
        self, text: str, raw: bool, between: _Between | None, reasoning: Reasoning
    ) -> None:
        self._text = text
        self._between = between
        self._raw = raw
        self._reasoning = reasoning
        self.tokens: Sequence[int] = ()
        self.form: AnswerForm | None = None

    def encode(self, placed: PlacedModels) -> None:
        """Raises ContextFullError, UnsupportedModelError for a chat template that fails, and for a
        model that was not trained to fill in."""
        from edge_spec.engine.request import require_room
        from edge_spec.text.infill import room_beside

        text = placed.target.text
        if self._between is not None:
            suffix, max_tokens = self._between
            room = room_beside(placed.context_length, max_tokens)
            self.tokens = text.infill.prompt(self._text, suffix, room=room)
            return
        is_source = placed.target.config.encoder is not None
        if not self._raw and text.chat_template is None and not is_source:
            _log.warning(
                "%s has no chat template: the prompt is continued as it is, as with --raw",
                placed.target.name,
            )
        if self._raw or text.chat_template is None:
            self.tokens = text.tokenizer.encode(self._text)
        else:
            self.tokens = text.chat_prompt(self._text, reasoning=self._reasoning)
            self.form = text.answer_form(self.tokens, reasoning=self._reasoning)
        require_room(self.tokens, placed.context_length)


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
    from edge_spec.cli.answer_writer import AnswerWriter
    from edge_spec.engine.thought_line import cut_thought

    writer = AnswerWriter(generation.result)
    try:
        with generation.cancelled_by_interrupt():
            with ProgressBar() as generation.progress:
                first = next(generation, None)
            for chunk in generation if first is None else chain([first], generation):
                if not as_json:
                    writer.write(chunk)
    finally:
        if as_json and generation.result.finish_reason is not None:
            print_json(generation.result.to_dict())
        elif not as_json:
            writer.finish()
    if (note := cut_thought(generation.result)) is not None:
        _log.warning("%s", note)
    if generation.result.finish_reason == "cancelled":
        raise KeyboardInterrupt
