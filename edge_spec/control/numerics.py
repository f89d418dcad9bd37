"""How a runtime's numbers depend on how many rows are scored together; measured, not assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_spec.model import Model
from edge_spec.tree import TokenTree

MARGIN_WIDTHS = (1, 8)  # enough to measure the noise
EXACT_WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # those that exact mode may use, if they are invariant
_PROMPT_TOKENS = 16
_SCORED_TOKENS = 8
_TOP_TOKENS = 32
_BRANCH_ROWS, _BRANCH_ROUNDS = 8, 4


@dataclass(frozen=True)
class Numerics:
    """`tie_margin`: the largest change of a margin between likely tokens that was seen when a row
    was scored in a pass of another width. `invariant_widths`: ascending widths at which the rows
    of a chain were bit-identical to those at the widest one measured, which is among them.
    `branch_margin`: the same change for rows of a branch, and for a row after a branch was
    committed; `branch_invariant`: whether they were bit-identical to those of a chain."""

    tie_margin: float
    invariant_widths: tuple[int, ...]
    branch_margin: float = 0.0
    branch_invariant: bool = True


def measure_numerics(model: Model, widths: Sequence[int] = MARGIN_WIDTHS) -> Numerics:
    """Scores the same tokens at each of the ascending widths. Raises nothing of its own.

    Takes about as long as 12 plain steps for MARGIN_WIDTHS and as 50 for EXACT_WIDTHS, and eight
    passes of up to _BRANCH_ROWS rows; twice that and three prefills where the runtime takes other
    kernels for longer texts.
    """
    # A tiny context leaves room for less.
    limit = min(model.capabilities.max_rows, max(1, model.config.context_length // 2))
    widths = [width for width in widths if width <= limit]
    longest = model.config.context_length - widths[-1]
    prompts = {min(_PROMPT_TOKENS, longest), min(model.capabilities.settled_tokens, longest)}
    margins, invariant = [0.0], set(widths)
    branch_margins, branch_invariant = [0.0], model.capabilities.trees
    for prompt_tokens in sorted(prompts - {0}):
        margin, same = _measure_after(model, prompt_tokens, widths)
        margins.append(margin)
        invariant &= same
        room = model.config.context_length - prompt_tokens
        if room < _BRANCH_ROUNDS * _BRANCH_ROWS or model.capabilities.max_rows < _BRANCH_ROWS:
            branch_invariant = False  # not known
        elif model.capabilities.trees:
            margin, identical = _measure_branch(model, prompt_tokens)
            branch_margins.append(margin)
            branch_invariant &= identical
    return Numerics(max(margins), tuple(sorted(invariant)), max(branch_margins), branch_invariant)


def _measure_after(
    model: Model, prompt_tokens: int, widths: Sequence[int]
) -> tuple[float, set[int]]:
    """The largest change of a margin, and the widths that agree with the widest, after a prompt."""
    num_rows = widths[-1]
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt_tokens + num_rows)
    chain = tokens[prompt_tokens:].tolist()
    session = model.open_session()
    try:
        session.prefill(tokens[:prompt_tokens].tolist())
        widest = session.forward(TokenTree.chain(chain[0], chain[1:])).logits.copy()
        margin, invariant = 0.0, set()
        for width in widths:
            same = True
            session.rollback(prompt_tokens)
            for start in range(0, min(_SCORED_TOKENS, num_rows - width + 1), width):
                part = chain[start : start + width]
                logits = session.forward(TokenTree.chain(part[0], part[1:])).logits
                expected = widest[start : start + width]
                same &= bool(np.array_equal(logits, expected))
                margin = max(margin, _margin_change(logits, expected))
                session.commit(range(width))
            if same:
                invariant.add(width)
    finally:
        session.close()
    return margin, invariant


def _measure_branch(model: Model, prompt_tokens: int) -> tuple[float, bool]:
    """The largest change of a margin between branches and the same tokens as chains, and whether
    they were bit-identical; as they are scored and after they were committed.

    Several rounds: a cache may place tokens in the holes that rejected rows leave, and order
    matters from then on.
    """
    path = [0, *range(4, _BRANCH_ROWS)]  # behind three rows of a chain
    tokens = np.random.default_rng(1).integers(
        0, model.config.vocab_size, prompt_tokens + _BRANCH_ROUNDS * _BRANCH_ROWS
    )
    prompt, rounds = tokens[:prompt_tokens], tokens[prompt_tokens:].reshape(-1, _BRANCH_ROWS)
    parents = np.array([-1, 0, 1, 2, 0, *path[1:-1]], np.int32)
    session = model.open_session()
    try:
        scores = []
        for branching in (True, False):
            session.rollback(0)
            session.prefill(prompt.tolist())
            rows = []
            for guesses in rounds.astype(np.int32):
                chain = TokenTree.chain(int(guesses[0]), guesses[path[1:]].tolist())
                tree = TokenTree(guesses, parents, np.ones(_BRANCH_ROWS, np.float32))
                kept = path if branching else list(range(len(path)))
                rows.append(session.forward(tree if branching else chain).logits[kept].copy())
                session.commit(kept)
            scores.append(np.concatenate(rows))
    finally:
        session.close()
    branched, chained = scores
    return _margin_change(branched, chained), bool(np.array_equal(branched, chained))


def _margin_change(logits: np.ndarray, expected: np.ndarray) -> float:
    """The largest change, over rows, of a likely token's distance to the most likely one."""
    count = min(_TOP_TOKENS, expected.shape[1])
    top = np.argpartition(expected, -count, axis=1)[:, -count:]
    change = np.take_along_axis(logits - expected, top, axis=1)
    best = np.take_along_axis(logits - expected, expected.argmax(axis=1)[:, None], axis=1)
    return float(np.abs(change - best).max())
