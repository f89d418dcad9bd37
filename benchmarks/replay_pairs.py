"""Compares what `edge-spec plan` chooses for pairs on simulated machines with the best there is.

    python benchmarks/replay_pairs.py [--case N ...] [--texts N] [--json FILE]
    python benchmarks/replay_pairs.py --record    # writes recorded_hits.json again

`pair_machines.json` has the machines, each figure with its source, `recorded_hits.json` where
drafts of graded quality were right on real texts. For each case the plan ranks
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

import numpy as np
from common import OWN_PROMPTS, machine, open_engine, read_prompts, report
from pair_regret import PairCase, SimulatedDraft, Way
from pair_replay import DraftedText
from roofline import RooflineModel, SimulatedMachine, Unit

from edge_spec.core.model import SelfDrafting, Session, SkippingSession
from edge_spec.core.tree import TokenTree

HERE = Path(__file__).parent
HITS = HERE / "recorded_hits.json"
BLOCK_ROWS, TOKENS, PER_CATEGORY = 8, 64, 2
# Of 30 layers, those that each draft leaves out; the middle ones are missed least.
DRAFTS = {
    "good": (15,),
    "fair": (12, 18),
    "poor": (7, 9, 11, 14, 17, 20, 23),
}


def read_cases(num_texts: int) -> list[tuple[str, PairCase]]:
    table = json.loads((HERE / "pair_machines.json").read_text(encoding="utf-8"))
    recorded = json.loads(HITS.read_text(encoding="utf-8"))["texts"]
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


def sublayers(layers: tuple[int, ...]) -> frozenset[int]:
    return frozenset(each for layer in layers for each in (2 * layer, 2 * layer + 1))


def ranks_and_certainty(logits: np.ndarray, chosen: np.ndarray) -> tuple[str, str]:
    """One digit a row of each. logits: [rows, vocab] of the draft; chosen: the target's tokens."""
    wider = logits.astype(np.float64)
    probs = np.exp(wider - wider.max(axis=1, keepdims=True))
    best = (probs.max(axis=1) / probs.sum(axis=1) * 10).astype(int).clip(0, 9)
    its = np.take_along_axis(logits, chosen[:, None], axis=1)
    ranks = (logits > its).sum(axis=1).clip(0, 2)
    return "".join(map(str, ranks)), "".join(map(str, best))


def read_text(
    target: Session, part: SkippingSession, prompt: list[int], answer: list[int]
) -> dict[str, dict[str, str]]:
    """Each draft scores a block of the answer before the target reads it."""
    target.rollback(0)
    target.prefill(prompt[:-1])
    text = [prompt[-1], *answer[:-1]]
    found = {name: {"ranks": "", "certainty": ""} for name in DRAFTS}
    for start in range(0, len(text), BLOCK_ROWS):
        block = TokenTree.chain(text[start], text[start + 1 : start + BLOCK_ROWS])
        drafted = {}
        for name, layers in DRAFTS.items():
            part.skipped = sublayers(layers)
            drafted[name] = part.forward(block).logits.copy()
        chosen = target.forward(block).logits.argmax(axis=1)
        target.commit(range(len(block)))
        for name, logits in drafted.items():
            ranks, certainty = ranks_and_certainty(logits, chosen)
            found[name]["ranks"] += ranks
            found[name]["certainty"] += certainty
    return found


def record() -> None:
    """Writes where the demo model with layers left out is right on texts that the whole one writes.

    Of every token is kept where in a draft's ranking it stands (0, 1, or 2 for anything later) and
    how certain the draft was of its first choice, in tenths: no weights and no texts.
    """
    texts: list[dict[str, Any]] = []
    with open_engine("smollm2", drafter="none") as engine:
        target = engine.parts.model.open_session()
        assert isinstance(target, SelfDrafting)
        part = target.open_skipping(frozenset())
        for entry in read_prompts(OWN_PROMPTS, PER_CATEGORY):
            prompt = engine.chat_prompt(entry["prompt"])
            answer = [each.id for each in engine.generate(prompt, max_tokens=TOKENS).tokens]
            drafts = read_text(target, part, prompt, answer)
            texts.append({"category": entry["category"], "drafts": drafts})
        target.close()
    for name in DRAFTS:
        ranks = "".join(text["drafts"][name]["ranks"] for text in texts)
        print(f"{name}: {len(ranks)} tokens, {ranks.count('0') / len(ranks):.2f} right")
    about = {"model": "smollm2", "left_out": DRAFTS, **machine()}
    HITS.write_text(json.dumps({"about": about, "texts": texts}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=int, nargs="+", help="numbers of cases, from 0")
    parser.add_argument("--texts", type=int, default=9)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true", help="recorded_hits.json again")
    arguments = parser.parse_args()
    if arguments.record:
        return record()
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
    return None


if __name__ == "__main__":
    main()
