"""Joins what several drafters keep in one mapping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.drafters.protocol import Drafter


def continues(earlier: Sequence[int], prompt: Sequence[int]) -> bool:
    """Says whether a prompt goes on where an earlier one stood: the next turn of the same chat, or
    the same question again. A system message that two chats share does not make them one."""
    return 0 < len(earlier) <= len(prompt) and tuple(prompt[: len(earlier)]) == tuple(earlier)


def restored_prompt(tokens: np.ndarray) -> tuple[int, ...]:
    """The prompt that a snapshot holds. Raises ValueError for an array that is none."""
    if tokens.ndim != 1 or tokens.dtype.kind != "i":
        raise ValueError(f"a prompt of shape {tokens.shape} and type {tokens.dtype}")
    return tuple(tokens.tolist())


def state_dicts(drafters: Sequence[Drafter]) -> dict[str, np.ndarray]:
    """Returns what the drafters keep of their conversation, such as a pool of n-grams, each under
    its own name."""
    state: dict[str, np.ndarray] = {}
    for drafter in drafters:
        state |= named(drafter.name, drafter.state_dict())
    return state


def named(name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"{name}/{each}": array for each, array in state.items()}


def part_of(state: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Returns what was `named` so."""
    prefix = f"{name}/"
    own = {each: array for each, array in state.items() if each.startswith(prefix)}
    return {each.removeprefix(prefix): array for each, array in own.items()}


def load_state_dicts(drafters: Sequence[Drafter], state: Mapping[str, np.ndarray]) -> None:
    """Restores drafters of the names that the snapshot was taken of. Raises KeyError or ValueError
    for others; one that it holds nothing of begins again."""
    known = {drafter.name for drafter in drafters}
    unknown = {name.partition("/")[0] for name in state if "/" in name} - known
    if unknown:
        raise KeyError(f"no drafter {', '.join(sorted(unknown))} to restore")
    for drafter in drafters:
        own = part_of(state, drafter.name)
        if own:
            drafter.load_state_dict(own)


def stats_of(drafters: Sequence[Drafter]) -> dict[str, np.ndarray]:
    """Counts how often their draft tokens were right, over all texts."""
    stats: dict[str, np.ndarray] = {}
    for drafter in drafters:
        stats |= drafter.stats()
    return stats


def load_stats_into(drafters: Sequence[Drafter], stats: Mapping[str, np.ndarray]) -> None:
    """Raises ValueError for counts of another version."""
    for drafter in drafters:
        drafter.load_stats(stats)
