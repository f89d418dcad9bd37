"""What is found of rows is found once, and holds for what it was found on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.model import Forward
from edge_spec.core.modes import LosslessMode
from edge_spec.core.tree import TokenTree
from edge_spec.scheduler import row_findings
from edge_spec.scheduler.batch_invariance import USUAL_WIDTHS, widths_for
from edge_spec.scheduler.lossless import Promise, keep_promise
from edge_spec.scheduler.profile import ProfileKey
from edge_spec.scheduler.row_findings import ROWS, find_rows, settle_rows
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB = 30
HOW = ProfileKey("", "", "Q4_0", "llamacpp", "0.3", "", 2, (), "a processor")
KEY = replace(HOW, build="abc", features=("X86_V3",), shapes=(1, 2, 3))


class Ways(ScriptedModel):
    """Can compute in several ways: of each, the narrowest pass whose rows are like all others.
    agrees_below: of some, below which number of rows passes agree with each other, too."""

    def __init__(self, **from_width: int) -> None:
        super().__init__(random_logits(VOCAB, order=2, scale=1.0), VOCAB)
        self.from_width = from_width
        self.agrees_below: dict[str, int] = {}
        self.way = next(iter(from_width))
        self.num_opened = 0

    @property
    def ways(self) -> Sequence[str]:
        return list(self.from_width)

    @property
    def likeliest_way(self) -> str:
        return "steady" if "steady" in self.from_width else self.ways[0]

    def choose_way(self, name: str) -> None:
        self.way = name

    def open_session(self) -> ScriptedSession:
        self.num_opened += 1
        return OfWay(self, self.from_width[self.way], self.agrees_below.get(self.way, 0))


class OfWay(ScriptedSession):
    def __init__(self, model: Ways, from_width: int, agrees_below: int) -> None:
        super().__init__(model)
        self._from_width = from_width
        self._agrees_below = agrees_below

    def forward(self, tree: TokenTree) -> Forward:
        logits = super().forward(tree).logits
        if self._agrees_below <= len(tree) < self._from_width:
            seed = [len(self.committed), len(tree)]
            logits = logits + np.random.default_rng(seed).uniform(-0.1, 0.1, logits.shape)
        return Forward(logits.astype(np.float32))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path))
    return tmp_path


def test_what_was_found_is_not_measured_again() -> None:
    model = Ways(only=2)
    found = find_rows(model, KEY, USUAL_WIDTHS)
    assert found.invariant_widths == tuple(range(2, 17))
    assert found.plain_cost >= 1
    opened = model.num_opened
    assert find_rows(model, KEY, USUAL_WIDTHS) == found == ROWS.known(KEY)
    assert model.num_opened == opened


@pytest.mark.parametrize("mode", LosslessMode)
def test_nothing_is_measured_of_rows_that_agree_by_construction(mode: LosslessMode) -> None:
    """Not even where there was something to measure before; a plan reads the answer later."""
    measured = find_rows(Ways(only=2), KEY, USUAL_WIDTHS)
    model = Ways(only=1)
    model.capabilities = replace(model.capabilities, invariant_rows=True)
    found = settle_rows(model, KEY, widths_for(60), mode)
    assert not model.num_opened
    lossless = keep_promise(mode, found)
    assert lossless.describe() == "bit-identical, by construction"
    assert lossless.is_exact and not lossless.widths and lossless.plain_width == 1
    assert found.branch_invariant
    assert ROWS.known(KEY) == found
    again = find_rows(Ways(only=2), KEY, USUAL_WIDTHS)  # which believes nothing of it
    assert replace(again, plain_cost=measured.plain_cost) == measured  # which is timed each time


def test_the_fastest_way_whose_rows_agree_is_chosen_and_remembered() -> None:
    model = Ways(fast=2, steady=1, slow=1)
    found = settle_rows(model, KEY, USUAL_WIDTHS, LosslessMode.AUTO)
    assert model.way == found.way == "steady"
    assert keep_promise(LosslessMode.AUTO, found).promise is Promise.BIT_IDENTICAL
    again = Ways(fast=2, steady=1, slow=1)
    assert settle_rows(again, KEY, USUAL_WIDTHS, LosslessMode.ALWAYS) == found
    assert again.way == "steady" and not again.num_opened


def test_a_way_that_agrees_in_narrow_passes_comes_before_one_that_agrees_in_none() -> None:
    """K-quants on llama.cpp: up to three rows are scored as one where attention does so, too."""
    model = Ways(fast=99, narrow=99, other=99)
    model.agrees_below["narrow"] = 4
    found = settle_rows(model, KEY, USUAL_WIDTHS, LosslessMode.AUTO)
    assert model.way == found.way == "narrow"
    assert found.invariant_widths == (1, 2, 3)
    assert keep_promise(LosslessMode.AUTO, found).promise is Promise.BIT_IDENTICAL


def test_a_way_that_agrees_in_wide_passes_comes_before_one_that_agrees_in_narrow_ones() -> None:
    model = Ways(narrow=99, wide=1, other=1)
    model.agrees_below["narrow"] = 3
    found = settle_rows(model, KEY, USUAL_WIDTHS, LosslessMode.AUTO)
    assert model.way == found.way == "wide"
    assert found.invariant_widths == USUAL_WIDTHS


@pytest.mark.parametrize(("agrees_below", "chosen"), [(3, "steady"), (0, "fast")])
def test_a_large_model_takes_the_likeliest_way_if_rows_agree_at_all(
    agrees_below: int, chosen: str
) -> None:
    """And where they agree in none, the fastest."""
    model = Ways(fast=1 if agrees_below else 99, steady=99)
    model.agrees_below["steady"] = agrees_below
    model.config = replace(model.config, num_layers=32, hidden_size=4096)
    assert settle_rows(model, KEY, USUAL_WIDTHS, LosslessMode.AUTO).way == chosen


@pytest.mark.parametrize(
    ("measured", "cost"), [([1.9, 1.3, 9.9], 1.3), ([1.9, 1.6, 1.7], 1.6), ([0.9], 1.0)]
)
def test_the_plain_width_costs_the_least_of_a_few_measurements(
    measured: list[float], cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more are made than decide whether texts keep to it."""
    left = iter(measured)
    monkeypatch.setattr(row_findings, "relative_cost", lambda model, width: next(left))
    found = find_rows(Ways(only=2), KEY, USUAL_WIDTHS)
    assert found.plain_cost == cost
    assert keep_promise(LosslessMode.ALWAYS, found).plain_cost == cost
