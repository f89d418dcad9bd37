"""Entry point: run a command and turn errors into one line and an exit status."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import metadata
from typing import Annotated

import typer

from edge_spec.cli.answering import chat, desktop, generate, serve
from edge_spec.cli.checking import bench, devices, doctor, plan, verify
from edge_spec.cli.converting import export, pull
from edge_spec.cli.options import switch, with_groups
from edge_spec.cli.signals import INTERRUPTED, READER_LEFT, EndSignals
from edge_spec.cli.training import distill, learn, tune_skip
from edge_spec.errors import EdgeSpecError

app = typer.Typer(
    name="edge-spec",
    help="Language models on your own machine, faster by lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",  # rich's own markup would read brackets as styles
    pretty_exceptions_enable=False,
)

_COMMANDS = {
    "Use a model": (generate, chat, serve, desktop),
    "Find out what this machine can do": (doctor, plan, bench, verify, devices),
    "Get and convert models": (pull, export),
    "Train a drafter": (distill, tune_skip),
}
for panel, commands in _COMMANDS.items():
    for each in commands:
        app.command(rich_help_panel=panel, no_args_is_help=each is generate)(with_groups(each))
app.add_typer(learn, rich_help_panel="Train a drafter")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"edge-spec {metadata.version('edge-spec')}")
        raise typer.Exit


@app.callback()
def configure(
    debug: Annotated[bool, switch("--debug", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool,
        switch("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    if debug:
        os.environ["EDGE_SPEC_DEBUG"] = "1"


def run(arguments: list[str], signals: EndSignals | None = None) -> int:
    """Return the exit status: 0, 1 for a failure, 2 for bad usage, 3 where `verify` shows nothing,
    128 plus the number of a signal.

    signals: a signal during an import can surface as any other error, so its status wins.
    """
    try:
        status = _run(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:  # the reader closed the pipe
        status = READER_LEFT
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        ended = signals is not None and signals.status is not None
        status = 1 if ended else _complain_of(error)
    return status if signals is None or signals.status is None or not status else signals.status


def _run(arguments: list[str]) -> int:
    try:
        status = app(arguments, standalone_mode=False)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer turns it into SystemExit
            raise error.__context__ from None
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return status if isinstance(status, int) else 0


def _complain_of(error: Exception) -> int:
    """Print the error and return its status. Raise it again if unexpected, or when debugging."""
    if os.environ.get("EDGE_SPEC_DEBUG"):
        raise error
    if isinstance(error, EdgeSpecError):
        return _complain(str(error), error.exit_status)
    if isinstance(error, OSError):
        remedy = "Check the path, its permissions and the free space, or set EDGE_SPEC_CACHE."
        return _complain(f"{error}. {remedy}", 1)
    # Click's own errors, such as an unknown option, have a text and a status.
    if not hasattr(error, "format_message"):
        raise error
    text = " ".join(error.format_message().split()).rstrip(".")
    if not text:  # no arguments: click has printed the help
        return 2
    context = getattr(error, "ctx", None)
    command = context.command_path.removeprefix(context.find_root().command_path) if context else ""
    return _complain(f"{text}. See edge-spec{command} --help.", getattr(error, "exit_code", 2))


def _complain(text: str, status: int) -> int:
    with suppress(OSError):  # stderr may be closed
        print(f"edge-spec: {text}", file=sys.stderr, flush=True)
    return status
