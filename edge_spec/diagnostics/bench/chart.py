"""Draws a measurement as one picture: how much faster it is, where draft tokens were accepted, and
what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_spec.errors import MissingDependencyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FORMATS = ("svg", "png")
_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 9.5, 8.5, 150
_ORDINALS = ("1st", "2nd", "3rd")
_SHADES = "Greys"  # the pictures say the same in print


def draw_chart(report: Mapping[str, Any], directory: Path) -> None:
    """Writes chart.svg and chart.png of a report's document. Raises MissingDependencyError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "a chart needs matplotlib, which is not installed",
            remedy='Run: pip install "edge-spec[bench]".',
        ) from error
    groups = {**report["categories"], "all": report["total"]}
    settings = report["settings"]
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    axes = figure.subplot_mosaic([["speed", "speed"], ["accepted", "cost"]], width_ratios=(3, 2))
    figure.suptitle(f"{settings['model']} on {settings['runtime']}, drafter {settings['drafter']}")
    _draw_speedups(axes["speed"], groups)
    _draw_accepted(axes["accepted"], groups)
    _draw_costs(axes["cost"], settings.get("row_costs") or {})
    for format in _FORMATS:
        figure.savefig(directory / f"chart.{format}", dpi=_DOTS_PER_INCH)


def _draw_speedups(axes: Axes, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """Whiskers are the confidence intervals, the line at 1 is plain decoding."""
    heights = [of["speedup"] for of in groups.values()]
    below = [of["speedup"] - of["speedup_low"] for of in groups.values()]
    above = [of["speedup_high"] - of["speedup"] for of in groups.values()]
    drawn = axes.bar(list(groups), heights, yerr=(below, above), capsize=4, color="0.75", ec="0")
    drawn[-1].set_hatch("//")
    box = {"boxstyle": "round", "facecolor": "1", "edgecolor": "none"}
    labels = [f"{height:.2f}" for height in heights]
    axes.bar_label(drawn, labels, label_type="center", bbox=box)  # clear of line and whiskers
    axes.axhline(1.0, color="0", linestyle="--", linewidth=1)
    axes.set_title("How many times as fast as without drafting")
    axes.tick_params(axis="x", rotation=20)


def _draw_accepted(axes: Axes, groups: Mapping[str, Mapping[str, Any]]) -> None:
    """A line a category, a column a draft token of a round."""
    import numpy as np

    shares = {name: of["accepted_by_position"] for name, of in groups.items()}
    columns = max(map(len, shares.values()))
    if not columns:
        _say(axes, "No draft token was accepted.")
        return
    table = np.zeros((len(shares), columns))
    for row, of_positions in enumerate(shares.values()):
        table[row, : len(of_positions)] = of_positions
    axes.imshow(table, cmap=_SHADES, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(table):
        if share:
            color = "1" if share > 0.5 else "0"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=color)
    axes.set_xticks(range(columns), [_ordinal(column + 1) for column in range(columns)])
    axes.set_yticks(range(len(shares)), list(shares))
    axes.set_title("Of 100 passes of the model, so many\nkept this draft token")


def _draw_costs(axes: Axes, costs: Mapping[Any, float]) -> None:
    """costs: of passes by their rows, in plain steps."""
    if not costs:
        _say(axes, "What passes cost was not measured:\nnothing was drafted.")
        return
    drawn = axes.barh([str(rows) for rows in costs], list(costs.values()), color="0.75", ec="0")
    axes.bar_label(drawn, [f"{steps:.2f}" for steps in costs.values()], padding=3)
    axes.axvline(1.0, color="0", linestyle="--", linewidth=1)
    axes.set_xlim(0, 1.2 * max(costs.values()))
    axes.invert_yaxis()
    axes.set_ylabel("tokens that the pass looks at")
    axes.set_title("What a pass costs,\nin steps without drafting")


def _say(axes: Axes, text: str) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, text, ha="center", va="center")


def _ordinal(number: int) -> str:
    return _ORDINALS[number - 1] if number <= len(_ORDINALS) else f"{number}th"
