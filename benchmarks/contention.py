"""What is left of the rate of plain steps beside processes that keep a core busy.

    python benchmarks/contention.py --runtimes ort,llamacpp,ik --busy 0,1,2

Sessions that adapt their threads and sessions that do not take turns, one after the other, for some
seconds each. The share is that of each session's own rate with nothing else running.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import ExitStack, closing
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from common import open_engine, report

from edge_spec.core.tree import TokenTree

_PROMPT, _LONGEST = 64, 400  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtimes", default="ort,llamacpp,ik")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", default="0,1,2", help="numbers of busy processes")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    busy = [int(number) for number in arguments.busy.split(",")]
    with ExitStack() as opened:
        sessions = {}
        for runtime in arguments.runtimes.split(","):
            engine = opened.enter_context(
                open_engine(
                    arguments.model, runtime=runtime, drafter="none", threads=arguments.threads
                )
            )
            for adapts in (True, False):
                session: Any = opened.enter_context(closing(engine.parts.model.open_session()))
                if not adapts:
                    session._threads = None
                sessions[runtime, adapts] = session
        rates = {number: beside(number, sessions, arguments.seconds) for number in busy}
    found = {
        f"{runtime}{'' if adapts else ', fixed threads'}": {
            str(number): rates[number][runtime, adapts] for number in busy
        }
        for runtime, adapts in sessions
    }
    for name, by_number in found.items():
        quiet = by_number[str(busy[0])]
        told = [f"{number}: {rate:.1f} ({rate / quiet:.0%})" for number, rate in by_number.items()]
        print(f"{name}: plain steps a second beside {', '.join(told)}", flush=True)
    report(found, arguments.json)


def beside(number: int, sessions: dict[Any, Any], seconds: float) -> dict[Any, float]:
    """Steps a second of each session beside so many processes that do nothing but compute."""
    ended = multiprocessing.Event()
    processes = [multiprocessing.Process(target=_compute, args=(ended,)) for _ in range(number)]
    for process in processes:
        process.start()
    try:
        return {key: _steps(session, seconds) for key, session in sessions.items()}
    finally:
        ended.set()
        for process in processes:
            process.join()


def _steps(session: Any, seconds: float) -> float:
    session.rollback(0)
    session.prefill(range(100, 100 + _PROMPT))
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        if session.length > _LONGEST:
            session.rollback(_PROMPT)
        session.forward(TokenTree.chain(5))
        session.commit([0])
        count += 1
    return count / (time.perf_counter() - started)


def _compute(ended: Event) -> None:
    number = 0
    while not ended.is_set():
        for _ in range(10_000):
            number += 1


if __name__ == "__main__":
    main()
