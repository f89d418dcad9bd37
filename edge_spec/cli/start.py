"""Where the process of a command begins and ends: signals are handled before anything that takes
time is imported."""

from __future__ import annotations

import sys

from edge_spec.cli.signals import EndSignals, end_soon, prepare_streams


def main() -> None:
    """Ends the process with the exit status of `edge_spec.cli.main.run`."""
    signals = EndSignals()
    status = 1  # of errors that are raised, to debug
    try:
        signals.take()
        prepare_streams()
        from edge_spec.cli.main import run

        status = run(sys.argv[1:], signals)
    except KeyboardInterrupt:  # while importing
        status = signals.status or 1
    finally:
        end_soon(status)
    sys.exit(status)
