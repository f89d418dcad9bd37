"""A head that was trained for one domain: how fast further questions are answered with it.

    python benchmarks/domain_head.py questions DIR
    edge-spec distill smollm2 --out HEAD --kind eagle3 --prompts DIR/learn.jsonl [...]
    python benchmarks/domain_head.py rates HEAD DIR/ask.jsonl [--model MODEL]

`questions` makes 48 manuals of half a page and five questions about each: 198 to learn from, and 24
that are asked afterwards, 12 of them about manuals that no question to learn from is about. `rates`
answers these, greedily and in turns, without drafting, with suffix lookup, with the head alone and
with both, which is the default, and prints speedups over plain decoding.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import read_prompts, report

import edge_spec
from edge_spec.core.metrics import Stats

_MAKERS = ("Halden", "Orrin", "Velt", "Sorrel", "Kestrel", "Marlow", "Pell", "Tavin")
_THINGS = ("pump", "heater", "lamp", "kettle", "drill", "fan", "scale", "router", "filter", "saw")
_PARTS = ("housing", "valve", "gasket", "switch", "cable", "bearing", "sensor", "display")
_COLOURS = ("red", "amber", "green", "blue", "white")
ASKED = (
    "Summarize the manual of the {name} in a few sentences.",
    "How is the {name} installed? List the steps.",
    "What does it mean when the light of the {name} is {colour}, and what has to be done?",
    "How is the {part} of the {name} cleaned and how often?",
    "Write a short note to a customer who asks about the warranty of the {name}.",
)


_MANUALS, _NEW = 48, 6  # of them, about which nothing is learnt
_SEED = 7
_HELD_OUT = 12  # questions about manuals that others are learnt of, and as many about new ones


@dataclass(frozen=True)
class Manual:
    """A document: a product's manual."""

    name: str
    part: str
    colour: str
    text: str


def manuals(count: int, seed: int) -> list[Manual]:
    random = np.random.default_rng(seed)
    found = []
    for index in range(count):
        maker, thing = random.choice(_MAKERS), _THINGS[index % len(_THINGS)]
        name = f"{maker} {thing} {random.integers(2, 90) * 10}"
        part, other = random.choice(_PARTS, 2, replace=False)
        colour, second = random.choice(_COLOURS, 2, replace=False)
        text = (
            f"Manual of the {name}. The {name} is made for indoor use and runs on "
            f"{random.integers(110, 240)} volts. To install it, place it on a level surface, "
            f"connect the {other} to the {part}, tighten the {random.integers(2, 8)} screws, and "
            f"press the main button for {random.integers(2, 9)} seconds. When the light is "
            f"{colour}, the {part} is blocked and has to be cleaned. When the light is {second}, "
            f"the {name} is ready for use. Clean the {part} every {random.integers(2, 12)} weeks "
            f"with warm water and a soft cloth, and never use solvents. Replace the {other} after "
            f"{random.integers(1, 9) * 500} hours. The warranty of the {name} covers "
            f"{random.integers(1, 6)} years, but not damage to the {other} that comes from wrong "
            f"installation. For service, call the {maker} service desk and have the serial number "
            f"of the {name} at hand."
        )
        found.append(Manual(name, str(part), str(colour), text))
    return found


