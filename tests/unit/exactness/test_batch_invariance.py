"""Numerics are measured on models whose noise is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.exactness.batch_invariance import (
    MARGIN_WIDTHS,
    USUAL_WIDTHS,
    agreeing_width,
    measure_batch_invariance,
)
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits


class NoisyModel(ScriptedModel):
    """Adds noise(width) to the logit of each row's likeliest token."""

    def __init__(self, noise: Any, context_length: int = 512, max_rows: int = 64) -> None:
        super().__init__(random_logits(40), 40, context_length)
        self.noise, self.max_rows = noise, max_rows
        self.capabilities = type(self.capabilities)(max_rows, True, True, False)
        self.open_sessions = 0

    def open_session(self) -> ScriptedSession:
        self.open_sessions += 1
        return NoisySession(self)


class NoisySession(ScriptedSession):
    def forward(self, tree: TokenTree) -> Forward:
        model: Any = self._model
        assert len(tree) <= model.max_rows
        logits = super().forward(tree).logits
        logits[np.arange(len(tree)), logits.argmax(axis=1)] += model.noise(len(tree))
        return Forward(logits)

    def close(self) -> None:
        super().close()
        model: Any = self._model
        model.open_sessions -= 1


@pytest.mark.parametrize("widths", [MARGIN_WIDTHS, USUAL_WIDTHS])
def test_a_model_without_noise_has_no_margin_and_every_width(widths: tuple[int, ...]) -> None:
    batch_invariance = measure_batch_invariance(NoisyModel(lambda width: 0), widths)
    assert batch_invariance.tie_margin == 0
    assert batch_invariance.invariant_widths == widths


def test_the_margin_is_the_largest_change_between_likely_tokens() -> None:
    batch_invariance = measure_batch_invariance(
        NoisyModel(lambda width: -0.25 if width == 1 else 0.0)
    )
    # Logits of about 5 in float32: six digits.
    assert batch_invariance.tie_margin == pytest.approx(0.25, abs=1e-5)
    assert batch_invariance.invariant_widths == (8,)


def test_a_shift_of_all_logits_changes_no_margin() -> None:
    class Shifted(NoisySession):
        def forward(self, tree: TokenTree) -> Forward:
            return Forward(super().forward(tree).logits + np.float32(len(tree)))

    model: Any = NoisyModel(lambda width: 0)
    model.open_session = lambda: Shifted(model)
    model.open_sessions = 1
    # Adding 8 to a logit of about 5 in float32 rounds at 1e-6.
    assert measure_batch_invariance(model).tie_margin < 1e-5


def test_only_the_widths_equal_to_the_widest_are_invariant() -> None:
    batch_invariance = measure_batch_invariance(
        NoisyModel(lambda width: 0.1 * (width < 4)), USUAL_WIDTHS
    )
    assert batch_invariance.invariant_widths == tuple(range(4, 17))


