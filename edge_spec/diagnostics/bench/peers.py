"""Other programs of llama.cpp as sides of a benchmark: llama-cpp-python in this process, and
llama-server, which is found on the PATH, in a process of its own. Both read the same GGUF file.

Their counts and times are of decoding alone: from the first token of an answer, which is of the
prompt's pass, to the last.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_spec.core.metrics import Stats
from edge_spec.core.model import Progress
from edge_spec.diagnostics.bench.measuring import BenchPlan, Run, SideError

_SERVER_START_S = 300.0
_END_S = 5.0  # that a server has to end by itself


@dataclass(frozen=True)
class PeerChoice:
    """gguf: what peers read; weights: its name for the report. context_length, stop_ids: tokens
    that the plan takes, and those that end an answer; `open_peers` sets them."""

    gguf: Path
    weights: str
    threads: int
    context_length: int = 0
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PeerSide:
    name: str
    version: str
    settings: str
    answer: Callable[[Sequence[int], int], Run]

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Run:
        """Raises SideError for whatever the library raises."""
        try:
            return self.answer(prompt, max_tokens)
        except Exception as error:
            raise _side_error(error) from error


@dataclass
class OpenPeer:
    """plain, looking_up: its sides, None where it cannot run: the note says why."""

    name: str
    weights: str
    plain: PeerSide | None = None
    looking_up: PeerSide | None = None
    note: str | None = None

    @property
    def sides(self) -> list[PeerSide]:
        return [side for side in (self.plain, self.looking_up) if side is not None]


@contextmanager
def open_peers(
    choice: PeerChoice, plan: BenchPlan, stop_ids: Sequence[int], progress: Progress
) -> Iterator[list[OpenPeer]]:
    """All of them, those that cannot be opened too; what was opened ends with the block."""
    choice = replace(choice, context_length=plan.context_length, stop_ids=tuple(stop_ids))
    with ExitStack() as stack:
        opened = [OpenPeer(name, choice.weights) for name in _OPENERS]
        for i, peer in enumerate(opened):
            progress("Opening other libraries", i / len(opened))
            try:
                peer.plain = _OPENERS[peer.name](choice, False, stack)
                peer.looking_up = _OPENERS[peer.name](choice, True, stack)
            except ImportError:
                peer.note = f'not installed: pip install "{peer.name}"'
            except Exception as error:  # whatever a library raises, its user hears of it
                peer.note = _side_error(error).shown
        progress("Opening other libraries", 1.0)
        yield opened


def _open_llama_cpp_python(choice: PeerChoice, lookup: bool, stack: ExitStack) -> PeerSide:
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    # Its README advises 2 draft tokens on a CPU.
    draft = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=2) if lookup else None
    model = llama_cpp.Llama(
        str(choice.gguf),
        n_ctx=choice.context_length,
        n_threads=choice.threads,
        n_threads_batch=choice.threads,
        draft_model=draft,
        verbose=False,
    )
    stack.callback(model.close)

    def answer(prompt: Sequence[int], max_tokens: int) -> Run:
        found: list[int] = []
        times: list[float] = []
        for token in model.generate(list(prompt), temp=0.0):
            times.append(time.perf_counter())
            found.append(token)
            if token in choice.stop_ids or len(found) >= max_tokens:
                break
        seconds, count = times[-1] - times[0], len(found) - 1
        stats = Stats(predicted_n=count, predicted_ms=seconds * 1e3)
        return Run(tuple(found), count, seconds, stats)

    settings = "LlamaPromptLookupDecoding, 2 draft tokens, " if lookup else ""
    name = f"llama-cpp-python {'lookup' if lookup else 'plain'}"
    return PeerSide(name, llama_cpp.__version__, f"{settings}threads: {choice.threads}", answer)


def _open_llama_server(choice: PeerChoice, lookup: bool, stack: ExitStack) -> PeerSide:
    """Starts the server on a port of this machine, with one slot, and tells it tokens."""
    program = shutil.which("llama-server")
    if program is None:
        raise FileNotFoundError("llama-server is not on the PATH")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own, threads = ["--spec-default"] if lookup else [], str(choice.threads)
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"version: (.+)", said.stdout + said.stderr)
    server = subprocess.Popen(
        [
            *(program, "-m", str(choice.gguf), "-c", str(choice.context_length), "-np", "1", *own),
            *("-t", threads, "-tb", threads, "--host", "127.0.0.1", "--port", port),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    stack.callback(_end, server)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + _SERVER_START_S
    while not _is_ready(url):
        if server.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{program} did not start")
        time.sleep(0.05)

    def answer(prompt: Sequence[int], max_tokens: int) -> Run:
        asked = {"prompt": list(prompt), "n_predict": max_tokens, "temperature": 0}
        body = json.dumps({**asked, "cache_prompt": False, "return_tokens": True}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/completion", body, headers)
        ) as told:
            found = json.load(told)
        # predicted_ms begins with the first token of the answer.
        timings: Mapping[str, Any] = found["timings"]
        count = timings["predicted_n"] - 1
        accepted = timings.get("draft_n_accepted", 0)
        stats = Stats(
            predicted_n=count,
            predicted_ms=timings["predicted_ms"],
            rounds=count - accepted if lookup else 0,
            draft_n=timings.get("draft_n", 0),
            draft_n_accepted=accepted,
        )
        return Run(tuple(found["tokens"]), count, stats.predicted_ms / 1e3, stats)

    settings = " ".join([*own, f"threads: {threads}"])
    name = f"llama-server {'lookup' if lookup else 'plain'}"
    return PeerSide(name, version[1].strip() if version else "unknown", settings, answer)


_OPENERS: dict[str, Callable[[PeerChoice, bool, ExitStack], PeerSide]] = {
    "llama-cpp-python": _open_llama_cpp_python,
    "llama-server": _open_llama_server,
}


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health"):
            return True
    except OSError:  # refused, or 503 while it loads
        return False


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_END_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _side_error(error: Exception) -> SideError:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return SideError(text, remedy="Leave --peers out to measure without it.")
