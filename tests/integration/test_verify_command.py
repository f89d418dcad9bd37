"""`edge-spec verify` as a command: its document, its exit status, its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.diagnostics.lossless_check.prove import Proof, Texts
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.lossless import Losslessness
from fixtures.tiny_models import build, write_gguf

FAST = ["--runtime", "llamacpp", "--threads", "1", "--count", "2", "--max-tokens", "12"]
FAST += ["--draws", "200"]


def agreeing(model: str) -> list[str]:
    """Options for drafts that are right, from the model itself, and others that are wrong."""
    return ["--draft", model, "--drafter", "suffix,draft-model", "--max-tokens", "96"]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("llama_cpp")
    directory = tmp_path_factory.mktemp("tiny")
    return str(write_gguf(build(), directory / "tiny.gguf"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("the end the end the end\n\nin an an in an an\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("exact", "mode"), [([], "auto"), (["--exact"], "always")])
def test_it_passes_what_it_exercised(
    tiny_gguf: str, prompts: str, exact: list[str], mode: str, capsys: Any
) -> None:
    told = [*FAST, *agreeing(tiny_gguf), *exact, "--prompts", prompts, "--json"]
    assert run(["verify", tiny_gguf, *told]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "pass" and report["lossless"] == mode
    assert report["greedy"]["num_prompts"] == 2 and report["greedy"]["num_guesses"] > 0
    assert report["sampling"]["num_draws"] == 200 and report["sampling"]["passed"]
    assert report["runtime"] == "llamacpp" and report["drafter"] == "suffix,draft-model"


def test_a_fault_makes_the_exit_status_1(
    tiny_gguf: str, prompts: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from edge_spec.core.verify import verify

    def accepts_any(tree: Any, out: Any, sampler: Any) -> Any:
        """Broken: the first draft token is taken as it is."""
        from edge_spec.core.tree import Verdict

        if not tree.children(0):
            return verify(tree, out, sampler)
        candidate = int(tree.tokens[1])
        return Verdict((candidate, sampler.choose(out.logits[1], [candidate]).token), (1,), True)

    monkeypatch.setattr("edge_spec.engine.decoder.verify", accepts_any)
    assert run(["verify", tiny_gguf, *FAST, "--prompts", prompts, "--draws", "0"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "report it" in text


@pytest.mark.parametrize(("accepted", "status"), [(0, 3), (9, 0)])
def test_texts_without_an_accepted_draft_token_make_the_exit_status_3(
    tiny_gguf: str, accepted: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Equal texts show nothing where nothing was accepted."""
    texts = Texts(2, 24, 18, accepted, 9, 0, 0, ())
    numerics = BatchInvariance(0.0, (1, 8))
    proof = Proof("tiny", "llamacpp", "auto", Losslessness(), texts, None, None, numerics, ())
    monkeypatch.setattr(
        "edge_spec.diagnostics.lossless_check.prove.prove", lambda *arguments: proof
    )
    assert run(["verify", tiny_gguf, *FAST]) == status
    assert ("INCONCLUSIVE" in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(
    ("told", "fault"),
    [
        (["--drafter", "none"], "without a drafter there is nothing to verify"),
        (["--draws", "5"], "5 draws show nothing"),
        (["--count", "0"], "Invalid value for '--count'"),
        (["--prompts", "missing.txt"], "cannot read prompts"),
        (["--context", "16"], "none of 2 prompts fits the context"),
    ],
)
def test_what_cannot_be_verified_is_one_line(
    tiny_gguf: str, told: list[str], fault: str, capsys: Any
) -> None:
    assert run(["verify", tiny_gguf, *FAST, *told]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("...")]
    assert len(lines) == 1 and fault in lines[0]


def test_what_is_asked_is_not_remembered(
    tiny_gguf: str, prompts: str, tmp_path: Path, capsys: Any
) -> None:
    told = ["--drafter", "answers", "--prompts", prompts, "--draws", "0"]
    run(["verify", tiny_gguf, *FAST, *told])  # refused where nothing was drafted
    assert not list((tmp_path / "cache").rglob("answers/*.json"))
    generate = ["generate", tiny_gguf, "the end the end", "--raw", "--drafter", "answers"]
    assert run([*generate, "--runtime", "llamacpp", "--threads", "1", "--max-tokens", "48"]) == 0
    assert list((tmp_path / "cache").rglob("answers/*.json"))
