"""Other libraries as sides of a benchmark, each in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Progress
from edge_spec.diagnostics.bench.measuring import BenchPlan, Run, SideError
from edge_spec.errors import UsageError

_SCRIPT = Path(__file__).with_name("peer.py")
_END_S = 5.0  # that a process has to end by itself
# Ctrl-C reaches this process alone. Should this one be killed, the system wakes and ends those of
# its children's groups that are stopped.
_OWN_GROUP: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}


@dataclass(frozen=True)
class Peer:
    """install: what pip is asked for; "" where it is a program by itself, which is then looked for
    by the peer's name. looks_up: it has a side with speculation, too."""

    name: str  # in peer.py
    install: str
    looks_up: bool = True
    reads_gguf: bool = True


PEERS = (
    Peer("llamacpp", "edge-spec[llamacpp]", looks_up=False),
    Peer("llama-cpp-python", "llama-cpp-python"),
    Peer("llama-server", ""),
    Peer("onnxruntime-genai", "onnxruntime-genai", reads_gguf=False),
    Peer("openvino-genai", "openvino-genai"),
)


@dataclass(frozen=True)
class PeerChoice:
    """gguf: what peers read that read GGUF files; weights: its name for the report. models,
    programs: by peer, what it reads instead, and the interpreter that has it, if not this one, or
    the program that it is."""

    gguf: Path
    weights: str
    models: Mapping[str, str]
    programs: Mapping[str, str]
    threads: int


@dataclass
class OpenPeer:
    """plain, looking_up: its sides, None where it has no such or cannot run: the note says why."""

    peer: Peer
    weights: str
    plain: PeerProcess | None = None
    looking_up: PeerProcess | None = None
    note: str | None = None

    @property
    def sides(self) -> list[PeerProcess]:
        return [side for side in (self.plain, self.looking_up) if side is not None]


class _MissingError(SideError):
    """The library is not installed."""


class PeerProcess:
    """A side that is a process. Between two answers it is stopped, so that no thread of it spins
    while others are measured, where the system can stop processes."""

    def __init__(self, name: str, python: str, peer: str, job: Mapping[str, Any]) -> None:
        """Raises SideError where the library or the interpreter is missing, or the model cannot be
        opened."""
        self.name = name
        self._errors: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115, closed by `close`
            "w+", encoding="utf-8", errors="replace"
        )
        try:
            self._process = self._start(python, peer)
        except OSError as error:
            self._errors.close()
            raise self._error(f"{python} does not run: {error}") from None
        try:
            about = self._ask(job)
        except BaseException:
            self.close()
            raise
        self.version, self.settings = str(about["version"]), str(about["settings"])

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        answer = self._ask({"prompt": list(prompt), "max_tokens": max_tokens})
        stats = Stats(
            predicted_n=answer["num_tokens"],
            predicted_ms=answer["seconds"] * 1e3,
            rounds=answer.get("rounds", 0),
            draft_n=answer.get("draft_n", 0),
            draft_n_accepted=answer.get("draft_n_accepted", 0),
        )
        return Run(tuple(answer["tokens"]), answer["num_tokens"], answer["seconds"], stats)

    def close(self) -> None:
        """Ends the process and those that it started, at the latest after _END_S."""
        self._signal("SIGCONT")
        try:
            self._process.communicate(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._signal("SIGKILL")
        self._errors.close()

    def _start(self, python: str, peer: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [python, str(_SCRIPT), peer],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
            # Modules beside the script have common names.
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            **_OWN_GROUP,
        )

    def _ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Raises SideError for an answer that is an error, or none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._signal("SIGCONT")
        with suppress(BrokenPipeError):  # it has ended: there is no answer either
            print(json.dumps(question), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise self._error(f"it ended with status {self._process.wait()}: {self._last_words()}")
        self._signal("SIGSTOP")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise self._error(
                answer["error"], _MissingError if answer.get("missing") else SideError
            )
        return answer

    def _error(self, text: str, kind: type[SideError] = SideError) -> SideError:
        return kind(" ".join(text.split()), remedy="Leave --peers out to measure without it.")

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1] if lines else "it said nothing"

    def _signal(self, name: str) -> None:
        """Reaches the process's whole group: a server may be among it."""
        number = getattr(signal, name, None)  # Windows has none of them
        if number is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


@contextmanager
def open_peers(
    choice: PeerChoice,
    plan: BenchPlan,
    stop_ids: Sequence[int],
    progress: Progress,
    own_runtime: str = "",
) -> Iterator[list[OpenPeer]]:
    """All of PEERS, those that cannot be opened too, but for our own runtime, which is measured as
    ours; their processes end with the block."""
    peers = [peer for peer in PEERS if peer.name != own_runtime]
    with ExitStack() as stack:
        opened = []
        for i, peer in enumerate(peers):
            progress("Opening other libraries", i / len(peers))
            opened.append(_open(peer, choice, plan, stop_ids, stack))
        progress("Opening other libraries", 1.0)
        yield opened


def _open(
    peer: Peer, choice: PeerChoice, plan: BenchPlan, stop_ids: Sequence[int], stack: ExitStack
) -> OpenPeer:
    model = choice.models.get(peer.name)
    if model is None and not peer.reads_gguf:
        return OpenPeer(peer, "", note=f"needs --peer-model {peer.name}=DIRECTORY")
    opened = OpenPeer(peer, Path(model).name if model else choice.weights)
    python = choice.programs.get(peer.name, sys.executable)
    program = None
    if not peer.install:
        program, python = choice.programs.get(peer.name) or shutil.which(peer.name), sys.executable
        if program is None:
            opened.note = f"not found: give --peer-python {peer.name}=PROGRAM"
            return opened
    job = {
        "program": program,
        "model": model or str(choice.gguf),
        "threads": choice.threads,
        "context": plan.context_length,
        "stop_ids": list(stop_ids),
    }
    try:
        opened.plain = PeerProcess(f"{peer.name} plain", python, peer.name, job | {"lookup": False})
        stack.callback(opened.plain.close)
        if peer.looks_up:
            name = f"{peer.name} lookup"
            opened.looking_up = PeerProcess(name, python, peer.name, job | {"lookup": True})
            stack.callback(opened.looking_up.close)
    except _MissingError:
        opened.note = f'not installed: pip install "{peer.install}"'
    except SideError as error:
        opened.note = error.shown
    return opened


def parse_choices(option: str, values: Sequence[str]) -> dict[str, str]:
    """NAME=PATH of each; raises UsageError for an unknown name or a path that is not there."""
    names = [peer.name for peer in PEERS]
    chosen = {}
    for value in values:
        name, separator, path = value.partition("=")
        if not separator or name not in names:
            raise UsageError(
                f"{option} {value} names no other library",
                remedy=f"Give NAME=PATH, NAME being one of {', '.join(names)}.",
            )
        found = path if Path(path).exists() else shutil.which(path)
        if not found:
            raise UsageError(f"{option}: there is no {path}", remedy="Check the path.")
        chosen[name] = found
    return chosen
