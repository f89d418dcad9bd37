"""Replays recorded rounds under other t(k): what the policy would do on other machines.

    python benchmarks/simulate.py record OUT.npz --prompts FILE       # texts, t(k), a measured case
    python benchmarks/simulate.py replay OUT.npz [--machines NAME ...] [--json FILE]

`record` decodes each prompt plainly and greedily and keeps the text with the likeliest tokens on
the way, then measures t(k) and, to check the simulation against, the real ratio of the default
drafting to plain decoding on the same prompts. `replay` runs the real round loop on the recorded
texts, on a clock that each machine's t(k) advances: suffix lookup with every fixed number of
draft tokens, other drafters, and the default policy, which knows t(k) as it would be measured there
and nothing else. "measured" is this machine: its forecast stands beside what was measured.

Other machines are roofline models: a pass takes a fixed time for the call, and then the longer of
reading the weights once and computing its rows. Their figures are assumptions, printed with the
results; they are not measurements of any product.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import OWN_PROMPTS, open_engine, read_prompts, report
from replay import (
    Charged,
    DraftCost,
    Recording,
    VirtualClock,
    record,
    replay,
)

from edge_spec.core.metrics import Stats
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.jacobi import LookaheadDrafter, WindowSize
from edge_spec.drafters.lookup.recycling import RecyclingDrafter
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.scheduler.adaptive import AdaptivePolicy
from edge_spec.scheduler.cost import RowCosts
from edge_spec.scheduler.measure import median_seconds, quick_passes
from edge_spec.scheduler.policy import FixedPolicy, Policy

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
DRAFT_TOKENS = (1, 2, 3, 5, 7, 15)  # of the fixed settings
CONTEXT_SHARE = 1 / 4000  # of a pass, more for each token of context: assumed, for both sides
# Seconds a round in Python, measured here among passes (drafting, ms a round, of
# benchmarks/drafters.py); other processors are charged the same.
DRAFT_COSTS = {
    "suffix": DraftCost(80e-6, 10e-6, 60e-6),
    "recycling": DraftCost(80e-6, 10e-6, 300e-6),
    "suffix+recycling": DraftCost(250e-6, 20e-6, 350e-6),
    "lookahead": DraftCost(100e-6, 10e-6, 100e-6),
}


@dataclass(frozen=True)
class Machine:
    """A roofline: what a pass takes by the weights that it reads and the rows that it computes."""

    what: str
    weights_gb: float  # read once a pass
    bandwidth_gb_s: float
    row_gflop: float  # two for each weight
    gflop_s: float  # sustained
    call_s: float = 0.0
    widths: tuple[int, ...] = tuple(range(1, 33))  # passes that are compiled; others are padded

    def pass_s(self, rows: int) -> float:
        padded = next(width for width in self.widths if width >= rows)
        reading_s = self.weights_gb / self.bandwidth_gb_s
        return self.call_s + max(reading_s, padded * self.row_gflop / self.gflop_s)


MACHINES = {
    "phone-cpu": Machine("3B int4 on four phone cores", 1.7, 45, 6, 250),
    "laptop-gpu": Machine("8B int4 on a laptop GPU", 4.7, 250, 16, 10_000, 0.0003),
    "npu": Machine("3B int4 on an NPU, 1 ms a call", 1.7, 80, 6, 5_000, 0.001, (1, 4, 8, 16, 32)),
    "70b": Machine("70B int4 in a desktop's memory", 40, 80, 140, 900),
}


def drafting(names: str, policy: Callable[[VirtualClock, str], Policy]) -> Callable[..., Any]:
    def speculate(clock: VirtualClock) -> tuple[list[Drafter], Policy]:
        makers: dict[str, Callable[[], Drafter]] = {
            "suffix": SuffixDrafter,
            "recycling": RecyclingDrafter,
            "lookahead": lambda: LookaheadDrafter(WindowSize.within(16)),
        }
        drafters = [makers[name]() for name in names.split("+")]
        drafter = drafters[0] if len(drafters) == 1 else CompositeDrafter(drafters)
        charged = Charged(drafter, DRAFT_COSTS[drafter.name], clock)
        return [charged], policy(clock, drafter.name)

    return speculate


def fixed(draft_tokens: int) -> Callable[[VirtualClock, str], Policy]:
    return lambda clock, name: FixedPolicy(draft_tokens, branches=False)


def settings(costs: RowCosts) -> dict[str, Callable[..., Any]]:
    def measured(branches: bool) -> Callable[[VirtualClock, str], Policy]:
        # Each run learns its own drift.
        return lambda clock, name: AdaptivePolicy(
            RowCosts(costs.measured), {}, {name}, branches=branches, clock=clock
        )

    chosen = {
        f"suffix@{draft_tokens}": drafting("suffix", fixed(draft_tokens))
        for draft_tokens in DRAFT_TOKENS
    }
    return {
        **chosen,
        "auto": drafting("suffix", measured(branches=False)),
        "auto: suffix+recycling": drafting("suffix+recycling", measured(branches=False)),
        "the same in trees": drafting("suffix+recycling", measured(branches=True)),
        "auto: lookahead": drafting("lookahead", measured(branches=False)),
    }


def simulated(
    recordings: Sequence[Recording],
    vocab_size: int,
    speculate: Callable[..., Any],
    pass_s: Callable[[int], float],
) -> dict[str, Any]:
    """Ratios to plain decoding on the same clock, and what was scored."""
    rows: Counter[int] = Counter()

    def of_context(num_rows: int, context: int) -> float:
        rows[num_rows] += 1
        return pass_s(num_rows) * (1 + context * CONTEXT_SHARE)

    all_stats = replay(recordings, vocab_size, speculate, of_context)
    plain_s = [
        sum(
            pass_s(1) * (1 + (len(recording.prompt) + i) * CONTEXT_SHARE)
            for i in range(stats.predicted_n)
        )
        for recording, stats in zip(recordings, all_stats, strict=True)
    ]
    seconds = [stats.predicted_ms / 1e3 for stats in all_stats]
    categories = [recording.category for recording in recordings]
    mean_rows = sum(n * count for n, count in rows.items()) / rows.total()
    return {
        "speedup": sum(plain_s) / sum(seconds),
        "categories": {
            name: _ratio(
                [p for p, c in zip(plain_s, categories, strict=True) if c == name],
                [s for s, c in zip(seconds, categories, strict=True) if c == name],
            )
            for name in dict.fromkeys(categories)
        },
        "worst": min(p / s for p, s in zip(plain_s, seconds, strict=True)),
        "rows": mean_rows,
        "tokens_a_round": sum(s.predicted_n for s in all_stats) / sum(s.rounds for s in all_stats),
        "plain_rounds": sum(s.plain_rounds for s in all_stats) / sum(s.rounds for s in all_stats),
    }


def _ratio(plain_s: Sequence[float], seconds: Sequence[float]) -> float:
    return sum(plain_s) / sum(seconds)


def do_record(arguments: argparse.Namespace) -> None:
    entries = read_prompts(arguments.prompts, arguments.per_category)
    arrays: dict[str, np.ndarray] = {}
    told: list[dict[str, Any]] = []
    with open_engine(arguments.model, runtime=arguments.runtime) as engine:
        stop_ids = frozenset(engine.parts.text.eos_ids)
        session = engine.parts.model.open_session()
        for i, entry in enumerate(entries):
            prompt = engine.chat_prompt(entry["prompt"])
            made = record(session, prompt, arguments.tokens, stop_ids, entry["category"])
            arrays |= {f"top{i}": made.top, f"gaps{i}": made.gaps}
            told.append({"category": made.category, "prompt": made.prompt, "tokens": made.tokens})
        session.close()
        seconds_by_rows = median_seconds(quick_passes(engine.parts.model, WIDTHS))
        measured = _measured(engine, entries, arguments)
        vocab_size = engine.parts.model.config.vocab_size
    about = {
        "texts": told,
        "vocab_size": vocab_size,
        "seconds": {str(rows): seconds for rows, seconds in seconds_by_rows.items()},
        "measured": measured,
    }
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez_compressed(arguments.file, **arrays)
    print(f"{len(told)} texts; measured ratio of the default drafting: {measured['speedup']:.2f}")


def _measured(engine: Any, entries: Sequence[dict[str, str]], arguments: Any) -> dict[str, Any]:
    """The default drafting against plain decoding, in turns; medians over repetitions."""
    times: dict[str, list[list[Stats]]] = {"auto": [], "none": []}
    for entry in entries:
        for of_case in times.values():
            of_case.append([])
        for _ in range(arguments.repetitions):
            for case, of_case in times.items():
                engine.set_drafter(case)
                answer = engine.chat(entry["prompt"], max_tokens=arguments.tokens)
                of_case[-1].append(answer.stats)
    seconds = {
        case: [median(stats.predicted_ms for stats in of_prompt) / 1e3 for of_prompt in of_case]
        for case, of_case in times.items()
    }
    categories = [entry["category"] for entry in entries]
    of_category = {}
    for name in dict.fromkeys(categories):
        chosen = [i for i, category in enumerate(categories) if category == name]
        of_category[name] = _ratio(*([seconds[c][i] for i in chosen] for c in ("none", "auto")))
    return {"speedup": _ratio(seconds["none"], seconds["auto"]), "categories": of_category}


def read(path: Path) -> tuple[list[Recording], dict[str, Any]]:
    with np.load(path) as arrays:
        about = json.loads(arrays["about"].tobytes())
        recordings = [
            Recording(
                text["category"],
                tuple(text["prompt"]),
                tuple(text["tokens"]),
                arrays[f"top{i}"],
                arrays[f"gaps{i}"],
            )
            for i, text in enumerate(about["texts"])
        ]
    return recordings, about


def do_replay(arguments: argparse.Namespace) -> None:
    recordings, about = read(arguments.file)
    here = RowCosts({int(rows): seconds for rows, seconds in about["seconds"].items()})
    results: dict[str, Any] = {}
    for name in arguments.machines:
        if name == "measured":
            costs, what = here, "this machine"
        else:
            machine = MACHINES[name]
            costs = RowCosts({rows: machine.pass_s(rows) for rows in range(1, 33)})
            what = str({key: value for key, value in asdict(machine).items() if key != "widths"})
        print(f"\n{name}: {what}")
        curve = " ".join(f"{rows}: {costs.at(rows) / costs.at(1):.2f}" for rows in (2, 4, 8, 16))
        print(f"a plain step takes {1e3 * costs.at(1):.1f} ms; t(k)/t(1) for k = {curve}")
        results[name] = {
            setting: simulated(recordings, about["vocab_size"], speculate, costs.at)
            for setting, speculate in settings(costs).items()
        }
        _print(results[name])
        if name == "measured":
            _check(results[name]["auto"], about["measured"])
    report({"machines": results, "measured": about["measured"]}, arguments.json)


def _print(results: dict[str, Any]) -> None:
    print("setting                 ratio  worst  tokens/round  rows  plain rounds  by category")
    for setting, figures in results.items():
        categories = " ".join(f"{name[:5]} {r:.2f}" for name, r in figures["categories"].items())
        print(
            f"{setting:22s} {figures['speedup']:6.2f} {figures['worst']:6.2f} "
            f"{figures['tokens_a_round']:13.2f} {figures['rows']:5.1f} "
            f"{figures['plain_rounds']:13.0%}  {categories}",
            flush=True,
        )


def _check(forecast: dict[str, Any], measured: dict[str, Any]) -> None:
    off = forecast["speedup"] / measured["speedup"] - 1
    print(f"measured: {measured['speedup']:.2f}, so the simulation is {off:+.1%} off")
    for name, ratio in measured["categories"].items():
        print(f"  {name:15s} {ratio:.2f}, simulated {forecast['categories'][name]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--model", default="smollm2")
    recording.add_argument("--runtime", default="auto")
    recording.add_argument("--prompts", type=Path, default=OWN_PROMPTS)
    recording.add_argument("--per-category", type=int)
    recording.add_argument("--tokens", type=int, default=128)
    recording.add_argument("--repetitions", type=int, default=3)
    recording.set_defaults(run=do_record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("file", type=Path)
    names = ("measured", *MACHINES)
    replaying.add_argument("--machines", nargs="+", choices=names, default=names)
    replaying.add_argument("--json", type=Path)
    replaying.set_defaults(run=do_replay)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
