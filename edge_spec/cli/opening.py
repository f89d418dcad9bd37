"""Opens an engine as the options of a command say, with its progress shown."""

from __future__ import annotations

from edge_spec.cli.options import AskedOptions
from edge_spec.cli.output import ProgressBar
from edge_spec.core.model import Progress
from edge_spec.engine.engine import Engine
from edge_spec.loader import Screen, load_asked


def open_engine(
    model: str,
    options: AskedOptions,
    measure_when_idle: bool = False,
    report: Progress | None = None,
    keeps_answers: bool = True,
    screen: Screen | None = None,
    needs_chat: bool = False,
    learns: bool = False,
) -> Engine:
    """report: instead of a bar on stderr; screen: is shown the models before their weights are
    read; needs_chat: refuses a model without a chat template; learns: from answers, while idle.
    Raises an EdgeSpecError, and what `screen` raises."""
    learning = None
    if learns:
        from edge_spec.distill.idle_learning import require_learnable, start_learning

        require_learnable(options)
        learning = start_learning
    with ProgressBar() as bar:
        return load_asked(
            model,
            options,
            report or bar,
            measure_when_idle=measure_when_idle,
            keeps_answers=keeps_answers,
            screen=screen,
            needs_chat=needs_chat,
            learning=learning,
        )
