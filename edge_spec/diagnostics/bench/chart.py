"""The speedup of each category as a bar."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_spec.errors import MissingDependencyError

_FORMATS = ("svg", "png")
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 8, 4.5, 150


def draw_chart(report: dict[str, Any], directory: Path) -> None:
    """Writes chart.svg and chart.png. Whiskers are the confidence intervals, the line at 1 is plain
    decoding. Raises MissingDependencyError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a chart needs matplotlib, which is not installed",
            remedy='Run: pip install "edge-spec[bench]".',
        ) from error
    bars = {**report["categories"], "all": report["total"]}
    heights = [of["speedup"] for of in bars.values()]
    below = [of["speedup"] - of["speedup_low"] for of in bars.values()]
    above = [of["speedup_high"] - of["speedup"] for of in bars.values()]
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    axes = figure.subplots()
    drawn = axes.bar(list(bars), heights, yerr=(below, above), capsize=4, color="0.75", ec="0")
    drawn[-1].set_hatch("//")
    box = {"boxstyle": "round", "facecolor": "1", "edgecolor": "none"}
    labels = [f"{height:.2f}" for height in heights]
    axes.bar_label(drawn, labels, label_type="center", bbox=box)  # clear of line and whiskers
    axes.axhline(1.0, color="0", linestyle="--", linewidth=1)
    axes.set_ylabel("speedup over plain decoding")
    axes.tick_params(axis="x", rotation=20)
    settings = report["settings"]
    axes.set_title(f"{settings['model']} on {settings['runtime']}, drafter {settings['drafter']}")
    for format in _FORMATS:
        figure.savefig(directory / f"chart.{format}", dpi=_DOTS_PER_INCH)
