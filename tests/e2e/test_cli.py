"""What the command line promises: answers, JSON, one-line errors, exit statuses, pipes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from edge_spec.cli.main import run

pytestmark = pytest.mark.model

FAR = ["--max-tokens", "24"]


def test_generate_answers_on_stdout_alone(edge_spec):
    done = edge_spec("generate", "Name the capital of France.", *FAR)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_the_version_is_that_of_the_package(edge_spec):
    assert edge_spec("--version").stdout == f"edge-spec {metadata.version('edge-spec')}\n"


def test_the_prompt_can_come_through_a_pipe(edge_spec):
    done = edge_spec("generate", "-", *FAR, text="Name the capital of France.")
    assert "Paris" in done.stdout


def test_json_is_one_document_whose_token_texts_join_to_the_text(edge_spec):
    done = edge_spec("generate", "smollm2", "Count from one to ten.", "--json", *FAR)
    document = json.loads(done.stdout)
    assert "".join(token["text"] for token in document["tokens"]) == document["text"]
    stats = document["stats"]
    assert stats["predicted_n"] == len(document["tokens"]) <= 24
    # Whether the text ends within 24 tokens depends on the processor's kernels.
    assert document["finish_reason"] == ("length" if stats["predicted_n"] == 24 else "stop")
    accepted = [token for token in document["tokens"] if token["origin"] == "accepted"]
    assert len(accepted) == stats["draft_n_accepted"]


def test_an_answer_fits_its_schema(edge_spec, tmp_path, capfd):
    schema = tmp_path / "schema.json"
    schema.write_text(
        '{"type": "object", "properties": {"capital": {"type": "string"}}, '
        '"required": ["capital"], "additionalProperties": false}'
    )
    done = edge_spec("generate", "Name the capital of France.", "--schema", str(schema), *FAR)
    assert done.returncode == 0 and json.loads(done.stdout) == {"capital": "Paris"}
    broken = {"[]": "is no JSON object", "{": "cannot read", '{"enum": []}': "can have this form"}
    for text, fault in broken.items():
        schema.write_text(text)
        assert run(["generate", "Hi", "--schema", str(schema)]) == 2
        told = capfd.readouterr().err
        assert fault in told and told.count("\n") == 1


def test_chat_remembers_and_reuses_the_cache(edge_spec):
    # Greedy: a drawn answer need not say the word.
    done = edge_spec(
        *("chat", "--temperature", "0", "--json"),
        *FAR,
        text="The secret word is banana.\nWhat is the secret word?\n",
    )
    first, second = json.loads(done.stdout)["turns"]
    assert "banana" in second["text"]
    # All of the first turn but its last token, which was never scored, is still in the cache.
    held = first["stats"]["prompt_n"] + first["stats"]["predicted_n"] - 1
    assert second["stats"]["cached_n"] >= held


MISTAKES = [
    (["generate", "--bogus", "x"], 2, "No such option: --bogus"),
    (["generate", "missing.gguf", "x"], 1, "missing.gguf"),
    (["generate", "x", "--context", "8"], 2, "the context holds"),
    (
        ["generate", "x", "--runtime", "abacus"],
        2,
        "coreai, coreml, llamacpp, openvino, ort, reference",
    ),
    (
        ["generate", "x", "--drafter", "oracle"],
        2,
        "Installed: answers, assistant, cascade, corpus, dflash, draft-model, eagle",
    ),
    (["generate", "x", "--draft-n-max", "0"], 2, "--drafter none"),
    (["generate", "x", "--device", "abacus"], 2, "There are: "),
    (["generate", "x", "--max-tokens", "0"], 2, "max_tokens is 0"),
    (["generate", "x", "--reasoning", "maybe"], 2, "reasoning is 'maybe'"),
    (["generate", "hf:name", "x"], 2, "'hf:name' names no model of the hub"),
    (["generate"], 2, ""),
    (["export", "smollm2", "out", "--quant", "int3"], 2, "int4, int8, fp16, fp32"),
    (
        ["export", "smollm2", "out", "--format", "mp3"],
        2,
        "coreai, coreml, gguf, onnx, onnx-static, optimum, qnn",
    ),
    (["generate", "x", "--kv-type", "f16", "--runtime", "reference"], 2, "no option kv-type"),
    (["generate", "x", "--drafter", "draft-model"], 2, "--draft MODEL"),
    (["generate", "x", "--draft", "a", "--drafter", "suffix"], 2, "Add draft-model"),
    (["generate", "x", "--drafter", "corpus"], 2, "--corpus PATH"),
    (["generate", "x", "--corpus", "missing.txt"], 2, "missing.txt"),
    (["generate", "x", "--drafter", "lookahead", "--lookahead", "many"], 2, "W,N,G"),
    (["generate", "x", "--drafter", "jacobi", "--jacobi", "dice"], 2, "--jacobi"),
    (["export", "smollm2", "out", "--format", "gguf", "--quant", "Q9"], 2, "Q4_K_M"),
    (["export", "smollm2", "out", "--format", "gguf", "--layers", "99"], 2, "30 layers"),
    (["doctor", "--bogus"], 2, ". See edge-spec doctor --help."),
    (["frobnicate"], 2, "No such command 'frobnicate'. See edge-spec --help."),
]
FROM_OUTSIDE = MISTAKES[:3]


def is_one_line(errors, told):
    assert told in errors
    assert len(errors.splitlines()) <= 1
    assert "Traceback" not in errors
    assert not Path("out").exists()


@pytest.mark.parametrize(("arguments", "status", "told"), FROM_OUTSIDE)
def test_a_mistake_is_told_on_stderr(edge_spec, arguments, status, told):
    done = edge_spec(*arguments)
    assert (done.returncode, done.stdout) == (status, "")
    is_one_line(done.stderr, told)


@pytest.mark.usefixtures("edge_spec")
@pytest.mark.parametrize(("arguments", "status", "told"), MISTAKES)
def test_a_mistake_ends_in_one_line(capfd, arguments, status, told):
    """Without a process for each: starting one takes longer than the mistake."""
    assert run(arguments) == status
    is_one_line(capfd.readouterr().err, told)


def test_without_onnxruntime_the_install_command_is_named(edge_spec, tmp_path):
    # A module of that name that cannot be imported stands for a missing package.
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('not here')")
    done = edge_spec("generate", "x", "--runtime", "ort", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert 'pip install -e ".[cpu]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_an_answer_and_says_so_by_its_status(command, converted):
    process = subprocess.Popen(
        [*command, "generate", "Tell a long story.", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # numpy has none of its own
    )
    with process:
        # JSON comes at the end only, so the interrupt is sent when the model runs: its threads
        # exist once the engine is up, and the answer takes far longer than that.
        while process.poll() is None and _num_threads(process.pid) < 2:
            pass
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            break
        out, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    if out:  # the signal came after the start of the answer
        assert json.loads(out)["finish_reason"] == "cancelled"


def _num_threads(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")
    found = re.search(r"Threads:\s+(\d+)", status.read_text())
    return int(found[1]) if found else 0


def test_the_documented_options_are_those_of_the_help(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    documented = set(re.findall(r"--[a-z][a-z-]+", Path("docs/cli.md").read_text(encoding="utf-8")))
    offered = set()
    for name in (
        "generate",
        "chat",
        "export",
        "bench",
        "devices",
        "distill",
        "doctor",
        "plan",
        "pull",
        "tune-skip",
        "verify",
    ):
        assert run([name, "--help"]) == 0
        shown = capfd.readouterr().out
        offered |= set(re.findall(r"--[a-z][a-z-]+", shown))
    offered -= {"--help", "--no-raw", "--check", "--no-mmap", "--no-flash-attention"}
    assert documented - {"--debug", "--version"} == offered
