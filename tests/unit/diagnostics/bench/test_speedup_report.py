"""From runs to figures, and from figures to the report."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from edge_spec.cli.output import page_lines
from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    Answered,
    BenchMeasurement,
    BenchPlan,
    Peer,
    Run,
    Side,
    Task,
)
from edge_spec.diagnostics.bench.report import NOT_ENOUGH, document, page
from edge_spec.text.prompt_files import Prompt

SETTINGS = {
    "model": "tiny",
    "weights": "tiny",
    "runtime": "reference",
    "drafter": "auto",
    "prompts": "some.jsonl",
    "max_tokens": 8,
}


def run(seconds: float, num_tokens: int = 10, text: int = 1, **stats: Any) -> Run:
    tokens = tuple(range(text, text + num_tokens))
    stats = {"predicted_ms": 1e3 * seconds, **stats}
    return Run(tokens, Stats(predicted_n=num_tokens, **stats))


def looping(seconds: float) -> Run:
    """Eight of its ten tokens repeat the first two."""
    return Run((1, 2) * 5, Stats(predicted_n=10, predicted_ms=1e3 * seconds))


def drafted(seconds: float, **more: Any) -> Run:
    reasons = Counter({"no_candidate": 1})
    more = {"acceptance_histogram": Counter({0: 1, 2: 1, 4: 1}), **more}
    times = {"draft_ms": 2.0, "verify_ms": 994.0}
    return run(
        seconds, rounds=4, draft_n=8, draft_n_accepted=6, plain_reasons=reasons, **times, **more
    )


@pytest.fixture
def measured() -> BenchMeasurement:
    """Two passes over "a", answered twice as fast, and "b", at the same rate but for one pair."""
    prompts = [Prompt("a", "code", "x"), Prompt("b", "qa", "x")]
    plan = BenchPlan([Task(each, (1,)) for each in prompts], [], (2,), 8, 2, room=100)
    runs = [
        {DRAFTING: [drafted(1.0), drafted(1.0)], PLAIN: [run(2.0), run(2.0)]},
        {DRAFTING: [drafted(1.0), drafted(1.0)], PLAIN: [run(1.0), run(0.8)]},
    ]
    answered = [Answered(task, each) for task, each in zip(plan.tasks, runs, strict=True)]
    return BenchMeasurement(plan, answered, failures={}, partial=False)


def test_a_category_and_the_total(measured: BenchMeasurement) -> None:
    report = document(measured, SETTINGS)
    code, total = report["categories"]["code"], report["total"]
    assert (code["speedup"], code["speedup_low"], code["speedup_high"]) == (2, 2, 2)
    assert (code["predicted_per_second"], code["plain_per_second"]) == (10, 5)
    assert code["mean_accepted_length"] == 10 / 4
    assert code["acceptance_rate"] == 6 / 8
    assert code["plain_rounds"] == {"no_candidate": 1 / 4}
    assert (code["draft_ms_a_round"], code["verify_ms_a_round"]) == (0.5, 248.5)
    assert code["overhead_ms_a_round"] == 1.0
    assert total["speedup"] == pytest.approx(2.9 / 2)
    assert total["worst_prompt"] == "b"
    worst = [total[f"worst_prompt_speedup{end}"] for end in ("", "_low", "_high")]
    assert worst == pytest.approx([0.9, 0.8, 1.0])
    assert (total["prompts"], total["differing_texts"]) == (2, 0)


def test_a_text_that_differs_is_counted(measured: BenchMeasurement) -> None:
    measured.answered[0].runs[DRAFTING][1] = drafted(1.0, text=5)
    report = document(measured, SETTINGS)
    assert report["total"]["differing_texts"] == 1
    assert [each["equal_text"] for each in report["prompts"]] == [False, True]


def told(report: dict[str, Any]) -> str:
    lines = page_lines(page(json.loads(json.dumps(report))))
    return "\n".join(" ".join(line.split()) for line in lines)


def test_prompts_that_loop_are_told_and_left_out_of_a_speedup(measured: BenchMeasurement) -> None:
    measured.answered[0].runs[PLAIN] = [looping(2.0), looping(2.0)]
    report = document(measured, SETTINGS)
    total, code = report["total"], report["categories"]["code"]
    assert (code["loop_share"], code["loop_free_prompts"]) == (0.8, 0)
    assert code["loop_free_speedup"] is None
    assert total["speedup"] == pytest.approx(2.9 / 2)
    assert (total["loop_share"], total["loop_free_prompts"]) == (0.4, 1)
    assert total["loop_free_speedup"] == pytest.approx(0.9)
    assert [each["loop_share"] for each in report["prompts"]] == [0.8, 0.0]
    assert "In loops: 40% of plain decoding's tokens" in told(report)
    assert "Worst prompt: 0.90 (b)." in told(report)
    assert "speedup of the 1 prompts without any: 0.90 (0.80 to 1.00)." in told(report)


def test_a_ratio_of_too_few_answers_is_not_shown(measured: BenchMeasurement) -> None:
    """One pair of a prompt has no range; answers without a timed token are no answers."""
    for each in measured.answered:
        for side in (DRAFTING, PLAIN):
            del each.runs[side][1:]
    report = document(measured, SETTINGS)
    assert report["total"]["speedup"] is not None and report["total"]["worst_prompt"] is None
    assert report["categories"]["code"]["speedup"] is None
    assert report["prompts"][0]["speedup"] is None and report["prompts"][0]["plain_per_second"]
    assert f"code 1 5.0 10.0 {NOT_ENOUGH} 75%" in told(report)
    assert "Worst prompt" not in told(report)
    measured.answered[0].runs[PLAIN] = [run(0.0, num_tokens=0)]
    report = document(measured, SETTINGS)
    assert report["total"]["speedup"] is None
    assert report["categories"]["code"]["plain_per_second"] is None
    json.dumps(report, allow_nan=False)


def test_our_rate_over_anothers(measured: BenchMeasurement) -> None:
    names = ("other plain", "other drafting")
    other = Peer("tiny", "other", "7", sides=[Side(name, pytest.fail) for name in names])
    for each, plain_s in zip(measured.answered, (4.0, 2.0), strict=True):
        each.runs["other plain"] = [run(plain_s)] * 2
        each.runs["other drafting"] = [run(2.0)] * 2
    report = document(measured, SETTINGS, other)
    peer = report["peers"]["other"]
    assert peer["speedup"] == pytest.approx(6 / 4)
    assert peer["ours_over_plain"] == pytest.approx(6 / 2)
    assert peer["ours_over_predicted"] == pytest.approx(4 / 2)
    assert peer["plain_per_second"] == pytest.approx(20 / 6)
    assert peer["mean_accepted_length"] is None  # it does not tell
    for each in measured.answered:
        del each.runs["other drafting"]
    report = document(measured, SETTINGS, other)
    alone = report["peers"]["other"]
    assert alone["speedup"] is None and alone["ours_over_plain"] == pytest.approx(6 / 2)
    line = (
        f"3.3 tokens a second plain, none drafting, its speedup {NOT_ENOUGH}; ours over its plain"
    )
    assert line in told(report)


@pytest.fixture
def report(measured: BenchMeasurement) -> dict[str, Any]:
    return document(measured, SETTINGS, Peer("tiny", note="not installed: x"))


def test_the_document_survives_json_and_has_the_promised_fields(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    parts = ["machine", "settings", "total", "categories", "prompts", "sampled", "peers"]
    assert list(report) == parts
    promised = {
        *("predicted_per_second", "plain_per_second", "speedup", "speedup_low", "speedup_high"),
        *("mean_accepted_length", "acceptance_rate", "worst_prompt_speedup"),
    }
    for figures in (report["total"], report["categories"]["qa"], report["peers"]["llama-server"]):
        assert promised <= set(figures)
    assert report["settings"]["repetitions"] == 2


def test_the_page_of_a_stored_report(report: dict[str, Any]) -> None:
    report["machine"] = {"cpu": "A CPU", "cores": 2, "system": "OS", "versions": {"numpy": "2"}}
    lines = told(report).splitlines()
    assert lines[0] == "edge-spec bench: tiny on reference, drafter auto"
    assert "A CPU, 2 cores, OS; numpy 2." in lines
    assert "code 1 5.0 10.0 2.00 (2.00 to 2.00) 75%" in lines
    step = "A step writes 2.50 tokens: draft 0.50 ms, verify 248.50 ms, overhead 1.00 ms. Steps"
    assert any(step in line and "no_candidate 25%" in line for line in lines)
    assert "llama-server: not installed: x." in lines
    assert not any("Partial" in line for line in lines)


def test_a_terminal_of_80_columns_shows_whole_figures(
    report: dict[str, Any], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    report["total"]["worst_prompt"] = "conversation-3"
    report["categories"] = {"math_reasoning": report["total"]}
    print("\n".join(page_lines(page(report))))
    lines = re.sub("\x1b.*?m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    rows = [" ".join(line.split()) for line in lines if line.startswith("math_reasoning")]
    assert rows == [
        "math_reasoning 2 6.9 10.0 1.45 (1.40 to 1.50) 75%",
    ]
