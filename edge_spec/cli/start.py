"""Begins and ends the process of a command: signals are handled before anything that takes time is
imported."""

from __future__ import annotations

import os
import sys
import traceback

from edge_spec.cli.signals import EndSignals, prepare_streams


def main() -> None:
    """End the process with the exit status of `edge_spec.cli.main.run`.

    It ends at once. A thread of a library may never end: pywebview's waits for a page's answer for
    good where the window is closed before it. And a thread of ours that is within a library would
    take the process down when it comes back to an interpreter that is no more.
    """
    signals = EndSignals()
    try:
        signals.acquire()
        prepare_streams()
        signals.watch()
        from edge_spec.cli.main import run

        status = run(sys.argv[1:], signals)
    except KeyboardInterrupt:  # while importing
        status = signals.status or 1
    except BaseException:  # to debug
        traceback.print_exc()
        status = 1
    signals.release()
    os._exit(status)
