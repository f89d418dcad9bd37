"""Attention of the kernels for few rows, of every table that this processor runs: what it is, and
that a row's bits depend on nothing but its query and the cells that it sees, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from fixtures.attention_rows import CELL_TYPES, Cells, Halves, Rows, attend, expected
from fixtures.rows import Floats, tables

MINUS_INFINITY = np.float16(-np.inf)


def numbers(count: int, size: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, size)).astype(np.float32)


def some_rows(
    count: int,
    cells: int,
    head: int = 64,
    value: int = 64,
    key_type: str = "F16",
    value_type: str = "F16",
    seed: int = 0,
) -> Rows:
    """Rows that see everything."""
    return Rows(
        queries=2 * numbers(count, head, seed),
        keys=Cells.of(key_type, numbers(cells, head, seed + 1)),
        values=Cells.of(value_type, numbers(cells, value, seed + 2)),
        masks=np.zeros((count, cells), np.float16),
    )


def hidden(rows: Rows, sees: np.ndarray) -> Rows:
    """The same rows, of which row r sees cell c where sees[r, c]."""
    return replace(rows, masks=np.where(sees, np.float16(0), MINUS_INFINITY).astype(np.float16))


def chain(count: int, cells: int) -> np.ndarray:
    """The last rows of a text: each sees one cell more than the row above it."""
    return np.arange(cells)[None, :] <= np.arange(cells - count, cells)[:, None]


def tree(count: int, cells: int) -> np.ndarray:
    """Branches: rows see a common past and, of the last cells, their ancestors'."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 5][:count]
    sees = np.zeros((count, cells), bool)
    for row, parent in enumerate(parents):
        sees[row] = sees[parent] if row else np.arange(cells) < cells - count
        sees[row, cells - count + row] = True
    return sees


def window(count: int, cells: int) -> np.ndarray:
    """A sliding window of 20 cells, in a cache whose last 9 cells are not filled yet."""
    last = np.arange(cells - 9 - count, cells - 9)[:, None]
    at = np.arange(cells)[None, :]
    return (at <= last) & (at > last - 20)


def mixed(count: int, cells: int) -> np.ndarray:
    """Rows of several texts, whose cells alternate."""
    return np.arange(cells)[None, :] % 3 == np.arange(count)[:, None] % 3


def scattered(count: int, cells: int) -> np.ndarray:
    """Each row sees its own random cells, row 2 none."""
    sees = np.random.default_rng(5).random((count, cells)) < 0.4
    sees[2:3] = False
    return sees


SHAPES = (chain, tree, window, mixed, scattered)


def variants() -> Iterator[Rows]:
    """Rows with whatever a model may ask for beside plain attention."""
    rows = some_rows(8, 70)
    yield replace(rows, softcap=3.0)
    yield replace(rows, sinks=np.array([0.5, np.nan, 9, -9, np.nan, 0, 1, 2], np.float32))
    distances = np.float16(np.arange(70) - 70)[None, :].repeat(8, 0)
    slopes = np.float32(2.0) ** -np.arange(8, dtype=np.float32)
    yield replace(rows, masks=distances, slopes=slopes)
    everything = replace(hidden(rows, tree(8, 70)), softcap=3.0, slopes=slopes)
    assert everything.masks is not None
    masks: Halves = np.maximum(everything.masks + distances, MINUS_INFINITY)
    yield replace(everything, masks=masks, sinks=np.arange(8, dtype=np.float32))


def check(table: str, rows: Rows) -> None:
    result, bound = expected(rows)
    error = np.abs(attend(table, rows) - result)
    assert (error <= bound).all(), (error / bound).max()


