"""What exact mode keeps and what it costs: four answers to every prompt, interleaved.

    python benchmarks/exact.py --prompts spec_bench_dev.jsonl                 # the default runtime
    python benchmarks/exact.py --runtime ik --model FILE --prompts FILE.jsonl

Plain and speculative, in exact mode and not; texts of a mode are compared token by token, rates are
of decoding alone, ratios those of one prompt's answers, of which the median is quoted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from common import OWN_PROMPTS, open_engine, read_prompts, report

from edge_spec.engine.engine import Engine

ARMS = [(exact, drafter) for exact in (False, True) for drafter in ("none", "auto")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--quant")
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)[: arguments.count]
    options = {
        "runtime": arguments.runtime,
        "quantization": arguments.quant,
        "threads": arguments.threads,
    }
    with (
        open_engine(arguments.model, **options) as default,
        open_engine(arguments.model, exact=True, **options) as exact,
    ):
        found = measure(default, exact, prompts, arguments.tokens)
        speculation_factory = exact.parts.speculation_factory
        found["runtime"] = exact.runtime
        found["replays"] = speculation_factory.replays
        found["invariant_widths"] = list(speculation_factory.batch_invariance.invariant_widths)
        found["tie_margin"] = speculation_factory.batch_invariance.tie_margin
    print(summary(found), flush=True)
    report(found, arguments.json)


def measure(
    default: Engine, exact: Engine, prompts: Sequence[dict[str, str]], num_tokens: int
) -> dict[str, Any]:
    differing = {False: 0, True: 0}
    tokens, accepted = 0, 0
    rates: dict[tuple[bool, str], list[float]] = {arm: [] for arm in ARMS}
    for number, entry in enumerate(prompts):
        texts = {}
        for arm in islice(cycle(ARMS), number % len(ARMS), number % len(ARMS) + len(ARMS)):
            is_exact, drafter = arm
            engine = exact if is_exact else default
            engine.set_drafter(drafter)
            result = engine.chat(entry["prompt"], max_tokens=num_tokens)
            texts[arm] = [token.id for token in result.tokens]
            rates[arm].append(result.stats.predicted_per_second)
            accepted += result.stats.draft_n_accepted if is_exact else 0
        tokens += len(texts[True, "none"])
        for is_exact in differing:
            differing[is_exact] += texts[is_exact, "auto"] != texts[is_exact, "none"]
    return {
        "num_prompts": len(prompts),
        "num_tokens": tokens,
        "num_accepted": accepted,
        "differing": differing[True],
        "differing_by_default": differing[False],
        "plain_ratio": _ratio(rates[True, "none"], rates[False, "none"]),
        "speculative_ratio": _ratio(rates[True, "auto"], rates[False, "auto"]),
        "speedup": _ratio(rates[True, "auto"], rates[True, "none"]),
        "speedup_by_default": _ratio(rates[False, "auto"], rates[False, "none"]),
    }


def summary(found: dict[str, Any]) -> str:
    how = "near ties replayed" if found["replays"] else f"widths {found['invariant_widths']}"
    return (
        f"{found['runtime']}: {found['differing']} of {found['num_prompts']} texts differ in exact "
        f"mode ({found['num_tokens']} tokens, {found['num_accepted']} accepted "
        f"draft tokens, {how}), "
        f"{found['differing_by_default']} by default; exact against default: plain "
        f"{found['plain_ratio']:.2f}, speculative {found['speculative_ratio']:.2f}; speculative "
        f"against plain: exact {found['speedup']:.2f}, default {found['speedup_by_default']:.2f}"
    )


def _ratio(rates: Sequence[float], base: Sequence[float]) -> float:
    return median(rate / other for rate, other in zip(rates, base, strict=True))


if __name__ == "__main__":
    main()
