"""What a draft wins for its target: chains, trees and cascades over plain decoding.

    python benchmarks/pairs.py --prompts spec_bench_dev.jsonl
    python benchmarks/pairs.py --pair 8x-gguf:F16/onnx:4 --arms chain,cascade --temperature 0

A pair TIMESx-FORMAT:QUANTIZATION/FORMAT:BITS is a stretched target and a draft of
benchmarks/stretched.py: real text, the acceptance of low-bit quantization, a realistic cost ratio.
Instead of BITS, a quantization of the exporter, such as Q4_K_M.
A GGUF runs on llama.cpp, a bundle on onnxruntime, so FORMAT also names the runtime.

All arms of a pair answer a prompt one after the other on the same two models: `plain`; `chain`,
`tree` (branches whether or not they are bit-identical here), `cascade`, and `suffix` alone or
before one of them (`suffix-chain`, `suffix-cascade`) under the default policy; `chain@N` always N
draft tokens, whose speedup is also forecast from t(k), the draft's step and the acceptance of each
draft token. At a temperature, drafts are sampled, or draw the same random numbers as the target
(`chain+seed`). Prints speedups by category, times of a round, forecasts, and how many greedy texts
are those of plain decoding.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import OWN_PROMPTS, compose_by, open_engine, read_prompts, report
from stretched import make_draft, make_target

from edge_spec.control.cost import RowCosts, forecast_speedup
from edge_spec.control.policy import FixedPolicy
from edge_spec.core.metrics import Stats
from edge_spec.core.model import Session
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.engine.engine import Engine
from edge_spec.engine.speculation import Speculation, SpeculationFactory

PAIRS = ("4x-onnx:int8/onnx:4", "8x-onnx:int8/onnx:4", "8x-gguf:F16/gguf:4", "8x-gguf:F16/onnx:4")
ARMS = ("plain", "chain", "tree", "cascade", "suffix-cascade", "chain@4")
DRAFTERS = {"chain": "draft-model", "tree": "draft-model"}  # others are called like theirs
RUNTIMES = {"onnx": "ort", "gguf": "llamacpp"}
_TIMED = 5  # passes of each width, for forecasts


class Arms(SpeculationFactory):
    """Composes an arm by its name."""

    def choose(self, names: str) -> Speculation:
        arm = names.partition("+")[0]
        if arm in ("plain", "none"):
            return super().choose("none")
        method, _, draft_tokens = arm.partition("@")
        branching = replace(self.batch_invariance, branch_invariant=method == "tree")
        drafters = ",".join(DRAFTERS.get(part, part) for part in method.split("-"))
        speculation = SpeculationFactory.choose(replace(self, batch_invariance=branching), drafters)
        if draft_tokens:
            fixed = FixedPolicy(int(draft_tokens), min_confidence=0.0, branches=False)
            speculation = replace(speculation, policy=fixed)
        return speculation


def pair_options(name: str) -> tuple[str, dict[str, Any]]:
    """The target of a pair, and how it is opened with its draft; both are made where missing."""
    target, _, draft = name.partition("/")
    times, _, stored = target.partition("x-")
    format, _, quantization = stored.partition(":")
    draft_format, _, bits = draft.partition(":")
    if bits.isdigit():
        draft_path = make_draft(int(bits), draft_format)
    else:
        draft_path = make_target(1, draft_format, bits)
    return str(make_target(int(times), format, quantization)), {
        "runtime": RUNTIMES[format],
        "draft": str(draft_path),
        "draft_runtime": RUNTIMES[draft_format],
    }


def open_pair(name: str) -> Engine:
    target, options = pair_options(name)
    engine = open_engine(target, **options)
    compose_by(engine, Arms(**vars(engine.parts.speculation_factory)))
    return engine


def rate(stats: Sequence[Stats]) -> float:
    return sum(s.predicted_n for s in stats) / sum(s.predicted_ms for s in stats) * 1e3


def step_ms(session: Session, tokens: Sequence[int], width: int) -> float:
    times = []
    for _ in range(_TIMED):
        start = time.perf_counter()
        session.forward(TokenTree.chain(tokens[-width], tokens[len(tokens) - width + 1 :]))
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def forecast(
    engine: Engine, tokens: Sequence[int], stats: Sequence[Stats], draft_tokens: int
) -> float:
    """Speedup by the formula, from t(1) and t(draft tokens + 1) at this context, c and
    acceptance."""
    target = engine.parts.model.open_session()
    draft = engine.parts.drafts[0].model.open_session()
    before = tokens[: -draft_tokens - 1]
    for session in (target, draft):
        session.prefill(before)
    t1, wide, step = [], [], []
    for _ in range(3):
        t1.append(step_ms(target, tokens, 1))
        wide.append(step_ms(target, tokens, draft_tokens + 1))
        step.append(step_ms(draft, tokens, 1))
    target.close()
    draft.close()
    costs = RowCosts({1: median(t1) / 1e3, draft_tokens + 1: median(wide) / 1e3})
    lengths = sum((s.acceptance_histogram for s in stats), Counter[int]())
    reached = [
        sum(n for length, n in lengths.items() if length >= i) for i in range(draft_tokens + 1)
    ]
    acceptance = [b / a if a else 0.0 for a, b in pairwise(reached)]
    return forecast_speedup(acceptance, costs, draft_tokens * median(step) / 1e3)


def measure(engine: Engine, arms: Sequence[str], prompts: Any, arguments: Any) -> dict[str, Any]:
    stats: dict[str, dict[str, list[Stats]]] = {arm: defaultdict(list) for arm in arms}
    equal: Counter[str] = Counter()
    for entry in prompts:
        texts = {}
        for arm in arms:
            engine.set_drafter(arm)
            seed = int(entry["id"]) if arm.endswith("+seed") else None
            sampling = SamplingParams(temperature=arguments.temperature, seed=seed)
            result = engine.chat(entry["prompt"], max_tokens=arguments.tokens, sampling=sampling)
            stats[arm][entry["category"]].append(result.stats)
            texts[arm] = [token.id for token in result.tokens]
        equal.update(arm for arm in arms if texts[arm] == texts[arms[0]])
        print(".", end="", flush=True)
    results: dict[str, Any] = {}
    plain = stats[arms[0]]
    for arm in arms:
        everything = [s for of_category in stats[arm].values() for s in of_category]
        rounds = sum(s.rounds for s in everything)
        results[arm] = {
            "predicted_per_second": rate(everything),
            "speedup": rate(everything) / rate([s for each in plain.values() for s in each]),
            "categories": {
                name: rate(of_category) / rate(plain[name])
                for name, of_category in stats[arm].items()
            },
            "acceptance_rate": sum(s.draft_n_accepted for s in everything)
            / max(1, sum(s.draft_n for s in everything)),
            "mean_accepted_length": sum(s.predicted_n for s in everything) / rounds,
            "draft_ms": sum(s.draft_ms for s in everything) / rounds,
            "verify_ms": sum(s.verify_ms for s in everything) / rounds,
            "overhead_ms": sum(s.overhead_ms for s in everything) / rounds,
            "plain_rounds": sum(s.plain_rounds for s in everything) / rounds,
            "equal_texts": equal[arm],
        }
        if "@" in arm:
            count = int(arm.partition("@")[2])
            tokens = engine.chat_prompt(prompts[0]["prompt"]) + texts[arm]
            results[arm]["forecast"] = forecast(engine, tokens, everything, count)
    return results


def show(pair: str, results: dict[str, Any], num_prompts: int) -> None:
    categories = list(next(iter(results.values()))["categories"])
    print(f"\n{pair}, {num_prompts} prompts\n{'':16s}{'total':>7s}", end="")
    print("".join(f"{name[:11]:>12s}" for name in categories), end="")
    print("   tokens  accepted   draft  verify    rest ms  equal")
    for arm, r in results.items():
        cells = "".join(f"{r['categories'][name]:12.2f}" for name in categories)
        print(
            f"{arm:16s}{r['speedup']:7.2f}{cells}{r['mean_accepted_length']:9.2f}"
            f"{r['acceptance_rate']:10.2f}{r['draft_ms']:8.1f}{r['verify_ms']:8.1f}"
            f"{r['overhead_ms']:8.2f} {r['equal_texts']:8d}"
        )
        if "forecast" in r:
            error = r["forecast"] / r["speedup"] - 1
            print(f"{'':16s}{r['forecast']:7.2f} forecast, {error:+.1%} of the measurement")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pair", action="append", dest="pairs")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    parser.add_argument("--each", type=int, default=2, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    by_category: dict[str, list[Any]] = defaultdict(list)
    for entry in read_prompts(arguments.prompts):
        by_category[entry["category"]].append(entry)
    prompts = [entry for entries in by_category.values() for entry in entries[: arguments.each]]
    arms = arguments.arms.split(",")
    results = {}
    for pair in arguments.pairs or PAIRS:
        with open_pair(pair) as engine:
            results[pair] = measure(engine, arms, prompts, arguments)
            batch_invariance = engine.parts.batch_invariance
        show(pair, results[pair], len(prompts))
        print(
            f"noise of widths {batch_invariance.tie_margin:.3f}, "
            f"of branches {batch_invariance.branch_margin:.3f}"
        )
    report({"pairs": results, "temperature": arguments.temperature}, arguments.json)


if __name__ == "__main__":
    main()
