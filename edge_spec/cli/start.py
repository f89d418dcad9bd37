"""Begins and ends the process of a command: signals are handled before anything that takes time is
imported."""

from __future__ import annotations

import os
import sys
import threading
import time

from edge_spec.cli.signals import EndSignals, prepare_streams

_THREADS_END_S = 2.0  # for those of libraries that are left when a command is done
_WITHIN_LIBRARIES = "edge-spec-"  # begins the names of our daemon threads that call runtimes


def main() -> None:
    """Ends the process with the exit status of `edge_spec.cli.main.run`."""
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
        _end_soon(1)
        raise
    signals.release()
    if any(
        each.daemon and each.name.startswith(_WITHIN_LIBRARIES) for each in threading.enumerate()
    ):
        # It would take the process down when it comes back to an interpreter that is no more.
        os._exit(status)
    _end_soon(status)
    sys.exit(status)


def _end_soon(status: int) -> None:
    """The process, whose command is done, ends even where a thread of a library never does.

    pywebview's, for one, waits for a page's answer for good where the window is closed before it.
    """
    threading.Thread(target=_end_by_force, args=(status,), daemon=True).start()


def _end_by_force(status: int) -> None:
    """Is not reached where the process has ended, nor does it cut off what is done at its end."""
    time.sleep(_THREADS_END_S)
    left = (thread for thread in threading.enumerate() if not thread.daemon)
    if any(thread is not threading.main_thread() for thread in left):
        os._exit(status)
