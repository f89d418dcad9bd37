"""What `edge-spec plan` chooses for pairs on machines that are not here, and what is best there.

    python benchmarks/replay_pairs.py [--case N ...] [--texts N] [--json FILE]

`pair_machines.json` has the machines, each figure with its source, `recorded_hits.json` where
drafts of graded quality were right on real texts (`record_hits.py`). For each case the plan ranks
every draft at every place by the costs that a measurement would find; then the real round loop
decodes the texts in every way, on a virtual clock. Regret is what the plan's way loses of the rate
of the best one. `used` is what a user gets at the planned place, from the adaptive policy and the
trial of overlap, over no draft. All of it is simulated, and the same on every run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from common import report
from pair_regret import PairCase, SimulatedDraft, Way
from pair_replay import DraftedText
from roofline import RooflineModel, SimulatedMachine, Unit

HERE = Path(__file__).parent


def read_cases(num_texts: int) -> list[tuple[str, PairCase]]:
    table = json.loads((HERE / "pair_machines.json").read_text(encoding="utf-8"))
    recorded = json.loads((HERE / "recorded_hits.json").read_text(encoding="utf-8"))["texts"]
    return [
        (_told(case), case_of(table, case, recorded[:: -(-len(recorded) // num_texts)]))
        for case in table["cases"]
    ]


def case_of(table: dict[str, Any], case: dict[str, Any], recorded: list[Any]) -> PairCase:
    machine = table["machines"][case["machine"]]
    units = {
        name: Unit(unit["gb_s"], unit["tops"], unit["call_ms"], tuple(unit.get("widths", ())))
        for name, unit in machine["units"].items()
    }
    drafts = {}
    for name in case.get("drafts", table["drafts"]):
        draft = table["drafts"][name]
        texts = [_text(each["drafts"][draft["recorded"]]) for each in recorded]
        drafts[name] = SimulatedDraft(_model(draft), texts)
    return PairCase(
        SimulatedMachine(units, machine["memory_gb_s"], machine["switch_ms"]),
        _model(table["models"][case["target"]]),
        drafts,
        case.get("draft_units"),
    )


def _model(told: dict[str, Any]) -> RooflineModel:
    return RooflineModel(told["gb"], told["gop_row"], told["row_ms"])


def _text(told: dict[str, str]) -> DraftedText:
    certainty = tuple((int(digit) + 0.5) / 10 for digit in told["certainty"])
    return DraftedText(tuple(map(int, told["ranks"])), certainty)


def _told(case: dict[str, Any]) -> str:
    why = f" ({case['why']})" if "why" in case else ""
    return f"{case['target']} on {case['machine']}{why}"


def judge(case: PairCase) -> dict[str, Any]:
    planned, placement = case.planned()
    plain, best, decoded = case.plain(), case.best(), case.decoded(planned)
    used, stats = case.used(planned)
    return {
        "planned": planned._asdict(),
        "forecast": (placement.tokens_per_s or 0.0) / plain.rate,
        "decoded": decoded.rate / plain.rate,
        "best_way": best.way._asdict(),
        "best": best.rate / plain.rate,
        "regret": 1 - decoded.rate / best.rate,
        "used": used / plain.rate,
        "anticipated": sum(each.anticipated_n for each in stats) / sum(e.rounds for e in stats),
    }


def told(way: Way) -> str:
    if way.draft is None:
        return f"{way.target_unit}, no draft"
    overlap = ", overlapped" if way.overlaps else ""
    return f"{way.target_unit}, {way.draft} on {way.draft_unit}, {way.num_draft_tokens}{overlap}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=int, nargs="+", help="numbers of cases, from 0")
    parser.add_argument("--texts", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = read_cases(arguments.texts)
    chosen = range(len(cases)) if arguments.case is None else arguments.case
    print("| case | plan | forecast | decoded | best | of it | regret | used |")
    print("|---|---|---|---|---|---|---|---|")
    results = {}
    for name, case in (cases[i] for i in chosen):
        found = results[name] = judge(case)
        planned, best = Way(**found["planned"]), Way(**found["best_way"])
        print(
            f"| {name} | {told(planned)} | {found['forecast']:.2f} | {found['decoded']:.2f} "
            f"| {told(best)} | {found['best']:.2f} | {found['regret']:.1%} | {found['used']:.2f} |",
            flush=True,
        )
    print(f"largest regret {max(each['regret'] for each in results.values()):.1%}")
    report({"cases": results}, arguments.json)


if __name__ == "__main__":
    main()
