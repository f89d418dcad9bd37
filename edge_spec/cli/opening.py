"""From the options of a command to an engine, with its progress shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_spec.cli.progress import ProgressBar
from edge_spec.drafters.fill import Fill
from edge_spec.drafters.lookahead import WindowSize
from edge_spec.engine import Engine
from edge_spec.load_options import LoadOptions
from edge_spec.loading import load_engine


def open_engine(
    model: str,
    *,
    device: str | None,
    draft_device: str | None,
    context: int | None,
    corpus: list[Path] | None,
    lookahead: str | None,
    jacobi: Fill | None,
    **options: Any,
) -> Engine:
    """`options` are those of LoadOptions. Raises an EdgeSpecError."""
    load_options = LoadOptions(
        corpora=tuple(corpus or ()),
        window=None if lookahead is None else WindowSize.parse(lookahead),
        fill=jacobi,
        providers=_names(device),
        draft_providers=_names(draft_device),
        context_length=context,
        **options,
    )
    with ProgressBar() as progress:
        return load_engine(model, load_options, progress)


def _names(joined: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in joined.split(",")) if joined else ()
