"""What drafting while the target verifies wins over drafting after it.

    python benchmarks/overlap.py --pair 8x-onnx:int8/onnx:4 --threads 1 --draft-threads 1
    python benchmarks/overlap.py --target TARGET.gguf --draft DRAFT.gguf --runtime llamacpp \\
        --device cuda --draft-device cpu

A pair is one of benchmarks/pairs.py, or any two models. All arms answer a prompt one after the
other, in turns: `plain`; `after` drafts after the target, `meanwhile` while it verifies as well,
both under the default policy; `auto` tries both and keeps the faster one, as --draft-overlap auto
does. Where both models share a processor, `meanwhile` and `auto` need threads that are split
between them; `plain+all` and `after+all` then give each model all threads in its turn, which is
what a split has to win against.

Prints the rate of each arm and its speedup, times of a round, the share of rounds whose draft
tokens were ready, and how many greedy texts are those of plain decoding.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import OWN_PROMPTS, compose_by, open_engine, read_prompts, report
from pairs import pair_options

from edge_spec.core.metrics import Stats
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.models.overlap_mode import DraftOverlap

OVERLAPS = {
    "after": DraftOverlap.OFF,
    "meanwhile": DraftOverlap.ON,
    "auto": DraftOverlap.AUTO,
}


class Arms(SpeculationFactory):
    """Composes an arm by its name."""

    def choose(self, names: str) -> Speculation:
        if names not in OVERLAPS:
            return super().choose("none" if names == "plain" else names)
        return SpeculationFactory.choose(replace(self, draft_overlap=OVERLAPS[names]), "cascade")


def open_arms(arguments: argparse.Namespace, threads: int, draft_threads: int) -> Engine:
    if arguments.target:
        target, options = (
            arguments.target,
            {
                "runtime": arguments.runtime,
                "draft": arguments.draft,
                "draft_runtime": arguments.draft_runtime or arguments.runtime,
            },
        )
    else:
        target, options = pair_options(arguments.pair)
    engine = open_engine(
        target,
        **options,
        threads=threads,
        draft_threads=draft_threads,
        draft_overlap=DraftOverlap.ON,
        device=arguments.device,
        draft_device=arguments.draft_device,
    )
    compose_by(engine, Arms(**vars(engine.parts.speculation_factory)))
    return engine


def measure(engines: dict[str, Engine], prompts: Any, num_tokens: int) -> dict[str, Any]:
    """engines: of each arm; arms of one engine differ in their first word."""
    stats: dict[str, list[Stats]] = {arm: [] for arm in engines}
    equal = dict.fromkeys(engines, 0)
    arms = list(engines)
    for number, entry in enumerate(prompts):
        texts = {}
        turn = number % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            engine = engines[arm]
            engine.set_drafter(arm.partition("+")[0])
            result = engine.chat(entry["prompt"], max_tokens=num_tokens)
            stats[arm].append(result.stats)
            texts[arm] = [token.id for token in result.tokens]
        for arm in arms:
            equal[arm] += texts[arm] == texts["plain"]
        print(".", end="", flush=True)
    return {arm: summary(stats[arm], stats["plain"]) | {"equal_texts": equal[arm]} for arm in arms}


def summary(stats: list[Stats], plain: list[Stats]) -> dict[str, Any]:
    rounds = sum(each.rounds for each in stats)
    return {
        "predicted_per_second": rate(stats),
        "speedup": rate(stats) / rate(plain),
        "mean_accepted_length": sum(each.predicted_n for each in stats) / rounds,
        "ready": sum(each.anticipated_n for each in stats) / rounds,
        "draft_ms": sum(each.draft_ms for each in stats) / rounds,
        "verify_ms": sum(each.verify_ms for each in stats) / rounds,
    }


def rate(stats: list[Stats]) -> float:
    return sum(s.predicted_n for s in stats) / sum(s.predicted_ms for s in stats) * 1e3


def show(results: dict[str, Any], num_prompts: int) -> None:
    print(
        f"\n{num_prompts} prompts\n{'':12s} tokens/s  ratio  tokens  ready   draft  verify ms"
        "  equal"
    )
    for arm, r in results.items():
        print(
            f"{arm:12s}{r['predicted_per_second']:9.1f}{r['speedup']:7.2f}"
            f"{r['mean_accepted_length']:8.2f}{r['ready']:7.2f}{r['draft_ms']:8.2f}"
            f"{r['verify_ms']:11.2f}{r['equal_texts']:7d}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="8x-onnx:int8/onnx:4")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--draft-runtime")
    parser.add_argument("--device")
    parser.add_argument("--draft-device")
    cores = os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=max(1, cores // 2))
    parser.add_argument("--draft-threads", type=int, default=max(1, cores // 2))
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if bool(arguments.target) != bool(arguments.draft):
        parser.error("--target and --draft go together")
    entries = read_prompts(arguments.prompts)
    prompts = entries[:: max(1, len(entries) // arguments.num_prompts)][: arguments.num_prompts]
    with ExitStack() as opened:
        split = opened.enter_context(
            open_arms(arguments, arguments.threads, arguments.draft_threads)
        )
        engines = dict.fromkeys(["plain", *OVERLAPS], split)
        if not (arguments.device or arguments.draft_device):
            whole = opened.enter_context(open_arms(arguments, cores, cores))
            engines |= {"plain+all": whole, "after+all": whole}
        results = measure(engines, prompts, arguments.tokens)
    show(results, len(prompts))
    report({"arms": results}, arguments.json)


if __name__ == "__main__":
    main()
