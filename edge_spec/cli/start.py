"""Begin and end the process of a command, handling signals before any slow import."""

from __future__ import annotations

import os
import sys
import traceback

from edge_spec.cli.signals import EndSignals, prepare_streams


def main() -> None:
    """Run the command line and end the process at once with the status of `edge_spec.cli.main.run`.

    Ending at once avoids waiting for library threads that may never end: pywebview's waits for a
    page's answer forever if the window was closed first. It also avoids a crash when a thread of
    ours returns from native code into a finalized interpreter.
    """
    signals = EndSignals()
    try:
        signals.acquire()
        prepare_streams()
        signals.watch()
        from edge_spec.cli.main import run

        status = run(sys.argv[1:], signals)
    except KeyboardInterrupt:  # during an import
        status = signals.status or 1
    except BaseException:  # unexpected, or raised again for debugging
        traceback.print_exc()
        status = 1
    signals.release()
    os._exit(status)