def write_questions(folder: Path) -> None:
    known, random = manuals(_MANUALS, _SEED), np.random.default_rng(5)
    pairs = [(which, asked) for which in range(_MANUALS - _NEW) for asked in range(len(ASKED))]
    random.shuffle(pairs)
    new = [
        (which, int(asked))
        for which in range(_MANUALS - _NEW, _MANUALS)
        for asked in random.choice(len(ASKED), _HELD_OUT // _NEW, replace=False)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    asked = [("known", pair) for pair in pairs[:_HELD_OUT]] + [("new", pair) for pair in new]
    for name, entries in (
        ("learn", [("manuals", pair) for pair in pairs[_HELD_OUT:]]),
        ("ask", asked),
    ):
        lines = [
            {"id": f"{which}-{at}", "category": category, "prompt": _prompt(known[which], at)}
            for category, (which, at) in entries
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _prompt(manual: Manual, asked: int) -> str:
    question = ASKED[asked].format(**vars(manual))
    return f"Answer with the help of the text.\n\n{manual.text}\n\nQuestion: {question}"


def rates(arguments: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as opened:
        head = arguments.head
        is_eagle = "medusa_num_heads" not in (head / "config.json").read_text()
        arms = ("none", "suffix", "eagle" if is_eagle else "medusa", "auto")
        engine = opened.enter_context(
            edge_spec.load(arguments.model, draft=str(head), runtime="ort")
        )
        # Conversations of their own: features and policies of one arm go on from text to text.
        engines = {arm: opened.enter_context(engine.fork()) for arm in arms}
        for arm, each in engines.items():
            each.set_drafter(arm)
        stats: dict[str, dict[str, list[Stats]]] = {arm: defaultdict(list) for arm in arms}
        differing = 0
        for index, entry in enumerate(read_prompts(arguments.prompts)[: arguments.count]):
            texts = {}
            for arm in arms[index % len(arms) :] + arms[: index % len(arms)]:
                result = engines[arm].chat(entry["prompt"], max_tokens=arguments.tokens)
                stats[arm][entry["category"]].append(result.stats)
                texts[arm] = [token.id for token in result.tokens]
            differing += sum(texts[arm] != texts["none"] for arm in arms)
            print(".", end="", flush=True)
    found = {arm: _summary(stats[arm], stats["none"]) for arm in arms}
    return {"arms": found, "differing": differing}


def _summary(of_arm: dict[str, list[Stats]], plain: dict[str, list[Stats]]) -> dict[str, Any]:
    everything = [each for stats in of_arm.values() for each in stats]
    heads = [
        each.drafters[name]
        for each in everything
        for name in ("eagle", "medusa")
        if name in each.drafters
    ]
    return {
        "speedup": {name: _rate(stats) / _rate(plain[name]) for name, stats in of_arm.items()},
        "all": _rate(everything) / _rate([each for stats in plain.values() for each in stats]),
        "worst": min(
            a.predicted_per_second / b.predicted_per_second
            for name, stats in of_arm.items()
            for a, b in zip(stats, plain[name], strict=True)
        ),
        "per_second": _rate(everything),
        "tokens_a_round": sum(s.predicted_n for s in everything)
        / sum(s.rounds for s in everything),
        "head": [sum(each.draft_n_accepted for each in heads), sum(each.draft_n for each in heads)],
    }


def _rate(stats: list[Stats]) -> float:
    return sum(s.predicted_n for s in stats) / sum(s.predicted_ms for s in stats) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("questions").add_argument("folder", type=Path)
    measuring = commands.add_parser("rates")
    measuring.add_argument("head", type=Path)
    measuring.add_argument("prompts", type=Path)
    measuring.add_argument("--model", default="smollm2")
    measuring.add_argument("--count", type=int, help="of prompts, from the first one")
    measuring.add_argument("--tokens", type=int, default=160)
    measuring.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "questions":
        write_questions(arguments.folder)
        return
    found = rates(arguments)
    print("\n| drafters | tokens/s | over plain | by category | worst | tokens a round | head |")
    for arm, each in found["arms"].items():
        by = ", ".join(f"{name} {ratio:.2f}" for name, ratio in each["speedup"].items())
        print(
            f"| {arm} | {each['per_second']:.1f} | {each['all']:.2f} | {by} | {each['worst']:.2f} "
            f"| {each['tokens_a_round']:.2f} | {each['head'][0]} of {each['head'][1]} |"
        )
    print(f"{found['differing']} texts differ from plain decoding's")
    report({"domain_head": found}, arguments.json)


if __name__ == "__main__":
    main()