@pytest.mark.parametrize("context_length", [1, 2, 3, 5, 16, 20, 31, 40])
@pytest.mark.parametrize("widths", [MARGIN_WIDTHS, USUAL_WIDTHS])
def test_a_small_context_leaves_at_least_one_width(
    context_length: int, widths: tuple[int, ...]
) -> None:
    model = NoisyModel(lambda width: 0.01 * width, context_length)
    batch_invariance = measure_batch_invariance(model, widths)
    [width] = batch_invariance.invariant_widths  # every width differs
    assert width in widths and (width == 1) == (max(1, context_length // 2) < widths[1])


@pytest.mark.parametrize("max_rows", [1, 3, 8])
def test_no_pass_is_wider_than_the_model_accepts(max_rows: int) -> None:
    batch_invariance = measure_batch_invariance(
        NoisyModel(lambda width: 0, max_rows=max_rows), USUAL_WIDTHS
    )
    assert max(batch_invariance.invariant_widths) <= max_rows


def test_the_session_is_closed() -> None:
    model = NoisyModel(lambda width: 0)
    measure_batch_invariance(model)
    assert model.open_sessions == 0


class BranchNoise(NoisySession):
    """Adds to the likeliest logit of rows that are no chain, or of all rows once a path that is
    none was committed."""

    added_in_branch, added_after = 0.0, 0.0
    _committed_branch = False

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        best = logits.argmax(axis=1)
        for row in range(len(tree)):
            path = tree.path(row)
            branch = path != list(range(len(path)))
            noise = self.added_in_branch * branch + self.added_after * self._committed_branch
            logits[row, best[row]] += noise
        return Forward(logits)

    def commit(self, rows: Any) -> None:
        self._committed_branch = list(rows) != list(range(len(rows)))
        super().commit(rows)

    def rollback(self, length: int) -> None:
        self._committed_branch = False
        super().rollback(length)


@pytest.mark.parametrize(
    ("in_branch", "after", "margin"), [(0.0, 0.0, 0.0), (0.5, 0.0, 0.5), (0.0, 0.25, 0.25)]
)
def test_branches_are_measured_as_they_are_scored_and_after_their_commit(
    monkeypatch: Any, in_branch: float, after: float, margin: float
) -> None:
    monkeypatch.setattr(BranchNoise, "added_in_branch", in_branch)
    monkeypatch.setattr(BranchNoise, "added_after", after)
    model: Any = NoisyModel(lambda width: 0)
    model.open_session = lambda: BranchNoise(model)
    batch_invariance = measure_batch_invariance(model)
    assert batch_invariance.tie_margin == 0 and batch_invariance.invariant_widths == MARGIN_WIDTHS
    assert batch_invariance.branch_margin == pytest.approx(margin, abs=1e-5)
    assert batch_invariance.branch_invariant == (margin == 0)


def test_noise_that_comes_with_the_third_branch_is_seen() -> None:
    """As where tokens begin to fill the holes that rejected rows left in a cache."""

    class LateNoise(NoisySession):
        branches = 0

        def forward(self, tree: TokenTree) -> Forward:
            logits = super().forward(tree).logits
            logits[np.arange(len(tree)), logits.argmax(axis=1)] += 0.5 * (self.branches >= 3)
            return Forward(logits)

        def commit(self, rows: Any) -> None:
            self.branches += list(rows) != list(range(len(rows)))
            super().commit(rows)

        def rollback(self, length: int) -> None:
            self.branches = 0
            super().rollback(length)

    model: Any = NoisyModel(lambda width: 0)
    model.open_session = lambda: LateNoise(model)
    batch_invariance = measure_batch_invariance(model)
    assert batch_invariance.tie_margin == 0 and not batch_invariance.branch_invariant
    assert batch_invariance.branch_margin == pytest.approx(0.5, abs=1e-5)


def test_a_model_without_trees_is_scored_in_chains() -> None:
    class ChainsOnly(NoisySession):
        def forward(self, tree: TokenTree) -> Forward:
            assert tree.is_chain
            return super().forward(tree)

    model: Any = NoisyModel(lambda width: 0)
    model.capabilities = type(model.capabilities)(64, False, True, False)
    model.open_session = lambda: ChainsOnly(model)
    assert measure_batch_invariance(model).branch_margin == 0


class RowNoise(NoisySession):
    """Adds noise(row, rows) to the likeliest logit of each row."""

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        model: Any = self._model
        added = [model.row_noise(row, len(tree)) for row in range(len(tree))]
        logits[np.arange(len(tree)), logits.argmax(axis=1)] += np.array(added, np.float32)
        return Forward(logits)


def with_row_noise(noise: Any) -> Any:
    model: Any = NoisyModel(lambda width: 0)
    model.row_noise = noise
    model.open_session = lambda: RowNoise(model)
    return model


def test_widths_have_to_agree_after_a_longer_text_too() -> None:
    """A runtime may have other kernels from some length on."""
    settled = 100

    class NoisyLater(NoisySession):
        def forward(self, tree: TokenTree) -> Forward:
            logits = super().forward(tree).logits
            added = 0.25 * (len(tree) < 4 and self.length >= settled)
            logits[np.arange(len(tree)), logits.argmax(axis=1)] += added
            return Forward(logits)

    model: Any = NoisyModel(lambda width: 0)
    model.capabilities = replace(model.capabilities, settled_tokens=settled)
    model.open_session = lambda: NoisyLater(model)
    batch_invariance = measure_batch_invariance(model, USUAL_WIDTHS)
    assert batch_invariance.invariant_widths == tuple(range(4, 17))
    assert batch_invariance.tie_margin == pytest.approx(0.25, abs=1e-5)


def test_widths_whose_rows_depend_on_their_place_are_not_invariant() -> None:
    """Padded plain steps score every token in row 0, draft tokens are scored in the rows after
    it."""
    batch_invariance = measure_batch_invariance(
        with_row_noise(lambda row, width: 0.1 * row if width > 1 else 0.3), USUAL_WIDTHS
    )
    assert batch_invariance.invariant_widths == (1,)


def test_the_largest_group_of_equal_widths_is_chosen_not_the_widest() -> None:
    """Kernels may change with the width twice; padding to the widest would cost most."""
    batch_invariance = measure_batch_invariance(
        with_row_noise(lambda row, width: 0.3 * (width == 1) + 0.1 * (width > 6)), USUAL_WIDTHS
    )
    assert batch_invariance.invariant_widths == (2, 3, 4, 5, 6)


@pytest.mark.parametrize("noisy_below", [0, 2])
def test_a_large_model_is_measured_in_few_passes_of_which_each_tells_more(noisy_below: int) -> None:
    model: Any = NoisyModel(lambda width: 0.25 * (width < noisy_below), context_length=1024)
    model.config = replace(model.config, num_layers=32, hidden_size=4096)
    model.capabilities = replace(model.capabilities, settled_tokens=272)
    rows_read = 0

    class Counting(NoisySession):
        def forward(self, tree: TokenTree) -> Forward:
            nonlocal rows_read
            rows_read += 10 + len(tree)  # a pass takes as long as ten more rows
            return super().forward(tree)

    model.open_session = lambda: Counting(model)
    found = measure_batch_invariance(model, USUAL_WIDTHS)
    expected = (1, 2, 3, 4, 6, 8, 12, 16)
    assert found.invariant_widths == tuple(width for width in expected if width >= noisy_below)
    assert agreeing_width(model) == (1 if noisy_below else 8)
    large, rows_read = rows_read, 0
    model.config = replace(model.config, num_layers=2)
    measure_batch_invariance(model, USUAL_WIDTHS)
    assert large < rows_read / 3


def test_kernels_for_a_few_rows_agree_with_a_single_one() -> None:
    """As those of ggml's K-quants, of which wider passes have another."""
    assert agreeing_width(NoisyModel(lambda width: 0.1 * (width > 3))) == 2


def test_single_rows_that_differ_after_longer_texts_only_do_not_agree() -> None:
    class LongNoise(NoisySession):
        def forward(self, tree: TokenTree) -> Forward:
            logits = super().forward(tree).logits
            if len(tree) == 1 and self.length > 100:
                logits[0, int(logits[0].argmax())] += 0.25
            return Forward(logits)

    model: Any = NoisyModel(lambda width: 0)
    model.open_session = lambda: LongNoise(model)
    assert agreeing_width(model) == 8
    model.capabilities = replace(model.capabilities, settled_tokens=272)
    assert agreeing_width(model) == 1
