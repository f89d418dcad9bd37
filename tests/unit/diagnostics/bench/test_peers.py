"""Processes of other libraries: what they may do wrong, and how they end."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from edge_spec.diagnostics.bench.measuring import BenchPlan, SideError, Task
from edge_spec.diagnostics.bench.peers import PeerChoice, PeerProcess, open_peers, parse_choices
from edge_spec.errors import UsageError
from edge_spec.text.prompt_files import Prompt

pytestmark = pytest.mark.skipif(os.name != "posix", reason="stands in for a Python by a script")

GREETING = 'print(\'{"version": "1", "settings": "none"}\', flush=True)\n'
ANSWER = 'print(\'{"tokens": [4, 5], "num_tokens": 1, "seconds": 0.5}\', flush=True)\n'


def interpreter(tmp_path: Path, body: str) -> str:
    """A stand-in for a Python with a library: it runs `body` whatever script it is given."""
    path = tmp_path / "python"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\nsys.stdin.readline()\n{body}")
    path.chmod(0o755)
    return str(path)


def plan() -> BenchPlan:
    return BenchPlan([Task(Prompt("1", "a", "x"), (1, 2))], [], (3,), 4, 1, room=64)


def stat(side: PeerProcess) -> str:
    return Path(f"/proc/{side._process.pid}/stat").read_text().split()[2]


def test_an_answer_becomes_a_run(tmp_path: Path) -> None:
    python = interpreter(tmp_path, GREETING + "for line in sys.stdin:\n    " + ANSWER)
    side = PeerProcess("other plain", python, "any", {})
    run = side.decode([1, 2, 3], 8)
    assert (run.tokens, run.num_tokens, run.seconds) == ((4, 5), 1, 0.5)
    assert run.stats.mean_accepted_length is None  # it has not told
    side.close()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_is_not_asked_takes_no_time(tmp_path: Path) -> None:
    spins = GREETING + "while True: pass\n"
    side = PeerProcess("other plain", interpreter(tmp_path, spins), "any", {})
    deadline = time.monotonic() + 60
    while stat(side) != "T" and time.monotonic() < deadline:
        pass
    assert stat(side) == "T"
    side._process.kill()  # `close` would wait for it
    side.close()


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("sys.exit('no such\\nthing: x')", "ended with status 1: thing: x"),
        ("os.kill(os.getpid(), 11)", "ended with status -11: it said nothing"),
        ('print(\'{"error": "ValueError: odd"}\', flush=True)', "ValueError: odd"),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(tmp_path: Path, body: str, told: str) -> None:
    with pytest.raises(SideError, match=told):
        PeerProcess("other plain", interpreter(tmp_path, body), "any", {})
    side = PeerProcess(
        "other plain",
        interpreter(tmp_path, GREETING + f"sys.stdin.readline()\n{body}\n"),
        "any",
        {},
    )
    with pytest.raises(SideError, match=told):
        side.decode([1], 1)
    side.close()


def test_a_library_that_is_not_installed_is_listed_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = 'print(\'{"error": "No module named x", "missing": true}\', flush=True)'
    python = interpreter(tmp_path, absent)
    names = ("llamacpp", "llama-cpp-python", "onnxruntime-genai", "openvino-genai")
    choice = PeerChoice(Path("a.gguf"), "a", {}, dict.fromkeys(names, python), threads=1)
    with open_peers(choice, plan(), [0], lambda what, fraction: None) as opened:
        notes = {each.peer.name: each.note for each in opened}
        assert not any(each.sides for each in opened)
    assert notes == {
        "llamacpp": 'not installed: pip install "edge-spec[llamacpp]"',
        "llama-cpp-python": 'not installed: pip install "llama-cpp-python"',
        "llama-server": "not found: give --peer-python llama-server=PROGRAM",
        "onnxruntime-genai": "needs --peer-model onnxruntime-genai=DIRECTORY",
        "openvino-genai": 'not installed: pip install "openvino-genai"',
    }


def test_choices_name_libraries_and_what_is_there(tmp_path: Path) -> None:
    found = parse_choices("--peer-python", [f"openvino-genai={sys.executable}"])
    assert found == {"openvino-genai": sys.executable}
    assert Path(parse_choices("--peer-python", ["llamacpp=sh"])["llamacpp"]).is_absolute()
    for value in ("vllm=x", "openvino-genai", f"={tmp_path}"):
        with pytest.raises(UsageError, match="names no other library"):
            parse_choices("--peer-model", [value])
    with pytest.raises(UsageError, match="there is no"):
        parse_choices("--peer-model", [f"openvino-genai={tmp_path / 'missing'}"])


def test_an_interpreter_that_does_not_run_is_told(tmp_path: Path) -> None:
    path = tmp_path / "python"
    path.write_text("no program")
    with pytest.raises(SideError, match="python does not run"):
        PeerProcess("other plain", str(path), "any", {})


SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
if "--version" in sys.argv:
    sys.exit(print("version: 7 (abc)", file=sys.stderr))
words = [word for word in sys.argv[1:] if word != "--spec-default"]
options = dict(zip(words[::2], words[1::2]))
class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({})
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/completion" and asked["temperature"] == 0
        assert options["-t"] == options["-tb"] == "3" and options["-m"] == "a.gguf"
        timings = {"predicted_n": 5, "predicted_ms": 2000.0}
        if "--spec-default" in sys.argv:
            timings |= {"draft_n": 6, "draft_n_accepted": 2}
        self.answer({"tokens": asked["prompt"], "timings": timings})
    def answer(self, document):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(options["--port"])), Answers).serve_forever()
"""


def test_a_server_is_asked_by_tokens_and_ends_with_its_side(tmp_path: Path) -> None:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(0o755)
    choice = PeerChoice(Path("a.gguf"), "a", {}, {"llama-server": str(path)}, threads=3)
    others = {name: "/bin/false" for name in ("llamacpp", "llama-cpp-python", "openvino-genai")}
    choice = replace(choice, programs={**others, **choice.programs})
    with open_peers(choice, plan(), [0], lambda what, fraction: None, "llamacpp") as opened:
        [server] = [each for each in opened if each.peer.name == "llama-server"]
        assert "llamacpp" not in [each.peer.name for each in opened]
        assert server.plain is not None and server.looking_up is not None, server.note
        assert server.plain.version == "7 (abc)"
        run = server.plain.decode([7, 8], 5)
        assert (run.tokens, run.num_tokens, run.seconds) == ((7, 8), 4, 2.0)
        drafted = server.looking_up.decode([7], 5).stats
        assert (drafted.draft_n, drafted.draft_n_accepted, drafted.rounds) == (6, 2, 2)
        groups = [side._process.pid for side in server.sides]
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)
