"""`edge-spec tune-skip MODEL`: which part of a model drafts best for the whole."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import ProgressBar, print_json

if TYPE_CHECKING:
    from edge_spec.core.model import Progress
    from edge_spec.engine.engine import Engine
    from edge_spec.placement.layer_selection import ChosenPart

_PROMPTS = (
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write a Python function that removes duplicates from a list and explain it.",
    "List five things to check before buying a used bicycle.",
)
_TOKENS = 128  # of each answer


def tune_skip(
    model: options.NamedModel,
    trials: Annotated[int, typer.Option(help="Sets of sublayers that are tried.", min=0)] = 100,
    json: options.Json = False,
) -> None:
    """Search the exit and the sublayers to leave out with which a model drafts best for itself.

    Both are kept in the bundle, where --drafter early-exit and layer-skip find them.
    """
    from edge_spec.errors import UsageError
    from edge_spec.loader import load_engine
    from edge_spec.models.bundle import Bundle
    from edge_spec.models.options import LoadOptions
    from edge_spec.models.pair_bundle import is_in_pair
    from edge_spec.models.resolve import resolve_model
    from edge_spec.models.source import Source
    from edge_spec.placement.layer_selection import save_parts

    plain = LoadOptions(runtime="ort", drafter="none")
    bar = ProgressBar()
    source = Source(model, bar)
    if not source.is_demo and is_in_pair(source.path):
        raise UsageError(
            f"{model} is part of a pair bundle, whose files stay as they were written",
            remedy="Tune the model that it was made from.",
        )
    with bar as progress, load_engine(model, plain, progress) as engine:
        bundle = resolve_model(source, "ort", plain, progress).source
        if not isinstance(bundle, Bundle):
            raise UsageError(f"{model} is no bundle", remedy="Convert it with edge-spec export.")
        parts = _best_parts(engine, trials, progress)
    save_parts(bundle, parts)
    if json:
        print_json({name: asdict(part) for name, part in parts.items()})
        return
    for name, part in parts.items():
        print(f"{name}: {part}")
    print(f"kept in {bundle.path}")


def _best_parts(engine: Engine, trials: int, progress: Progress) -> dict[str, ChosenPart]:
    """Returns the parts by the names of the drafters that run them."""
    from edge_spec.placement.layer_selection import Judge, best_exit, best_nested, optimized
    from edge_spec.placement.measure import measure_rows

    texts = []
    for i, prompt in enumerate(_PROMPTS):
        progress("Writing texts to judge by", i / len(_PROMPTS))
        answer = engine.chat(prompt, max_tokens=_TOKENS)
        texts.append(engine.chat_prompt(prompt) + [token.id for token in answer.tokens])
    loaded = engine.parts.model
    with Judge(loaded, texts, measure_rows(loaded)) as judge:
        parts = {"early-exit": best_exit(judge)}
        parts["layer-skip"] = optimized(
            judge,
            best_nested(judge),
            trials,
            lambda done: progress("Trying sets of sublayers", done / trials),
        )
    return parts
