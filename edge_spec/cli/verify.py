"""`edge-spec verify [MODEL]`: whether speculation changes what a model writes here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json
from edge_spec.models.asked_options import Option

if TYPE_CHECKING:
    from edge_spec.diagnostics.lossless_check import Extent, Proof
    from edge_spec.text.prompt_files import Prompt

_STATUS = {"pass": 0, "ties": 0, "fail": 1, "inconclusive": 3}


@dataclass(frozen=True)
class VerifyOptions:
    """Declares what is held against plain decoding, and how much of it."""

    prompts: Annotated[
        Path | None,
        Option(
            "JSON lines with id, category, and prompt or turns, or a .txt with a prompt a line; "
            "without it, ours.",
            None,
        ),
    ] = None
    count: Annotated[int, Option("Most prompts, from all over the file.", None)] = 20
    max_tokens: Annotated[int, Option("Most tokens of an answer.", None)] = 64
    draws: Annotated[
        int, Option("Texts drawn for the distribution; 0 leaves sampling out.", None)
    ] = 1500
    runs: Annotated[int, Option("How often one request is repeated.", None)] = 3


@options.with_groups
def verify(
    model: Annotated[str, typer.Argument(help=options.MODEL_HELP)] = "smollm2",
    *,
    asked: VerifyOptions,
    loading: options.AskedOptions,
    json: options.Json = False,
) -> None:
    """Hold speculation against plain decoding.

    Exit status 1: a text differs that this mode promises to be equal; 3: too few draft tokens were
    accepted or rejected to show anything. Texts that part at near ties, where the mode allows it,
    are counted and shown as such.
    """
    from edge_spec.diagnostics.lossless_check import Extent
    from edge_spec.diagnostics.lossless_check.lossless_report import document, print_report
    from edge_spec.text.prompt_files import OWN_PROMPTS, read_prompts

    extent = Extent(asked.count, asked.max_tokens, asked.draws, asked.runs)
    entries = read_prompts(asked.prompts or OWN_PROMPTS)
    report = document(_prove(model, loading, entries, extent), loading.device or "default")
    if json:
        print_json(report)
    else:
        from rich.console import Console

        print_report(report, Console(highlight=False))
    if status := _STATUS[report["verdict"]]:
        raise typer.Exit(status)


def _prove(
    model: str, loading: options.AskedOptions, prompts: Sequence[Prompt], extent: Extent
) -> Proof:
    from edge_spec.cli.opening import open_engine
    from edge_spec.diagnostics.lossless_check import prove

    # What is asked here says nothing of what will be asked.
    with (
        open_engine(model, loading, keeps_answers=False) as engine,
        ProgressBar() as progress,
    ):
        return prove(engine, prompts, extent, progress)
