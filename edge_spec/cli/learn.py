"""`edge-spec learn status|forget [MODEL]`: what was learnt from answers here, and an end to it."""

from __future__ import annotations

from typing import Annotated

import typer

from edge_spec.cli import options
from edge_spec.cli.output import print_json

learn = typer.Typer(
    name="learn", help="What --learn and --remember keep of answers.", no_args_is_help=True
)

_Model = Annotated[
    str | None, typer.Argument(help="The model that answers are of.  [default: all models]")
]


@learn.command()
def status(model: _Model = None, json: options.Json = False) -> None:
    """Say what is kept of answers, what was learnt, and whether it drafts."""
    from edge_spec.learning.learning_status import learnt_of, remembered_of, told

    found = [each.document() for each in learnt_of(model)]
    remembered = [each.document() for each in remembered_of(model)]
    if json:
        print_json({"models": found, "remembered": remembered})
        return
    for line in told(found, remembered):
        print(line)


@learn.command()
def forget(model: _Model = None, json: options.Json = False) -> None:
    """Remove answers that were kept, and all that was learnt from them."""
    from edge_spec.drafters.lookup import answers
    from edge_spec.learning.learning_status import learnt_of, remembered_of

    freed = {each.folder.path.name: each.folder.forget() for each in learnt_of(model)}
    freed |= {each.path.name: answers.forget(each.path) for each in remembered_of(model)}
    if json:
        print_json({"freed_bytes": freed})
        return
    total = sum(freed.values()) / 1e6
    print(f"Forgotten: {len(freed)} of {len(freed)} models, {total:.1f} MB.")
