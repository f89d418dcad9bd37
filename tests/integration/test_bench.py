"""`edge-spec bench` on a tiny model, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.diagnostics.bench import measuring

PROMPTS = [
    {"id": 1, "category": "a", "prompt": "one two one two one two"},
    {"id": 2, "category": "b", "turns": ["the an in the an in", "not taken"]},
    {"id": "long", "category": "b", "prompt": "more than 128 bytes " * 8},
]
SHORT = ["--max-tokens", "8", "--repeat", "2", "--threads", "1"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, PROMPTS)), encoding="utf-8")
    return str(path)


@pytest.fixture
def bench(
    gguf: Callable[..., Path],
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """bench(*arguments): status, stdout and stderr of the command on the reference runtime."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))

    def measure(*arguments: str) -> tuple[int, str, str]:
        model = ["bench", str(gguf()), "--runtime", "reference"]
        status = run([*model, "--prompts", prompts, *SHORT, *arguments])
        return status, *capsys.readouterr()

    return measure


def test_json_is_one_document(bench: Any) -> None:
    status, out, _ = bench("--json")
    report = json.loads(out)
    assert status == 0
    assert report["total"]["prompts"] == 2
    assert report["total"]["differing_texts"] == 0
    assert report["total"]["speedup_low"] <= report["total"]["speedup"]
    assert list(report["categories"]) == ["a", "b"]
    assert [each["id"] for each in report["prompts"]] == ["1", "2"]
    assert all(each["predicted_n"] == 8 for each in report["prompts"])
    settings = report["settings"]
    assert settings["skipped_prompts"] == ["long"]
    assert (settings["runtime"], settings["repetitions"]) == ("reference", 2)
    assert not settings["partial"]
    assert report["peers"] == {}


def test_some_prompts_are_sampled_too(bench: Any) -> None:
    status, out, _ = bench("--json", "--sampled", "1")
    sampled = json.loads(out)["sampled"]
    assert status == 0
    assert sampled["sampling"] == "temperature 0.7, top-p 0.95, min-p 0.05"
    assert sampled["source"] == "edge-spec's defaults"
    assert sampled["total"]["prompts"] == sampled["greedy"]["prompts"] == 2  # one of each category
    assert sampled["total"]["speedup_low"] <= sampled["total"]["speedup"]


def test_an_interrupt_prints_what_there_is(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, calls = measuring.decode, []

    def interrupted(*asked: Any) -> Any:
        calls.append(asked)
        if len(calls) == 5:  # two of the warm-up, two of the first prompt
            raise KeyboardInterrupt
        return decode(*asked)

    monkeypatch.setattr(measuring, "decode", interrupted)
    status, out, _ = bench()
    assert status == 130
    assert "Partial" in out
    assert any(line.split()[:2] == ["all", "1"] for line in out.splitlines())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--repeat", "0"], "--repeat"),
        (["--per-category", "0"], "--per-category"),
        (["--max-tokens", "0"], "--max-tokens"),
        (["--prompts", "missing.jsonl"], "missing.jsonl"),
        (["--drafter", "answers"], "--repeat 1"),
    ],
)
def test_a_mistake_is_noticed_before_anything_is_measured(
    bench: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], told: str
) -> None:
    monkeypatch.delattr(measuring, "decode")
    status, out, errors = bench(*arguments)
    assert (status, out) == (2, "")
    assert told in errors
    assert len(errors.splitlines()) == 1


def test_a_server_that_is_not_here_is_noted(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring.shutil, "which", lambda name: None)
    status, out, _ = bench("--peers", "--json")
    assert status == 0
    peers = json.loads(out)["peers"]
    assert list(peers) == ["llama-server"] and "not on the PATH" in peers["llama-server"]["note"]
    assert peers["llama-server"]["plain_per_second"] is None


def test_a_server_is_compared_on_one_file(
    hf: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(hf()), "--peers", *SHORT]) == 2
    assert "--peers is for a GGUF file" in capsys.readouterr().err
