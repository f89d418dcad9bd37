"""What `sudo powermetrics` of macOS has written while answers were: only root may ask it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from edge_spec.core.energy import Energy
from edge_spec.errors import UsageError

COMMAND = "sudo powermetrics --samplers cpu_power -i 200 -b 1 > FILE"
_MOST_BYTES = 256_000_000
_LEAST_COVERED = 0.95  # of an interval
_FEWEST_SAMPLES = 3  # that an interval is as long as: at its ends are parts of one
_HEADER = re.compile(r"^\*\*\* Sampled system activity \((.+?)\) \(([\d.]+)ms elapsed\)")
_POWER = re.compile(r"^(CPU|GPU|ANE|Combined) Power\b[^:]*: ([\d.]+) (m?)W\b")


@dataclass(frozen=True)
class Sample:
    """An average over `elapsed_s`. told_s: its end, whole seconds since 1970 rounded down."""

    told_s: float
    elapsed_s: float
    watts: float


@dataclass(frozen=True)
class PowerLog:
    """Averages, one after another. ends_s: seconds since 1970."""

    samples: tuple[Sample, ...]
    ends_s: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"powermetrics ({len(self.samples)} samples: CPU, GPU and ANE)"

    def between(self, start_s: float, end_s: float) -> Energy:
        """Returns the energy between two times, seconds since 1970."""
        joules = covered_s = longest_s = 0.0
        for sample, ended_s in zip(self.samples, self.ends_s, strict=True):
            inside_s = min(end_s, ended_s) - max(start_s, ended_s - sample.elapsed_s)
            if inside_s > 0:
                covered_s += inside_s
                joules += inside_s * sample.watts
                longest_s = max(longest_s, sample.elapsed_s)
        asked_s = end_s - start_s
        if covered_s < _LEAST_COVERED * asked_s or not covered_s:
            share = covered_s / asked_s if asked_s > 0 else 0.0
            return Energy(None, f"the power log covers {share:.0%} of an answer")
        if asked_s < _FEWEST_SAMPLES * longest_s:
            return Energy(
                None,
                f"the power log's samples of {longest_s:.1f} s are too long for an answer of "
                f"{asked_s:.1f} s: give powermetrics a shorter -i",
            )
        return Energy(joules * asked_s / covered_s)


def read_power_log(path: Path) -> PowerLog:
    """Reads powermetrics' text. Raises UsageError for a file that has no samples or cannot be read.

    Its times are whole seconds, but each sample says how long it is: of all of them together
    follows when the first one began, within one sample where there are some a second.
    """
    samples = tuple(_samples(_text(path).splitlines()))
    if not samples:
        raise UsageError(
            f"{path} has no samples of powermetrics", remedy=f"Write it with {COMMAND}."
        )
    since_first = [0.0]
    for sample in samples:
        since_first.append(since_first[-1] + sample.elapsed_s)
    starts = [each.told_s - sum_s for each, sum_s in zip(samples, since_first[1:], strict=True)]
    begun_s = (max(starts) + min(starts) + 1) / 2  # each end is within the second that it tells
    ends = [
        min(max(begun_s + sum_s, each.told_s), each.told_s + 1)
        for each, sum_s in zip(samples, since_first[1:], strict=True)
    ]
    return PowerLog(samples, tuple(ends))


def _text(path: Path) -> str:
    """Raises UsageError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise UsageError(
                f"the power log {path} is too large", remedy="Give powermetrics a longer -i."
            )
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the power log {path}: {error.strerror}",
            remedy=f"Write it with {COMMAND}.",
        ) from None
    if b"\0" in data or data.startswith(b"<?xml"):
        raise UsageError(
            f"the power log {path} is not powermetrics' text", remedy=f"Write it with {COMMAND}."
        )
    return data.decode("utf-8", errors="replace")


def _samples(lines: list[str]) -> Iterator[Sample]:
    """Passes over those that lack a time or a power, as the last one may, which is being written,
    and those whose time is before the one that came before."""
    starts = [i for i, line in enumerate(lines) if line.startswith("*** Sampled")]
    last_s = 0.0
    for start, end in pairwise([*starts, len(lines)]):
        sample = _sample(lines[start], lines[start + 1 : end])
        if sample is not None and sample.told_s >= last_s:
            last_s = sample.told_s
            yield sample


def _sample(header: str, lines: list[str]) -> Sample | None:
    found = _HEADER.match(header)
    powers = {
        match[1]: float(match[2]) * (1e-3 if match[3] else 1.0)
        for match in map(_POWER.match, lines)
        if match and match[2].count(".") <= 1 and match[2] != "."
    }
    if found is None or not powers:
        return None
    try:
        told = datetime.strptime(found[1], "%a %b %d %H:%M:%S %Y %z")
        elapsed_s = float(found[2]) / 1e3
    except ValueError:
        return None
    if elapsed_s <= 0:
        return None
    watts = powers.get("Combined", sum(powers.values()))
    return Sample(told.timestamp(), elapsed_s, watts)
