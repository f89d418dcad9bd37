"""The thread that makes all passes of llama.cpp on a processor."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_native_id
from typing import Any

import pytest

pytest.importorskip("llama_cpp")

from edge_spec.core import turns
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import compute_thread
from edge_spec.runtimes.llamacpp.compute_thread import Worker, in_compute_thread

_MOST_S = 60.0  # for what takes milliseconds, on a machine that is busy


def open_model(path: Path, threads: int = 2) -> Any:
    source = runtimes.open_model_info(path)
    options = RuntimeOptions(threads=threads, providers=("cpu",))
    return runtimes.load_runtime("llamacpp").open(source, options)


@pytest.fixture
def decoding_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the threads that do what is asked for."""
    call, seen = Worker.call, []

    def noting(worker: Worker, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        def noted(*arguments: Any) -> Any:
            seen.append(get_native_id())
            return function(*arguments)

        return call(worker, noted, arguments)

    monkeypatch.setattr(Worker, "call", noting)
    return seen


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_passes_that_several_threads_ask_for_are_made_by_one(
    decoding_threads: list[int], gguf: Callable[..., Path]
) -> None:
    """Each thread of its own would have a pool of OpenMP's, and all pools would sleep."""
    model = open_model(gguf())
    sessions = [model.open_session() for _ in range(3)]
    callers: set[int] = set()

    def write(number: int) -> None:
        callers.add(get_native_id())
        sessions[number].prefill([1, 2, 3])
        for token in range(3):
            sessions[number].forward(TokenTree.chain(token))
            sessions[number].commit([0])

    in_threads(3, write)
    write(0)
    assert len(decoding_threads) == 4 * 4 and len(set(decoding_threads)) == 1
    assert not callers & set(decoding_threads)
    model.close()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows interrupts no wait")
def test_an_interrupt_comes_after_the_pass_that_runs() -> None:
    seen = []

    def interrupted() -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        seen.append("ended")

    with pytest.raises(KeyboardInterrupt):
        in_compute_thread(interrupted)
    assert seen == ["ended"]
    assert in_compute_thread(lambda: 5) == 5


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="Windows interrupts no wait")
def test_a_pass_that_waits_for_its_turn_is_given_up_by_an_interrupt() -> None:
    """It would write to a session that its caller has left."""
    runs, free, given_up, begun = Event(), Event(), Event(), []

    def first() -> None:
        runs.set()
        assert free.wait(_MOST_S)

    def second() -> None:
        begun.append(True)

    other = Thread(target=in_compute_thread, args=(first,))
    other.start()
    assert runs.wait(_MOST_S)
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not turns.is_waiting(main):
            pass
        while not given_up.is_set():  # a lock in CPython misses a signal just before it blocks
            signal.pthread_kill(main, signal.SIGINT)
            given_up.wait(1.0)

    interrupter = Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        in_compute_thread(second)
    given_up.set()
    assert not turns.is_waiting(main)
    interrupter.join()
    free.set()
    other.join()
    assert in_compute_thread(lambda: 5) == 5
    assert not begun


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_forked_process_makes_passes_of_its_own(gguf: Callable[..., Path]) -> None:
    """The thread of the parent is not in it, and OpenMP's pool of that neither."""
    model = open_model(gguf())
    session = model.open_session()
    expected = session.forward(TokenTree.chain(1, [2, 3])).logits.copy()
    child = os.fork()
    if not child:
        try:
            found = session.forward(TokenTree.chain(1, [2, 3])).logits
            os._exit(0 if (found == expected).all() else 3)
        except BaseException:
            os._exit(4)
    until = time.monotonic() + _MOST_S
    ended, status = 0, 0
    while not ended and time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended and os.waitstatus_to_exitcode(status) == 0
    assert (session.forward(TokenTree.chain(1, [2, 3])).logits == expected).all()
    model.close()


def test_a_worker_that_is_lost_frees_its_caller() -> None:
    worker = Worker("lost")
    stays = Event()

    def fault() -> None:
        found = compute_thread.current_worker()
        assert found is worker
        found.lose()
        stays.wait(_MOST_S)

    assert worker.call(fault, ()) is None
    assert worker.is_lost
    stays.set()
