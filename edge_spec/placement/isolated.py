"""Work that may crash or hang, such as starting a driver, done in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from json import dumps, loads
from typing import Any

_MARK = "edge-spec answers: "  # libraries may print, too
_MAX_LINE = 200  # characters of each of the two lines that a library printed last


class IsolatedError(Exception):
    """The work failed, crashed or took too long; `str()` is the reason, one line."""


def isolated(work: Callable[..., Any], *arguments: str, timeout_s: float) -> Any:
    """What `work`, a function of a module, returns, as JSON has it. Raises IsolatedError."""
    code = (
        f"from {work.__module__} import {work.__qualname__} as work; "
        "from edge_spec.placement.isolated import answer; answer(work)"
    )
    # -P: or a file in the working directory could stand in for a module.
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}  # which would start a debugger
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise IsolatedError(f"there was no answer within {timeout_s:g} s") from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not answers:
        raise IsolatedError(_crash(done))
    outcome = loads(answers[-1].removeprefix(_MARK))
    if "reason" in outcome:
        raise IsolatedError(outcome["reason"])
    return outcome["result"]


def answer(work: Callable[..., Any]) -> None:
    """What the other process runs: prints the outcome, after which it may crash as it likes."""
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    try:
        outcome = {"result": work(*sys.argv[1:])}
    except Exception as error:
        outcome = {"reason": " ".join(str(error).split()) or type(error).__name__}
    print(f"\n{_MARK}{dumps(outcome)}", flush=True)


def _crash(done: subprocess.CompletedProcess[str]) -> str:
    lines = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
    last = "; ".join(line[:_MAX_LINE] for line in lines[-2:]) or "it printed nothing"
    how = f"exit status {done.returncode}"
    if done.returncode < 0:
        how = signal.Signals(-done.returncode).name
    return f"the library ended the process ({how}): {last}"
