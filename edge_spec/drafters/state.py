"""The state of several drafters in one mapping, each under its own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.drafters.protocol import Drafter, Keeping, Learning


def snapshot_of(drafters: Sequence[Drafter]) -> dict[str, np.ndarray]:
    """What the drafters keep of their conversation, such as a pool of n-grams."""
    state: dict[str, np.ndarray] = {}
    for drafter in drafters:
        if isinstance(drafter, Keeping):
            state |= named(drafter.name, drafter.snapshot())
    return state


def named(name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}/{each}": array for each, array in state.items()}


def part_of(state: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """What was `named` so."""
    prefix = f"{name}/"
    own = {each: array for each, array in state.items() if each.startswith(prefix)}
    return {each.removeprefix(prefix): array for each, array in own.items()}


def restore_into(drafters: Sequence[Drafter], state: Mapping[str, np.ndarray]) -> None:
    """For drafters of the names that the snapshot was taken of. Raises KeyError or ValueError for
    others; one that it holds nothing of begins again."""
    known = {drafter.name for drafter in drafters}
    unknown = {name.partition("/")[0] for name in state if "/" in name} - known
    if unknown:
        raise KeyError(f"no drafter {', '.join(sorted(unknown))} to restore")
    for drafter in drafters:
        own = part_of(state, drafter.name)
        if own and isinstance(drafter, Keeping):
            drafter.restore(own)


def learnt_of(drafters: Sequence[Drafter]) -> dict[str, np.ndarray]:
    """How often their draft tokens were right, of all texts."""
    counts: dict[str, np.ndarray] = {}
    for drafter in drafters:
        if isinstance(drafter, Learning):
            counts |= drafter.learnt()
    return counts


def relearn_into(drafters: Sequence[Drafter], counts: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for counts of another version."""
    for drafter in drafters:
        if isinstance(drafter, Learning):
            drafter.relearn(counts)
