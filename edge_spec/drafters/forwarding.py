"""Drafters made of others: one that passes every call on, and several that are asked alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from edge_spec.core.tree import TokenTree
from edge_spec.drafters.protocol import Drafter
from edge_spec.drafters.state import load_state_dicts, load_stats_into, state_dicts, stats_of

_MEMBERS = {
    name: member
    for name, member in vars(Drafter).items()
    if not name.startswith("_") and (callable(member) or isinstance(member, property))
}
# Calls that return nothing, and go to all.
_CALLED = (
    *("attach", "attach_again", "use_sampler", "recover", "prepare", "begin"),
    *("observe", "skip"),
    *("extend_draft", "rollback_draft", "close"),
)


class DrafterWrapper(Drafter):
    """Passes every call on to another drafter through `_ask`, which a subclass may change.

    drafter: of any class; what it does not have is as in `Drafter`.
    """

    def __init__(self, drafter: Any) -> None:
        self.name = drafter.name
        self.traits = getattr(drafter, "traits", Drafter.traits)
        self._drafter = drafter

    def _ask(self, name: str, *given: Any) -> Any:
        """Returns what a method of the other drafter does, or the value of a property."""
        if not hasattr(self._drafter, name):
            return self._default(name, *given)
        found = getattr(self._drafter, name)
        return found if isinstance(_MEMBERS[name], property) else found(*given)

    def _default(self, name: str, *given: Any) -> Any:
        """Returns what a drafter says that has nothing of its own to say."""
        found = _MEMBERS[name].__get__(self)
        return found if isinstance(_MEMBERS[name], property) else found(*given)


class DrafterGroup(Drafter):
    """Several drafters, which all hear the same."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters

    def state_dict(self) -> dict[str, np.ndarray]:
        return state_dicts(self._drafters)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        load_state_dicts(self._drafters, state)

    def stats(self) -> dict[str, np.ndarray]:
        return stats_of(self._drafters)

    def load_stats(self, stats: Mapping[str, np.ndarray]) -> None:
        load_stats_into(self._drafters, stats)


class Stage(DrafterGroup):
    """Drafters that draft for a draft, so that it reads several tokens a pass: the next level of a
    cascade. They follow the text, and after it what the draft has written so far. Without any
    the draft writes every token in a pass of its own."""

    @property
    def is_empty(self) -> bool:
        return not self._drafters

    def chain(self, last: int, num_draft_tokens: int) -> TokenTree:
        """Drafts a chain below `last`, the last token of the text and the draft tokens."""
        return TokenTree.chain(last)

    def learn(self, tree: TokenTree, logits: np.ndarray, written: Sequence[int]) -> None:
        """Tells what the draft has written in place of the tree that was drafted last.

        logits: [rows, vocab] of the draft, valid during this call."""


def as_drafter(drafter: Any) -> Drafter:
    """Gives it all members of a `Drafter`, whatever class it is of."""
    return drafter if isinstance(drafter, Drafter) else DrafterWrapper(drafter)


def _passed_on(name: str) -> Callable[..., Any]:
    return lambda self, *given: self._ask(name, *given)


def _to_all(name: str) -> Callable[..., None]:
    def tell(self: DrafterGroup, *given: Any) -> None:
        for drafter in self._drafters:
            getattr(drafter, name)(*given)

    return tell


for _name, _member in _MEMBERS.items():
    _call = _passed_on(_name)
    setattr(DrafterWrapper, _name, property(_call) if isinstance(_member, property) else _call)
for _name in _CALLED:
    setattr(DrafterGroup, _name, _to_all(_name))
