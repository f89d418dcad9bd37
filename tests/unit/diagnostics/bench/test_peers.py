"""llama-server as two sides: what it answers, and how it ends."""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path

import pytest

from edge_spec.diagnostics.bench import measuring as peers
from edge_spec.diagnostics.bench.measuring import BenchPlan, Task, open_peer
from edge_spec.text.prompt_files import Prompt

PLAN = BenchPlan([Task(Prompt("1", "a", "x"), (1, 2))], [], (3,), 4, 1, room=64)


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


@pytest.mark.skipif(os.name != "posix", reason="stands in for a program by a script")
def test_a_server_is_asked_by_tokens_and_ends_with_its_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "llama-server"
    path.write_text(f"#!{sys.executable}\n{SERVER}")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    asked: list[str] = []
    monkeypatch.setattr(
        peers, "_is_ready", lambda url, ready=peers._is_ready: asked.append(url) or ready(url)
    )
    with open_peer(Path("a.gguf"), "a", 3, PLAN) as server:
        assert len(server.sides) == 2, server.note
        plain, drafting = server.sides
        assert server.version == "7 (abc)"
        run = plain.answer([7, 8], 5)
        assert (run.tokens, run.num_tokens, run.seconds) == ((7, 8), 4, 2.0)
        drafted = drafting.answer([7], 5).stats
        assert (drafted.draft_n, drafted.draft_n_accepted, drafted.rounds) == (6, 2, 2)
    for url in set(asked):
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{url}/health")


def test_a_server_that_is_not_here_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with open_peer(Path("a.gguf"), "a", 3, PLAN) as server:
        assert not server.sides and "not on the PATH" in str(server.note)