@pytest.fixture(params=tables(), scope="module")
def table(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("kind", CELL_TYPES)
def test_every_type_of_cache(table: str, kind: str) -> None:
    check(table, some_rows(5, 100, 64, 96, kind, kind))


@pytest.mark.parametrize("head", [8, 16, 40, 72, 128, 192, 256, 512])
def test_every_size_of_head(table: str, head: int) -> None:
    for kind in ("F16", "BF16"):
        check(table, some_rows(7, 66, head, 8, kind, kind))
        check(table, some_rows(2, 66, 8, head, kind, kind))


@pytest.mark.parametrize("shape", SHAPES)
def test_every_kind_of_mask(table: str, shape: object) -> None:
    assert callable(shape)
    for count in (3, 8):
        check(table, hidden(some_rows(count, 150), shape(count, 150)))


def test_caps_sinks_and_slopes(table: str) -> None:
    for rows in variants():
        check(table, rows)


def test_a_row_that_sees_nothing_is_zero_with_a_sink_too(table: str) -> None:
    rows = hidden(some_rows(3, 20), np.zeros((3, 20), bool))
    assert not attend(table, rows).any()
    assert not attend(table, replace(rows, sinks=np.ones(3, np.float32))).any()


def cases() -> Iterator[Rows]:
    for shape in SHAPES:
        yield hidden(some_rows(8, 150, 40, 72), shape(8, 150))
    for kind in CELL_TYPES:
        yield hidden(some_rows(8, 140, 64, 32, kind, kind), tree(8, 140))
    yield from variants()


@pytest.mark.parametrize("case", range(len(list(cases()))))
def test_all_tables_have_the_same_bits(case: int) -> None:
    rows = list(cases())[case]
    reference = attend("portable", rows)
    for name in tables():
        assert np.array_equal(attend(name, rows), reference), name


@pytest.mark.parametrize("case", range(len(list(cases()))))
def test_a_row_alone_has_the_same_bits(table: str, case: int) -> None:
    """Alone, and in a cache that holds only what the row sees."""
    rows = list(cases())[case]
    together = attend(table, rows)
    assert rows.masks is not None
    for row in range(8):
        assert np.array_equal(attend(table, rows.take([row]))[0], together[row])
        if (rows.masks[row] > -np.inf).any():
            assert np.array_equal(attend(table, rows.alone(row))[0], together[row])


@pytest.mark.parametrize("shape", SHAPES)
def test_any_company_of_rows_has_the_same_bits(table: str, shape: object) -> None:
    assert callable(shape)
    rows = hidden(some_rows(8, 333), shape(8, 333))
    together = attend(table, rows)
    generator = np.random.default_rng(3)
    for count in (1, 2, 3, 4, 5, 6, 7, 8) * 3:
        chosen = generator.choice(8, count, replace=False)
        assert np.array_equal(attend(table, rows.take(chosen)), together[chosen])


def test_what_no_row_sees_may_be_anything(table: str) -> None:
    """Unseen cells hold no numbers at all, and the bits are those of a cache without them."""
    for value in (np.nan, np.inf, -np.inf):
        for shape in SHAPES:
            rows = hidden(some_rows(8, 150), shape(8, 150))
            assert rows.masks is not None
            unseen = (rows.masks == -np.inf).all(0)
            keys, values = numbers(150, 64, 1), numbers(150, 64, 2)
            spoilt = replace(
                rows,
                keys=Cells.of("F16", np.where(unseen[:, None], value, keys).astype(np.float32)),
                values=Cells.of("F16", np.where(unseen[:, None], value, values).astype(np.float32)),
            )
            assert np.array_equal(attend(table, spoilt), attend(table, rows))


def test_what_another_row_sees_does_not_reach_a_row(table: str) -> None:
    """A cell that is no number spoils the rows that see it, and them alone."""
    for shape in (tree, mixed, scattered):
        rows = hidden(some_rows(8, 150), shape(8, 150))
        assert rows.masks is not None
        sees = rows.masks > -np.inf
        cell = int(np.flatnonzero(sees.any(0) & ~sees.all(0))[-1])
        for kind in ("F16", "F32", "BF16"):
            keys, values = numbers(150, 64, 1), numbers(150, 64, 2)
            clean = replace(rows, keys=Cells.of(kind, keys), values=Cells.of(kind, values))
            values[cell, 5] = np.nan
            keys[cell, 7] = np.inf
            spoilt = replace(rows, keys=Cells.of(kind, keys), values=Cells.of(kind, values))
            result, whole = attend(table, spoilt), attend(table, clean)
            assert np.isnan(result[sees[:, cell]]).any(-1).all()
            assert np.array_equal(result[~sees[:, cell]], whole[~sees[:, cell]])
