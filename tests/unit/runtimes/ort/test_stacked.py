"""What stacked passes see, and how much room their cache has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from edge_spec.testing import ScriptedModel, random_logits

pytest.importorskip("onnxruntime")

from edge_spec.runtimes.kv_cache import GROWTH_TOKENS, KERNEL_TOKENS, KvCache
from edge_spec.runtimes.ort.stacked import StackedMask

ROWS, CAPACITY = 4, 64
BRANCHES = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)


def expected(start: int, sees: np.ndarray | None) -> np.ndarray:
    """Made from nothing; None: a chain."""
    seen = np.zeros((ROWS, CAPACITY), bool)
    seen[:, :start] = True
    seen[:, start : start + ROWS] = np.tri(ROWS, dtype=bool) if sees is None else sees
    return np.where(seen, 0.0, -np.inf)


def test_a_mask_is_the_same_whatever_was_shown_before() -> None:
    random: Any = np.random.RandomState(0)
    mask = StackedMask(ROWS, CAPACITY)
    for _ in range(300):
        start = int(random.randint(CAPACITY - ROWS + 1))
        sees = BRANCHES if random.randint(2) else None
        mask.show(start, sees)
        np.testing.assert_array_equal(mask.bias[0, 0], expected(start, sees))


def test_an_interrupt_while_a_mask_is_made_leaves_nothing_behind() -> None:
    class Interrupting:
        """A tree that nobody can read."""

        def __array__(self, *_: Any, **__: Any) -> np.ndarray:
            raise KeyboardInterrupt

    mask = StackedMask(ROWS, CAPACITY)
    mask.show(10, None)
    with pytest.raises(KeyboardInterrupt):
        mask.show(30, Interrupting())  # type: ignore[arg-type]
    mask.show(5, None)
    np.testing.assert_array_equal(mask.bias[0, 0], expected(5, None))


def cache(context_length: int) -> KvCache:
    config = ScriptedModel(random_logits(8), 8, context_length).config
    config = replace(config, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2)
    return KvCache(config, is_read_whole=True)


@pytest.mark.parametrize("needed", [1, 64, 65, 100, 511, 700, 2000, 5000, 9999])
def test_a_cache_that_is_read_whole_has_little_room_to_spare(needed: int) -> None:
    found = cache(10_000)
    found.reserve(needed, 0)
    assert found.capacity >= needed
    assert found.capacity % KERNEL_TOKENS == 0
    assert found.capacity - needed < min(GROWTH_TOKENS, needed / 8 + KERNEL_TOKENS) + KERNEL_TOKENS


def test_a_full_cache_that_is_read_whole_still_ends_with_a_whole_vector() -> None:
    """Its last tokens are added up as those of a smaller one, which ends before them."""
    found = cache(100)
    found.reserve(101, 0)
    assert found.capacity == 128
