"""How commands end early: by a signal, or because a stream is closed. Each signal is sent when the
command has said something, and what it then does cannot end by itself."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fixtures.tiny_models import build, write_gguf

termios = pytest.importorskip("termios", reason="needs signals and terminals of POSIX")
import pty  # noqa: E402

pytestmark = pytest.mark.model

TIMEOUT_S = 60.0
NEXT_S = 0.05  # from one signal to the next: a storm of them would let the process do nothing else
TINY = "TINY"  # stands for the file's path
REFERENCE = ["--runtime", "reference"]  # starts soonest
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
Start = Callable[..., subprocess.Popen[bytes]]


def slow(*values: object) -> Any:
    """A row of parameters beside a faster one."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A GGUF file of a model that answers at once."""
    return str(write_gguf(build(), tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def start(command: list[str], converted: None) -> Iterator[Start]:
    """Starts `edge-spec ARGUMENTS`, all of whose streams are pipes."""
    started = []

    def run(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[bytes], number: int) -> tuple[int, bytes]:
    """The exit status after a signal, and what was still written to standard error."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, errors


def until_it_reads(process: subprocess.Popen[bytes]) -> None:
    """Its standard input, where the system tells what a process waits for."""
    call = Path(f"/proc/{process.pid}/syscall")
    while call.exists() and process.poll() is None:
        if call.read_text().split()[1:2] == ["0x0"]:  # the first argument, a file's number
            return


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGHUP]
)
def test_a_chat_that_waits_for_a_message_is_ended(start: Start, tiny: str, number: int) -> None:
    process = start("chat", tiny, *REFERENCE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"/draft\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith(b"Speculation")
    until_it_reads(process)  # until then Ctrl-C only stops the command
    assert ended(process, number) == (128 + number, b"")


@pytest.mark.parametrize(("number", "status"), [slow(2, 130), (15, 0)])
def test_a_server_is_ended_as_soon_as_it_says_that_it_serves(
    start: Start, tiny: str, number: int, status: int
) -> None:
    process = start("serve", tiny, "--port", "0", "--json", "--parallel", "1", *REFERENCE)
    assert process.stdout is not None and process.stdout.readline().startswith(b"{")
    assert ended(process, number) == (status, b"")


@pytest.mark.parametrize(("number", "status"), [slow(2, 130), (15, 0), slow(1, 129)])
def test_a_sidecar_is_ended(start: Start, tiny: str, number: int, status: int) -> None:
    process = start("serve", tiny, "--stdio", *REFERENCE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "stats"}\n')
    process.stdin.flush()
    assert b'"id"' in process.stdout.readline()
    process.send_signal(number)
    assert process.wait(TIMEOUT_S) == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", TINY, "--repeat", "50", *REFERENCE],
        slow(["plan", "smollm2", "--refresh"]),
        slow(["export", "smollm2", "out/bundle"]),
        ["export", "smollm2", "out/model.gguf", "--format", "gguf", "--quant", "Q8_0"],
    ],
    ids=lambda arguments: " ".join(arguments[:1] + arguments[3:4]),
)
def test_long_work_is_ended_and_leaves_nothing(
    start: Start, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    process = start(*(tiny if argument == TINY else argument for argument in arguments))
    assert process.stderr is not None and process.stderr.readline().endswith(b"...\n")
    status, errors = ended(process, signal.SIGTERM)
    assert status == 143
    # Steps, and no complaint.
    assert all(line.endswith(b"...") for line in errors.splitlines())
    assert not list((tmp_path / "out").iterdir())


SLOW = """
import sys
print("importing", flush=True)
sys.stdin.read()
"""
HANGS = """
import sys
try:
    print("importing", flush=True)
    sys.stdin.read()
finally:
    print("ending", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_command_that_is_still_being_imported_is_ended(
    start: Start, tmp_path: Path, number: int
) -> None:
    (tmp_path / "typer.py").write_text(SLOW)
    process = start("--help", PYTHONPATH=str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    assert ended(process, number) == (128 + number, b"")


def test_a_second_signal_ends_what_does_not_end_by_itself(start: Start, tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(HANGS)
    process = start("--help", PYTHONPATH=str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == b"importing\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == b"ending\n"
    assert ended(process, signal.SIGINT) == (-signal.SIGINT, b"")


def test_a_reader_that_leaves_ends_a_command_without_a_word(start: Start, tiny: str) -> None:
    for arguments in (["--help"], ["generate", tiny, "a", "--raw", *REFERENCE]):
        process = start(*arguments)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(TIMEOUT_S) == 141


def in_shell(command: list[str], redirections: str, *arguments: str) -> tuple[int, str]:
    """The exit status and standard error."""
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirections}', "sh", *command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&-", "2>&-"])
def test_closed_streams_are_as_empty_ones(command: list[str], tiny: str, closed: str) -> None:
    answered = ("generate", tiny, "a", "--raw", "--max-tokens", "2", *REFERENCE)
    assert in_shell(command, closed, *answered) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_one_line(command: list[str]) -> None:
    status, errors = in_shell(command, "> /dev/full", "--help")
    assert status == 1 and "No space left" in errors and errors.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGHUP])
def test_a_terminal_is_as_it_was_before(command: list[str], tiny: str, number: int) -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(
        [*command, "chat", tiny, *REFERENCE],
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm"},
    ) as process:
        try:
            shown, answered = b"", 0
            while b"acc" not in shown and b"| tiny" not in shown:  # the line below the input
                assert select.select([ours], [], [], TIMEOUT_S)[0], shown
                shown += os.read(ours, 65536)
                if shown.count(b"\x1b[6n") > answered:  # where the cursor is
                    os.write(ours, b"\x1b[1;1R")
                    answered += 1
            assert termios.tcgetattr(theirs) != before
            status, errors = ended(process, number)
            assert (status, errors) == (128 + number, b"")
        finally:
            process.kill()  # or a failure would wait for it
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


# What stands for a command: `run` is called in place of `edge_spec.cli.main.run`.
STARTED = """
import atexit, ctypes, os, signal, sys
from threading import Event, Thread
from edge_spec.cli import main, start
{}
main.run = run
start.main()
"""


Python = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def python() -> Iterator[Python]:
    """Starts a command that is written in Python."""
    started = []

    def run(code: str) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", STARTED.format(code)]
        started.append(subprocess.Popen(command, stdout=pipe, stderr=pipe))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_a_thread_of_a_library_that_never_ends_does_not_keep_the_process(python: Python) -> None:
    process = python("run = lambda *_: Thread(target=Event().wait).start() or 7")
    assert process.wait(TIMEOUT_S) == 7


def test_a_thread_of_ours_in_a_library_does_not_meet_the_end_of_the_interpreter(
    python: Python,
) -> None:
    process = python("""
def run(*_):
    atexit.register(print, "taken apart")
    Thread(target=Event().wait, name="edge-spec-pass", daemon=True).start()
    print("done", flush=True)
    return 7
""")
    assert process.communicate(timeout=TIMEOUT_S) == (b"done\n", b"")
    assert process.returncode == 7


def test_a_signal_within_a_librarys_callback_is_heard(python: Python) -> None:
    process = python("""
from edge_spec.runtimes.llamacpp.library import LibraryLog

def run(arguments, signals):
    log = LibraryLog("test")
    log._logger.log = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    try:
        log.callback(3, b"a line\\n", None)  # what is raised in there is lost
        Event().wait()
    except KeyboardInterrupt:
        return signals.status
""")
    assert process.communicate(timeout=TIMEOUT_S) == (b"", b"")
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)  # wherever it was


@pytest.mark.skipif(sys.platform != "linux", reason="a zeroed mutex is one of Linux")
def test_a_second_signal_ends_a_process_whose_library_does_not_return(python: Python) -> None:
    process = python("""
mutex = ctypes.create_string_buffer(128)

def tell():
    while mutex[0] != b"\\2":  # glibc's word for a lock that somebody waits for
        pass
    print("in", flush=True)

def run(*_):
    library = ctypes.CDLL(None)
    Thread(target=tell, daemon=True).start()
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)
""")
    assert process.stdout is not None and process.stdout.readline() == b"in\n"
    process.send_signal(signal.SIGTERM)
    status, errors = ended(process, signal.SIGINT)
    assert status in (128 + signal.SIGTERM, 128 + signal.SIGINT)  # they may be told in any order
    assert errors == b""


@pytest.mark.slow  # beside a library that does not return
def test_a_server_whose_model_hangs_is_ended_by_a_third_signal(python: Python, tiny: str) -> None:
    process = python(f"""
from edge_spec.engine.engine import Engine

def hang(*_, **settings):
    print("in", flush=True)
    Event().wait()

Engine.generate = hang
sys.argv = ["edge-spec", "serve", {tiny!r}, "--port", "0", "--json", *{REFERENCE!r}]
run = main.run
""")
    assert process.stdout is not None
    port = json.loads(process.stdout.readline())["port"]
    with socket.create_connection(("127.0.0.1", port)) as asking:
        body = b'{"prompt": "x", "max_tokens": 5}'
        asking.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        assert process.stdout.readline() == b"in\n"
        while process.poll() is None:  # the first two are handled, in their time
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(NEXT_S)
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)  # wherever it was
