"""Entry point: runs a command and turns errors into one line and an exit status."""

from __future__ import annotations

import os
import signal
import sys
from io import TextIOWrapper
from threading import Event
from types import FrameType
from typing import Annotated

import typer

from edge_spec.cli.bench import bench
from edge_spec.cli.chat import chat
from edge_spec.cli.desktop import desktop
from edge_spec.cli.devices import devices
from edge_spec.cli.doctor import doctor
from edge_spec.cli.export import export
from edge_spec.cli.generate import generate
from edge_spec.cli.plan import plan
from edge_spec.cli.pull import pull
from edge_spec.cli.serve import serve
from edge_spec.cli.tune_skip import tune_skip
from edge_spec.errors import EdgeSpecError

INTERRUPTED = 130  # what shells expect after SIGINT

app = typer.Typer(
    name="edge-spec",
    help="Language models on your own machine, faster by lossless speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(no_args_is_help=True)(generate)
app.command()(chat)
app.command()(serve)
app.command()(desktop)
app.command()(pull)
app.command()(export)
app.command()(bench)
app.command()(devices)
app.command()(plan)
app.command()(doctor)
app.command()(tune_skip)


@app.callback()
def configure(
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")] = False,
) -> None:
    if debug:
        os.environ["EDGE_SPEC_DEBUG"] = "1"


def main() -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # bytes or characters that the terminal lacks
            stream.reconfigure(errors="replace")
    interrupted = Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    sys.exit(run(sys.argv[1:], interrupted))


def run(arguments: list[str], interrupted: Event | None = None) -> int:
    """The exit status: 0, 1 for a failure, 2 for bad usage, 130 after Ctrl-C.

    interrupted: set by Ctrl-C, of which libraries that are just being imported make another error.
    """
    try:
        status = app(arguments, standalone_mode=False)
        return status if isinstance(status, int) else 0
    except EdgeSpecError as error:
        if interrupted is not None and interrupted.is_set():
            return INTERRUPTED
        if os.environ.get("EDGE_SPEC_DEBUG"):
            raise
        return _complain(str(error), error.exit_status)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except OSError as error:
        if os.environ.get("EDGE_SPEC_DEBUG"):
            raise
        remedy = "Check the path, its permissions and the free space, or set EDGE_SPEC_CACHE."
        return _complain(f"{error}. {remedy}", 1)
    except Exception as error:
        # Click's own errors (an unknown option, say) know their text and status.
        if hasattr(error, "format_message") and not os.environ.get("EDGE_SPEC_DEBUG"):
            text = " ".join(error.format_message().split()).rstrip(".")
            if not text:  # no arguments: the help has been printed
                return 2
            return _complain(f"{text}. See edge-spec --help.", getattr(error, "exit_code", 2))
        raise


def _complain(text: str, status: int) -> int:
    print(f"edge-spec: {text}", file=sys.stderr)
    return status
