"""Energy by the counters of a machine whose tree of files moves with each pass of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_spec.cli.main import run
from edge_spec.core.tree import TokenTree
from edge_spec.diagnostics.bench import energy_source
from edge_spec.fitting.devices import processor
from edge_spec.placement import measure, planner, survey
from edge_spec.placement import profile as profile_module
from edge_spec.placement.energy import find
from edge_spec.runtimes.ort import session as ort_session
from edge_spec.text.prompt_files import Prompt
from fixtures.power_tree import PowerTree

A_PASS_J, A_ROW_J = 0.001, 0.01  # a draft token costs ten times what the rest of a pass does


@pytest.fixture
def model(
    gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Its machine has one counter, which each pass of the onnxruntime session moves."""
    tree = PowerTree(tmp_path / "sys")
    counter, drawn_j = tree.add_counter("intel-rapl:0", "package-0"), 0.0
    session = ort_session.OrtSession
    forward = session.forward

    def metered(self: Any, rows: TokenTree) -> Any:
        nonlocal drawn_j
        drawn_j += A_PASS_J + A_ROW_J * len(rows)
        tree.count(counter, drawn_j)
        return forward(self, rows)

    monkeypatch.setattr(session, "forward", metered)
    monkeypatch.setattr(find, "SYSFS", tree.root)
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    find.answer_meter.cache_clear()
    yield str(gguf("llama"))
    find.answer_meter.cache_clear()


def test_bench_reports_joules_a_token(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(energy_source, "_IDLE_S", 0.01)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": 1, "category": "a", "prompt": "one two one two"}))
    asked = ["--prompts", str(prompts), "--runtime", "ort", "--repeat", "2", "--sampled", "0"]
    asked += ["--lossless", "ties"]  # no plain step is padded, on any processor
    assert run(["bench", model, *asked, "--max-tokens", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["energy"]["source"] == "RAPL (package-0)" and not report["energy"]["unknown"]
    assert report["energy"]["idle_w"] == 0.0  # no pass, no joule
    total = report["total"]
    assert total["plain_joules_per_token"] == pytest.approx(A_PASS_J + A_ROW_J)
    drafted = total["joules_per_token"] / total["plain_joules_per_token"]
    assert total["energy_ratio"] == pytest.approx(drafted)


def test_a_plan_that_prefers_energy_begins_with_what_draws_least(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = Prompt("1", "qa", "the rain in an inner")
    monkeypatch.setattr(planner, "read_prompts", lambda path, per_category: [prompt])
    monkeypatch.setattr(planner, "_IDLE_S", 0.01)
    monkeypatch.setattr("edge_spec.fitting.devices.list_devices", lambda: [processor("ort")])
    for name in ("_MOST_S", "_LEAST_S"):
        monkeypatch.setattr(survey, name, 0.2)
    monkeypatch.setattr(profile_module, "_MOST_SPREAD", 1e9)  # however busy the machine is
    monkeypatch.setattr(measure, "_METERED_S", 0.0)  # these counters are exact
    out = tmp_path / "plan.json"
    assert run(["plan", model, "--prefer", "energy", "--out", str(out)]) == 0
    assert "J/token" in capsys.readouterr().out
    made = json.loads(out.read_text())
    best, *others = made["placements"]
    least_j = min(each["joules_per_token"] for each in (best, *others))
    assert made["prefer"] == "energy" and best["joules_per_token"] <= 1.02 * least_j
    plain = next(each for each in (best, *others) if each["drafter"] == "none")
    # Where kernels for a single row add in another order, a plain step is padded to two rows.
    # Beside its pass there is only a commit, at its power: a few percent, more on a busy machine.
    passes_j = [A_PASS_J + rows * A_ROW_J for rows in (1, 2)]
    assert any(pass_j <= plain["joules_per_token"] < 1.5 * pass_j for pass_j in passes_j)
    assert run(["doctor", model]) == 0
    assert "preferred for its energy" in capsys.readouterr().out
