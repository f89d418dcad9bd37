"""From runs to figures, and from figures to the report and the chart."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from edge_spec.core.metrics import Stats
from edge_spec.diagnostics.bench.measuring import (
    DRAFTING,
    PLAIN,
    BenchMeasurement,
    BenchPlan,
    OpenPeer,
    Run,
    Task,
)
from edge_spec.diagnostics.bench.report import Figures, document, markdown
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
    return Run(tokens, num_tokens, seconds, Stats(predicted_n=num_tokens, **stats))


def looping(seconds: float) -> Run:
    """Eight of its ten tokens repeat the first two."""
    return Run((1, 2) * 5, 10, seconds, Stats(predicted_n=10))


def drafted(seconds: float, **more: Any) -> Run:
    reasons = Counter({"no_candidate": 1})
    more = {"acceptance_histogram": Counter({0: 1, 2: 1, 4: 1}), **more}
    times = {"draft_ms": 2.0, "verify_ms": 30.0, "predicted_ms": 36.0}
    return run(
        seconds, rounds=4, draft_n=8, draft_n_accepted=6, plain_reasons=reasons, **times, **more
    )


@pytest.fixture
def measured() -> BenchMeasurement:
    """Two passes over "a", answered twice as fast, and "b", at the same rate but for one pair."""
    prompts = [Prompt("a", "code", "x"), Prompt("b", "qa", "x")]
    plan = BenchPlan([Task(each, (1,)) for each in prompts], [], (2,), 8, 2, room=100)
    return BenchMeasurement(
        plan,
        {
            DRAFTING: [[drafted(1.0), drafted(1.0)], [drafted(1.0), drafted(1.0)]],
            PLAIN: [[run(2.0), run(1.0)], [run(2.0), run(0.8)]],
        },
        failures={},
        partial=False,
    )


def test_a_category_and_the_total(measured: BenchMeasurement) -> None:
    figures = Figures(measured)
    code = figures.categories()["code"]
    assert (code["speedup"], code["speedup_low"], code["speedup_high"]) == (2, 2, 2)
    assert (code["predicted_per_second"], code["plain_per_second"]) == (10, 5)
    assert code["mean_accepted_length"] == 10 / 4
    assert code["acceptance_rate"] == 6 / 8
    assert code["plain_rounds"] == {"no_candidate": 1 / 4}
    assert (code["draft_ms_a_round"], code["verify_ms_a_round"]) == (0.5, 7.5)
    assert code["overhead_ms_a_round"] == 1.0
    total = figures.total()
    assert total["speedup"] == pytest.approx(2.9 / 2)
    assert total["worst_prompt"] == "b"
    worst = [total[f"worst_prompt_speedup{end}"] for end in ("", "_low", "_high")]
    assert worst == pytest.approx([0.9, 0.8, 1.0])
    assert (total["prompts"], total["differing_texts"]) == (2, 0)


def test_a_text_that_differs_is_counted(measured: BenchMeasurement) -> None:
    measured.runs[DRAFTING][1][0] = drafted(1.0, text=5)
    figures = Figures(measured)
    assert figures.total()["differing_texts"] == 1
    assert [each["equal_text"] for each in figures.prompts()] == [False, True]


def test_prompts_that_loop_are_told_and_left_out_of_a_speedup(measured: BenchMeasurement) -> None:
    measured.runs[PLAIN][0][0] = measured.runs[PLAIN][1][0] = looping(2.0)
    figures = Figures(measured)
    total, code = figures.total(), figures.categories()["code"]
    assert (code["loop_share"], code["loop_free_prompts"]) == (0.8, 0)
    assert code["loop_free_speedup"] is None
    assert total["speedup"] == pytest.approx(2.9 / 2)
    assert (total["loop_share"], total["loop_free_prompts"]) == (0.4, 1)
    assert total["loop_free_speedup"] == pytest.approx(0.9)
    assert [each["loop_share"] for each in figures.prompts()] == [0.8, 0.0]
    lines = markdown(document(measured, SETTINGS, [])).splitlines()
    assert any(line.startswith("In loops: 40% of plain") for line in lines)
    assert "Over the prompts without any (1), the speedup is 0.90 (0.80 to 1.00)." in lines


def test_our_rate_over_anothers(measured: BenchMeasurement) -> None:
    measured.runs["other plain"] = [[run(4.0), run(2.0)]] * 2
    measured.runs["other lookup"] = [[run(2.0), run(2.0)]] * 2
    peer = Figures(measured).peer("other lookup", "other plain")
    assert peer["speedup"] == pytest.approx(6 / 4)
    assert peer["ours_over_plain"] == pytest.approx(6 / 2)
    assert peer["ours_over_predicted"] == pytest.approx(4 / 2)
    assert peer["plain_per_second"] == pytest.approx(20 / 6)
    assert peer["mean_accepted_length"] is None  # it does not tell


@pytest.fixture
def report(measured: BenchMeasurement) -> dict[str, Any]:
    return document(measured, SETTINGS, [OpenPeer("llama-server", "tiny", note="not installed: x")])


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


def test_the_markdown_of_a_stored_report(report: dict[str, Any]) -> None:
    report["machine"] = {"cpu": "A CPU", "cores": 2, "system": "OS", "versions": {"numpy": "2"}}
    lines = markdown(json.loads(json.dumps(report))).splitlines()
    assert lines[0] == "# edge-spec bench: tiny on reference, drafter auto"
    assert "A CPU, 2 cores, OS; numpy 2." in lines
    assert (
        "| code | 1 | 5.0 | 10.0 | 2.00 (2.00 to 2.00) | 2.50 | 75% | 0% | "
        "2.00 (2.00 to 2.00) of 1 | 2.00 (2.00 to 2.00) a |"
    ) in lines
    assert "| code | no_candidate 25% | 0.50 | 7.50 | 1.00 |" in lines
    assert any(line.startswith("| all | 2 |") and line.endswith(" b |") for line in lines)
    assert "- llama-server: not installed: x" in lines
    widths = {line.count("|") for line in lines if line.startswith("| ")}
    assert widths == {11, 6}  # each table's rows are as long as its header
    assert not any("Partial" in line for line in lines)
