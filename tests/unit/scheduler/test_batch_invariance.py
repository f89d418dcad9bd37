"""Numerics are measured on models whose noise is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler.batch_invariance import (
    MARGIN_WIDTHS,
    USUAL_WIDTHS,
    measure_batch_invariance,
)
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

SETTLED = 100  # tokens, from which on a runtime may have other kernels
ROUNDING = 1e-5  # of logits of about 5 in float32


@dataclass(frozen=True)
class At:
    """Where a row is scored. branches: paths that are no chain and were committed before it."""

    width: int
    row: int
    length: int
    in_branch: bool
    branches: int


Noise = Callable[[At], float]


class NoisyModel(ScriptedModel):
    """Adds noise to the logit of each row's likeliest token."""

    def __init__(self, noise: Noise, context_length: int = 512, max_rows: int = 64) -> None:
        super().__init__(random_logits(40), 40, context_length)
        self.noise = noise
        self.capabilities = type(self.capabilities)(max_rows, True, True, False)
        self.open_sessions = 0
        self.cost = 0  # of all passes, each of which takes as long as ten more rows

    def open_session(self) -> ScriptedSession:
        self.open_sessions += 1
        return NoisySession(self)


class NoisySession(ScriptedSession):
    branches = 0

    def forward(self, tree: TokenTree) -> Forward:
        model: Any = self._model
        assert len(tree) <= model.capabilities.max_rows
        assert tree.is_chain or model.capabilities.trees
        model.cost += 10 + len(tree)
        logits = super().forward(tree).logits
        best = logits.argmax(axis=1)
        for row in range(len(tree)):
            path = tree.path(row)
            in_branch = path != list(range(len(path)))
            at = At(len(tree), row, self.length, in_branch, self.branches)
            logits[row, best[row]] += model.noise(at)
        return Forward(logits)

    def commit(self, rows: Any) -> None:
        self.branches += list(rows) != list(range(len(rows)))
        super().commit(rows)

    def rollback(self, length: int) -> None:
        self.branches = 0
        super().rollback(length)

    def close(self) -> None:
        super().close()
        model: Any = self._model
        model.open_sessions -= 1


def quiet(at: At) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("noise", "margin", "widths"),
    [
        (quiet, 0.0, USUAL_WIDTHS),
        (lambda at: 0.1 * (at.width < 4), 0.1, range(4, 17)),
        # Widths have to agree after a longer text, too.
        (lambda at: 0.25 * (at.width < 4 and at.length >= SETTLED), 0.25, range(4, 17)),
        # Padded plain steps score every token in row 0, draft tokens are scored in the rows after.
        (lambda at: 0.1 * at.row if at.width > 1 else 0.3, None, (1,)),
        # Of groups of equal widths the largest, not the widest: padding to that would cost most.
        (lambda at: 0.3 * (at.width == 1) + 0.1 * (at.width > 6), None, (2, 3, 4, 5, 6)),
    ],
)
def test_widths_that_score_rows_alike_are_found(
    noise: Noise, margin: float | None, widths: Any
) -> None:
    model = NoisyModel(noise)
    model.capabilities = replace(model.capabilities, settled_tokens=SETTLED)
    found = measure_batch_invariance(model, USUAL_WIDTHS)
    assert found.invariant_widths == tuple(widths)
    if margin is not None:
        assert found.tie_margin == pytest.approx(margin, abs=ROUNDING)
    assert model.open_sessions == 0


@pytest.mark.parametrize(
    ("noise", "widths"), [(quiet, MARGIN_WIDTHS), (lambda at: -0.25 * (at.width == 1), (8,))]
)
def test_the_margin_is_the_largest_change_between_likely_tokens(
    noise: Noise, widths: tuple[int, ...]
) -> None:
    found = measure_batch_invariance(NoisyModel(noise))
    assert found.tie_margin == pytest.approx(0.0 if noise is quiet else 0.25, abs=ROUNDING)
    assert found.invariant_widths == widths


@pytest.mark.parametrize(
    ("noise", "agree"),
    [
        (quiet, True),
        (lambda at: 0.5 * at.in_branch, False),
        (lambda at: 0.25 * (at.branches > 0), False),
        # As where tokens begin to fill the holes that rejected rows left in a cache.
        (lambda at: 0.5 * (at.branches >= 3), False),
    ],
)
def test_branches_are_measured_as_they_are_scored_and_after_their_commit(
    noise: Noise, agree: bool
) -> None:
    found = measure_batch_invariance(NoisyModel(noise))
    assert found.tie_margin == 0 and found.invariant_widths == MARGIN_WIDTHS
    assert found.branch_invariant == agree


@pytest.mark.parametrize("noisy_below", [0, 2])
def test_a_large_model_is_measured_in_few_passes_of_which_each_tells_more(noisy_below: int) -> None:
    model = NoisyModel(lambda at: 0.25 * (at.width < noisy_below), context_length=1024)
    model.config = replace(model.config, num_layers=32, hidden_size=4096)
    model.capabilities = replace(model.capabilities, settled_tokens=272)
    found = measure_batch_invariance(model, USUAL_WIDTHS)
    expected = (1, 2, 3, 4, 6, 8, 12, 16)
    assert found.invariant_widths == tuple(width for width in expected if width >= noisy_below)
    large, model.cost = model.cost, 0
    model.config = replace(model.config, num_layers=2)
    measure_batch_invariance(model, USUAL_WIDTHS)
    assert large < model.cost / 3
