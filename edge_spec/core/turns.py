"""Threads that wait for their turn on what others use, which is no time of their own: whoever
looks for passes that hang leaves it out."""

from __future__ import annotations

_waiting: set[int] = set()  # threads, by their numbers


def begin_waiting(thread: int) -> None:
    _waiting.add(thread)


def end_waiting(thread: int) -> None:
    _waiting.discard(thread)


def is_waiting(thread: int | None) -> bool:
    return thread in _waiting
