"""A head that was trained for one domain: how fast further questions are answered with it.

    python benchmarks/domain_head.py questions DIR
    edge-spec distill smollm2 --out HEAD --kind eagle3 --prompts DIR/learn.jsonl [...]
    python benchmarks/domain_head.py rates HEAD DIR/ask.jsonl [--times 8 --quantization fp16]

`questions` makes 48 manuals of half a page (as learning_curve.py does) and five questions about
each: 198 to learn from, and 24 that are asked afterwards, 12 of them about manuals that no question
to learn from is about. `rates` answers these, greedily and in turns, without drafting, with suffix
lookup, with the head alone and with both, which is the default, and prints speedups over plain
decoding. With --times, the target is the demo model with identity blocks (stretched.py), and the
head reads the same features there.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from common import read_prompts, report
from learning_curve import ASKED, Manual, manuals
from stretched import make_target, stretch_head

import edge_spec
from edge_spec.core.metrics import Stats

_MANUALS, _NEW = 48, 6  # of them, about which nothing is learnt
_SEED = 7
_HELD_OUT = 12  # questions about manuals that others are learnt of, and as many about new ones


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
        target, head = "smollm2", arguments.head
        is_eagle = "medusa_num_heads" not in (head / "config.json").read_text()
        arms = ("none", "suffix", "eagle" if is_eagle else "medusa", "auto")
        if arguments.times > 1:
            target = str(make_target(arguments.times, "onnx", arguments.quantization))
            if is_eagle:  # a Medusa head reads the final state, which is the same
                folder = Path(opened.enter_context(TemporaryDirectory()))
                head = stretch_head(head, folder / "head", arguments.times)
        engine = opened.enter_context(edge_spec.load(target, draft=str(head), runtime="ort"))
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
    measuring.add_argument("--times", type=int, default=1, help="blocks for each of the demo's")
    measuring.add_argument("--quantization", default="fp16", help="of the stretched target")
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
