"""What the machine draws for a token, as far as it tells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_spec.core.energy import Energy
from edge_spec.diagnostics.bench.bootstrap import Paired, speedup
from edge_spec.diagnostics.bench.measuring import BenchMeasurement, Run


@dataclass(frozen=True)
class EnergySource:
    """What told the energy, in words, and what the machine drew before anything was measured, in
    watts; None where that is not known, for the reason `unknown`."""

    name: str
    idle_w: float | None = None
    unknown: str = ""


def energy_figures(
    measured: BenchMeasurement, strata: Sequence[Sequence[int]], side: str, base: str
) -> dict[str, Any]:
    """Returns joules a token of decoding by each of two sides, and the one over the other, with
    95 % confidence intervals as those of the speedup; over the prompts of which all is known.

    strata: indices of tasks by category.
    """
    known = [[i for i in indices if _is_known(measured, i, side, base)] for indices in strata]
    known = [indices for indices in known if indices]
    figures: dict[str, Any] = {"energy_prompts": sum(map(len, known)), **_NO_FIGURES}
    if not known:
        return figures
    pairs = [_paired(measured, indices, side, base) for indices in known]
    figures |= _inverse("energy_ratio", pairs)
    figures |= _inverse("joules_per_token", [_alone(each) for each in pairs])
    swapped = [_swapped(each) for each in pairs]
    figures |= _inverse("plain_joules_per_token", [_alone(each) for each in swapped])
    every = [i for indices in known for i in indices]
    figures["energy_seconds_per_token"] = _seconds_per_token(measured, every, side)
    figures["plain_energy_seconds_per_token"] = _seconds_per_token(measured, every, base)
    return figures


def why_unknown(measured: BenchMeasurement) -> str | None:
    """Returns the commonest reason; None where all is known of our own two sides."""
    sides = list(measured.runs.values())[:2]
    runs = (run for passes in sides for of_pass in passes for run in of_pass)
    reasons = Counter(run.energy.why or "no token" for run in runs if not run.energy.joules)
    return reasons.most_common(1)[0][0] if reasons else None


def with_energy(
    measured: BenchMeasurement, between: Callable[[float, float], Energy]
) -> BenchMeasurement:
    """Returns the measurement with the energy of its runs told afterwards. between: from and to
    seconds since 1970."""

    def told(run: Run) -> Run:
        if not run.ended_s:
            return run
        return replace(run, energy=between(run.ended_s - run.seconds, run.ended_s))

    runs = {
        name: [[told(run) for run in of_pass] for of_pass in passes]
        for name, passes in measured.runs.items()
    }
    return replace(measured, runs=runs)


def energy_lines(report: Mapping[str, Any]) -> list[str]:
    """What the report says of it; nothing where it is of a version that did not measure it."""
    energy, total = report.get("energy"), report["total"]
    if energy is None:
        return []
    if total.get("joules_per_token") is None:
        return ["", f"Energy: not known: {energy['unknown']}."]
    idle_w = energy["idle_w"]
    rows = [
        _row(category, of)
        for category, of in [*report["categories"].items(), ("all", total)]
        if of["joules_per_token"] is not None
    ]
    idle = f"not known ({energy['idle_unknown']})" if idle_w is None else f"{idle_w:.3g} W"
    heads = "category | prompts | plain J/token | J/token | over plain | plain above idle | above"
    return [
        "",
        f"Energy by {energy['source']}: all that it counts while a text is decoded, whatever else "
        f"runs included; idle draw before the measurement: {idle}.",
        "",
        f"| {heads} idle |",
        f"| {' | '.join(['---'] * 7)} |",
        *rows,
    ]


def _row(category: str, of: Mapping[str, Any]) -> str:
    intervals = (
        f"{of[name]:.3g} ({of[f'{name}_low']:.3g} to {of[f'{name}_high']:.3g})"
        for name in ("plain_joules_per_token", "joules_per_token", "energy_ratio")
    )
    above = (of[f"{prefix}joules_above_idle_per_token"] for prefix in ("plain_", ""))
    told = ("" if joules is None else f"{joules:.3g}" for joules in above)
    return f"| {' | '.join([category, str(of['energy_prompts']), *intervals, *told])} |"


def above_idle(of: Mapping[str, Any], idle_w: float | None) -> dict[str, float | None]:
    """Returns joules a token without what the machine would have drawn anyway, of both sides."""
    found: dict[str, float | None] = {}
    for prefix in ("", "plain_"):
        joules, seconds = of[f"{prefix}joules_per_token"], of[f"{prefix}energy_seconds_per_token"]
        known = joules is not None and idle_w is not None
        found[f"{prefix}joules_above_idle_per_token"] = joules - idle_w * seconds if known else None
    return found


_INTERVALS = ("joules_per_token", "plain_joules_per_token", "energy_ratio")
_NO_FIGURES = {
    **{f"{name}{end}": None for name in _INTERVALS for end in ("", "_low", "_high")},
    "energy_seconds_per_token": None,
    "plain_energy_seconds_per_token": None,
}


def _is_known(measured: BenchMeasurement, index: int, *sides: str) -> bool:
    runs = [of_pass[index] for side in sides for of_pass in measured.runs[side]]
    return all(run.energy.joules and run.num_tokens for run in runs)


def _paired(measured: BenchMeasurement, indices: Sequence[int], side: str, base: str) -> Paired:
    """With joules in the place of seconds."""
    arrays = []
    for name in (side, base):
        rows = [[of_pass[i] for of_pass in measured.runs[name]] for i in indices]
        arrays.append(np.array([[float(run.num_tokens) for run in row] for row in rows]))
        arrays.append(np.array([[run.energy.joules or 0.0 for run in row] for row in rows]))
    return Paired(*arrays)


def _swapped(paired: Paired) -> Paired:
    return Paired(paired.base_tokens, paired.base_seconds, paired.tokens, paired.seconds)


def _alone(paired: Paired) -> Paired:
    """Over a base of one token a joule."""
    ones = np.ones_like(paired.tokens)
    return replace(paired, base_tokens=ones, base_seconds=ones)


def _inverse(name: str, pairs: Sequence[Paired]) -> dict[str, float]:
    """Joules over tokens, of tokens over joules."""
    value, low, high = speedup(pairs)
    return {name: 1 / value, f"{name}_low": 1 / high, f"{name}_high": 1 / low}


def _seconds_per_token(measured: BenchMeasurement, indices: Sequence[int], side: str) -> float:
    runs = [of_pass[i] for of_pass in measured.runs[side] for i in indices]
    return sum(run.seconds for run in runs) / sum(run.num_tokens for run in runs)
