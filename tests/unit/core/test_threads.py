"""Threads beside other processes, on a machine whose passes take what a table says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edge_spec.core.threads import ThreadGovernor

QUIET = {2: 1.0, 1: 1.75}
# Measured beside a busy process on two cores: two threads wait for each other, and now and then
# for a tenth of a second.
BUSY = {2: 2.4, 1: 1.8}
LONG_WAIT, ONE_IN = 15.0, 20


def passes(
    governor: ThreadGovernor, seconds: dict[int, float], count: int, seed: int = 0, rows: int = 1
) -> list[int]:
    """The threads of each pass; every duration is off by up to a tenth."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        threads = governor.threads
        taken = seconds[threads] * rng.uniform(0.95, 1.1)
        if seconds is BUSY and threads > 1 and not rng.integers(ONE_IN):
            taken += LONG_WAIT
        found.append(threads)
        governor.observe(rows, taken)
    return found


def share(found: Sequence[int], threads: int) -> float:
    return found.count(threads) / len(found)


@pytest.mark.parametrize("seed", range(5))
def test_with_nothing_else_running_nothing_is_tried(seed: int) -> None:
    assert set(passes(ThreadGovernor(2), QUIET, 2000, seed)) == {2}


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_busy_process_one_thread_is_found_and_kept(seed: int) -> None:
    governor = ThreadGovernor(2)
    passes(governor, QUIET, 200, seed)
    passes(governor, BUSY, 200, seed)
    assert share(passes(governor, BUSY, 1000, seed), 1) > 0.9


@pytest.mark.parametrize("seed", range(5))
def test_once_the_machine_is_quiet_again_all_threads_come_back(seed: int) -> None:
    governor = ThreadGovernor(2)
    passes(governor, QUIET, 200, seed)
    passes(governor, BUSY, 1500, seed)
    passes(governor, QUIET, 600, seed)
    assert share(passes(governor, QUIET, 500, seed), 2) > 0.95


@pytest.mark.parametrize("seed", range(5))
def test_beside_a_process_that_was_there_before_one_thread_is_found_within_a_first_answer(
    seed: int,
) -> None:
    """Passes of two threads took 100 ms to 8 s, those of one thread 100 ms."""
    rng = np.random.default_rng(seed)
    governor = ThreadGovernor(2)
    found = []
    for _ in range(48):
        found.append(governor.threads)
        seconds = 0.1 if governor.threads == 1 else float(np.exp(rng.uniform(-1.0, 2.0)))
        governor.observe(int(rng.choice([1, 1, 2, 3])), seconds)
    assert share(found[24:], 1) > 0.8


@pytest.mark.parametrize("seed", range(5))
def test_first_passes_that_bind_buffers_and_one_that_waits_long_are_no_busy_machine(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    governor = ThreadGovernor(2)
    for done in range(200):
        rows = int(rng.choice([1, 1, 2, 3]))
        taken = (1 + rows / 10) * rng.uniform(0.95, 1.1)
        assert governor.observe(rows, taken * (6 if done < 4 or done == 12 else 1)) == 2
