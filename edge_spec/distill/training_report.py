"""Makes one document, and a page, of what a training has brought."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

from edge_spec.control.cost import RowCosts
from edge_spec.diagnostics.lossless_check import Proof
from edge_spec.diagnostics.report_files import rendered
from edge_spec.distill.drafter_training import Learnt
from edge_spec.distill.request import DistillRequest
from edge_spec.placement.machine import describe_machine

Document = dict[str, Any]

_TEMPLATE = Path(__file__).with_name("report.html")
_WIDTH, _HEIGHT = 600, 220


def document(request: DistillRequest, model: str, learnt: Learnt, proof: Proof) -> Document:
    """docs/distill.md lists the fields."""
    best, costs = learnt.best, learnt.costs
    return {
        "model": model,
        "kind": request.kind,
        "acceptance": list(best.of_position),
        "forecast": {"num_draft_tokens": best.num_draft_tokens, "speedup": best.speedup},
        "pays": best.speedup > 1,
        "tokens": {
            "learnt": learnt.num_learnt,
            "held_out": learnt.num_held_out,
            "own": learnt.num_own,
        },
        "on_policy_from": learnt.on_policy_from,
        "vocabulary": {"scored": learnt.num_scored, "coverage": learnt.coverage},
        "costs_ms": {
            "passes": {rows: 1e3 * seconds for rows, seconds in costs.passes_s.items()},
            "draft_token": 1e3 * costs.draft_token_s,
        },
        "history": [_finite(asdict(each)) for each in learnt.history],
        "verify": {
            "passed": proof.passed,
            "promise": str(proof.lossless.promise),
            "num_tokens": proof.greedy.num_tokens,
            "draft_tokens": proof.greedy.num_guesses,
            "draft_tokens_accepted": proof.greedy.num_accepted,
        },
        "machine": describe_machine(),
    }


def html_page(report: Document) -> str:
    """A page that needs nothing else."""
    return rendered(
        _TEMPLATE,
        report=report,
        positions=_positions(report),
        curves=_curves(report),
        width=_WIDTH,
        height=_HEIGHT,
    )


def summary(report: Document) -> list[str]:
    """Lines for the terminal."""
    chances = ", ".join(f"{100 * each:.0f} %" for each in report["acceptance"])
    forecast, vocabulary = report["forecast"], report["vocabulary"]
    many = forecast["num_draft_tokens"]
    pays = "" if report["pays"] else ": it does not pay here"
    return [
        f"accepted by position, each after all before it: {chances} "
        f"({report['tokens']['held_out']:,} held-out tokens)",
        f"scores {vocabulary['scored']:,} tokens, {100 * vocabulary['coverage']:.1f} % of what "
        "the model writes",
        f"forecast: {forecast['speedup']:.2f} times plain decoding, with {many} draft "
        f"token{'s' if many > 1 else ''} a round{pays}",
    ]


def _positions(report: Document) -> list[dict[str, float]]:
    """Of each draft token of a round: the share of rounds that keep it, and what it costs, in plain
    steps: its row of the model's pass, and the drafter's time for it."""
    passes = {int(rows): ms for rows, ms in report["costs_ms"]["passes"].items()}
    costs, draft_ms = RowCosts(passes), report["costs_ms"]["draft_token"]
    step_ms = costs.at(1)
    return [
        {
            "kept": kept,
            "row": max(0.0, costs.at(position + 1) - costs.at(position)) / step_ms,
            "drafting": draft_ms / step_ms,
        }
        for position, kept in enumerate(accumulate(report["acceptance"], mul), start=1)
    ]


def _curves(report: Document) -> list[dict[str, str]]:
    """Acceptance by position over the steps, as points of lines."""
    history = report["history"]
    last = max(1, history[-1]["step"])
    return [
        {
            "name": f"position {position + 1}",
            "points": " ".join(
                f"{_WIDTH * each['step'] / last:.1f},"
                f"{_HEIGHT * (1 - each['of_position'][position]):.1f}"
                for each in history
            ),
        }
        for position in range(len(report["acceptance"]))
    ]


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what was not measured."""
    return {name: None if each != each else each for name, each in values.items()}
