"""What the default policy gains on recorded texts, on a clock that passes and drafters advance.

policy_texts.npz holds the texts, one of each kind, as the demo model wrote them:

    python benchmarks/simulate.py record tests/golden/policy_texts.npz \\
        --per-category 1 --tokens 96 --repetitions 1
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).with_name("policy_texts.npz")
BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)  # scripts, not a package

from policy_cases import DRAFTERS, STEPS_S, TABLES, decode  # noqa: E402
from simulate import read  # noqa: E402

# Simulated times are sums of floating-point numbers: another order of the sums, or a
# transcendental function of another C library, may flip a decision that was close.
MEAN_TOLERANCE, WORST_TOLERANCE = 0.02, 0.05
EVERY = 5  # of the default suite: meets every table and drafter, with costs known and unknown


def cases() -> list[tuple[str, float, str, str, bool]]:
    """Return name, seconds of a plain step, table, drafters and whether the table is known."""
    return [
        (
            f"{model}, {table}, {drafters}, {'known' if known else 'unknown'}",
            step_s,
            table,
            drafters,
            known,
        )
        for model, step_s in STEPS_S.items()
        for table in TABLES
        for drafters in DRAFTERS
        for known in (True, False)
    ]


def subset() -> list[str]:
    """Return the names of the cases that the default suite replays."""
    return [name for name, *_ in cases()[::EVERY]]


def record(names: list[str] | None = None) -> dict[str, Any]:
    """Return the figures of these cases, of all of them without names."""
    return dict(_record(names))


def _record(names: list[str] | None) -> Iterator[tuple[str, dict[str, float]]]:
    texts, about = read(TEXTS)
    random.Random(1).shuffle(texts)
    for name, step_s, table, drafters, known in cases():
        if names is None or name in names:
            found = decode(texts, about["vocab_size"], table, drafters, step_s, known)
            yield name, {figure: round(float(value), 6) for figure, value in found.items()}


def difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """Return where figures first differ by more than the tolerance; "" where none does."""
    for name in sorted({*expected, *got}):
        if name not in expected or name not in got:
            return f"{name} is {'new' if name in got else 'missing'}"
        before, now = expected[name], got[name]
        for figure, tolerance in (("speedup", MEAN_TOLERANCE), ("worst", WORST_TOLERANCE)):
            if abs(now[figure] / before[figure] - 1) > tolerance:
                return f"{name}/{figure}: {before[figure]} was recorded, {now[figure]} came"
    return ""
