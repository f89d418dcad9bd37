"""How a runtime's numbers depend on how many rows are scored together; measured, not assumed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge_spec.model import Model
from edge_spec.tree import TokenTree

_WIDTHS = (1, 2, 3, 4, 8)
_PROMPT_TOKENS = 16
_TOP_TOKENS = 32


@dataclass(frozen=True)
class Numerics:
    """`tie_margin`: the largest change of a margin between likely tokens that was seen when a row
    was scored in a pass of another width. `invariant_widths`: widths of a chain at which rows
    were bit-identical to those of the widest; empty where only that one is."""

    tie_margin: float
    invariant_widths: tuple[int, ...]


def measure_numerics(model: Model) -> Numerics:
    """Scores one chain at several widths. Takes about as long as 12 plain steps."""
    tokens = np.random.default_rng(0).integers(
        0, model.config.vocab_size, _PROMPT_TOKENS + max(_WIDTHS)
    )
    session = model.open_session()
    try:
        session.prefill(tokens[:_PROMPT_TOKENS].tolist())
        chain = tokens[_PROMPT_TOKENS:].tolist()
        widest = session.forward(TokenTree.chain(chain[0], chain[1:])).logits.copy()
        margin, invariant = 0.0, [max(_WIDTHS)]
        for width in _WIDTHS[:-1]:
            same = True
            session.rollback(_PROMPT_TOKENS)
            for start in range(0, max(_WIDTHS) - width + 1, width):
                part = chain[start : start + width]
                logits = session.forward(TokenTree.chain(part[0], part[1:])).logits
                expected = widest[start : start + width]
                same &= bool(np.array_equal(logits, expected))
                margin = max(margin, _margin_change(logits, expected))
                session.commit(range(width))
            if same:
                invariant.append(width)
    finally:
        session.close()
    return Numerics(margin, tuple(sorted(invariant)) if len(invariant) > 1 else ())


def _margin_change(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest change, over rows, of a likely token's distance to the most likely one."""
    top = np.argpartition(expected, -_TOP_TOKENS, axis=1)[:, -_TOP_TOKENS:]
    change = np.take_along_axis(logits - expected, top, axis=1)
    best = np.take_along_axis(logits - expected, expected.argmax(axis=1)[:, None], axis=1)
    return float(np.abs(change - best).max())
