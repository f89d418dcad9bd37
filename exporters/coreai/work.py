"""The parts of an export that call the library, each run in a separate process."""

from __future__ import annotations

from dataclasses import replace
from json import loads
from pathlib import Path

import numpy as np

from edge_spec.core.isolated import tell
from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.exporters.block_quantize import weigh_columns
from edge_spec.exporters.checkpoint import first_layers
from edge_spec.exporters.parity import score_text
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.requests import StaticShape
from edge_spec.models import runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.models.core_ai import FORMAT

_SAME = 1e-2  # of a logit: float32 in another order makes 2e-4 on the demo model


def write(source: str, path: str, asked: str) -> None:
    """Write a program. asked: bits, number of layers, context length and whether it returns hidden
    states, as JSON."""
    from edge_spec.exporters.coreai.graph import build_program
    from edge_spec.exporters.coreai.weights import CoreAiWeights

    bits, num_layers, context_length, hidden = loads(asked)
    checkpoint = first_layers(open_checkpoint(Path(source)), num_layers)
    config = replace(checkpoint.config, context_length=context_length)
    if bits is not None:
        checkpoint = weigh_columns(checkpoint, lambda what, done: tell(done / 3))
    weights = CoreAiWeights(checkpoint, bits)
    shape = StaticShape.of(context_length)
    program = build_program(weights, config, shape, hidden, lambda done: tell((1 + done) / 3))
    try:
        program.save_asset(Path(path))
    except RuntimeError as error:  # it hides what the system says
        raise error.__cause__ or error from None


def score(path: str, tokens: str, scores: str) -> None:
    """Score a text with a bundle's program, and save the scores as a numpy file. Raises ValueError
    if the prefill function writes another cache."""
    text = loads(tokens)
    model = runtimes.load_runtime(FORMAT).open(open_bundle(Path(path)), RuntimeOptions())
    found = score_text(model, text, tell)
    session = model.open_session()
    session.prefill(text[:-2])
    again = session.forward(TokenTree.chain(text[-2])).logits[0]
    difference = float(np.abs(again - found[-1]).max())
    if not difference <= _SAME:  # also true for NaN
        raise ValueError(f"after a prefill its scores differ by {difference:.3g}")
    with Path(scores).open("wb") as file:
        np.save(file, found)
    model.close()
