"""Measures what each mode of --lossless keeps and costs: every prompt answered in each, in turns.

    python benchmarks/exact.py --prompts spec_bench_dev.jsonl                 # the default runtime
    python benchmarks/exact.py --runtime llamacpp --model FILE --prompts FILE --modes ties,auto

Plain and speculative in each mode; texts of a mode are compared token by token. Rates are of
decoding alone. Ratios are those of one prompt's answers, of which the median and the least are
quoted, and those of all tokens over all seconds. The fastest plain steps are those of "ties".
With --repeat, a prompt's fastest answer of each kind counts, since whatever else is running only
makes it slower.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import cycle, islice, product
from pathlib import Path
from statistics import median
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.core.metrics import Stats
from edge_spec.engine.engine import Engine

MODES = ("ties", "auto", "always")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--quant")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--mmap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)[: arguments.count]
    options = {
        "runtime": arguments.runtime,
        "quantization": arguments.quant,
        "threads": arguments.threads,
        "mmap": arguments.mmap,
    }
    with ExitStack() as opened:
        engines = {
            mode: opened.enter_context(open_engine(arguments.model, lossless=mode, **options))
            for mode in arguments.modes.split(",")
        }
        found = measure(engines, prompts, arguments.tokens, arguments.repeat)
        for mode, engine in engines.items():
            factory = engine.parts.speculation_factory
            found["runtime"] = engine.runtime
            found["modes"][mode]["told"] = factory.lossless.describe()
    print(summary(found), flush=True)
    report(found, arguments.json)


def measure(
    engines: Mapping[str, Engine],
    prompts: Sequence[dict[str, str]],
    num_tokens: int,
    repeat: int = 1,
) -> dict[str, Any]:
    arms = list(product(engines, ("none", "auto")))
    differing = dict.fromkeys(engines, 0)
    stats: dict[tuple[str, str], list[Stats]] = defaultdict(list)
    for number, entry in enumerate(prompts):
        texts: dict[tuple[str, str], set[tuple[int, ...]]] = defaultdict(set)
        found: dict[tuple[str, str], list[Stats]] = defaultdict(list)
        for first in range(number, number + repeat):
            for mode, drafter in islice(
                cycle(arms), first % len(arms), first % len(arms) + len(arms)
            ):
                engines[mode].set_drafter(drafter)
                result = engines[mode].chat(entry["prompt"], max_tokens=num_tokens)
                texts[mode, drafter].add(tuple(token.id for token in result.tokens))
                found[mode, drafter].append(result.stats)
        for arm, answers in found.items():
            stats[arm].append(min(answers, key=lambda each: each.predicted_ms / each.predicted_n))
        for mode in engines:
            differing[mode] += len(texts[mode, "auto"] | texts[mode, "none"]) > 1
    fastest = stats[next(iter(engines)), "none"]
    return {
        "num_prompts": len(prompts),
        "repeat": repeat,
        "num_tokens": sum(each.predicted_n for each in stats[arms[-1]]),
        "num_accepted": sum(each.draft_n_accepted for each in stats[arms[-1]]),
        "modes": {
            mode: {
                "differing": differing[mode],
                "tokens_per_s": _rate(stats[mode, "auto"]),
                "plain_tokens_per_s": _rate(stats[mode, "none"]),
                "plain_over_fastest": _ratios(stats[mode, "none"], fastest),
                "over_plain": _ratios(stats[mode, "auto"], stats[mode, "none"]),
                "over_fastest": _ratios(stats[mode, "auto"], fastest),
            }
            for mode in engines
        },
    }


def summary(found: dict[str, Any]) -> str:
    lines = [
        f"{found['runtime']}: {found['num_prompts']} prompts, {found['num_tokens']} tokens, "
        f"{found['num_accepted']} accepted draft tokens",
        "| mode | promised | texts that differ | tokens/s | plain | plain over the fastest | "
        "over plain | over the fastest plain | worst prompt |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, each in found["modes"].items():
        lines.append(
            f"| {mode} | {each['told']} | {each['differing']} | {each['tokens_per_s']:.1f} | "
            f"{each['plain_tokens_per_s']:.1f} | {each['plain_over_fastest']['total']:.2f} | "
            f"{each['over_plain']['total']:.2f} | {each['over_fastest']['total']:.2f} "
            f"(median {each['over_fastest']['median']:.2f}) | "
            f"{each['over_fastest']['worst']:.2f} |"
        )
    return "\n".join(lines)


def _rate(stats: Sequence[Stats]) -> float:
    """Tokens a second, over all answers."""
    return 1e3 * sum(each.predicted_n for each in stats) / sum(s.predicted_ms for s in stats)


def _ratios(stats: Sequence[Stats], base: Sequence[Stats]) -> dict[str, float]:
    ratios = [
        each.predicted_per_second / other.predicted_per_second
        for each, other in zip(stats, base, strict=True)
    ]
    return {"total": _rate(stats) / _rate(base), "median": median(ratios), "worst": min(ratios)}


if __name__ == "__main__":
    main()
