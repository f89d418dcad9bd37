"""Says what a training has brought, as a document and as lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge_spec.distill.drafter_training import Learnt
from edge_spec.placement.machine import describe_machine

Document = dict[str, Any]


def document(kind: str, model: str, learnt: Learnt) -> Document:
    """docs/distill.md lists the fields."""
    best, costs = learnt.best, learnt.costs
    return {
        "model": model,
        "kind": kind,
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
        "machine": describe_machine(),
    }


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


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what was not measured."""
    return {name: None if each != each else each for name, each in values.items()}
