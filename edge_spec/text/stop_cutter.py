"""Ends a text before the first of its stop strings."""

from __future__ import annotations

from collections.abc import Sequence


class StopCutter:
    """Holds text back while it may be the beginning of a stop string; cuts at the first one.

    A stop string may name special tokens, which are no part of the text: `push` is told of them.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._beginnings = frozenset(stop[0] for stop in self._stops)
        self._naming: list[str] = []  # those that name a special token that has come
        self._held = ""
        self._unshown: list[int] = []  # places of characters in `_held` that are of special tokens
        self.found: str | None = None  # the stop string that has ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def push(self, piece: str, special: str = "") -> str:
        """Returns the text that can be shown now. After a stop string nothing follows. special:
        the name of the special token that this is, after its piece."""
        if self.stopped:
            return ""
        if not special and not self._held and self._beginnings.isdisjoint(piece):
            return piece  # no stop string begins here: told fast, since lists of them are long
        text, unshown = self._held + piece, self._unshown
        naming = [stop for stop in self._stops if special and special in stop]
        if naming:
            self._naming += naming
            unshown = [*unshown, *range(len(text), len(text) + len(special))]
            text += special
        possible = [stop for stop in self._stops if stop[0] in text]
        views = _views(text, unshown, possible, self._naming)
        found, begun = [], len(text)
        for view, places, stops in views:
            for stop in stops:
                if (start := view.find(stop)) >= 0:
                    found.append((places[start + len(stop) - 1], places[start], stop))
                elif held := overlap(view, stop):
                    begun = min(begun, places[len(view) - held])
        if found:  # the one that is complete first, whatever pieces the text comes in
            _, begin, self.found = min(found)
            self._held, self._unshown = "", []
            return _shown(text[:begin], unshown)
        self._held, self._unshown = text[begun:], [at - begun for at in unshown if at >= begun]
        return _shown(text[:begun], unshown)

    def finish(self) -> str:
        """The text held back, when nothing follows that could complete a stop string."""
        held = _shown(self._held, self._unshown)
        self._held, self._unshown = "", []
        return held


def _views(
    text: str, unshown: Sequence[int], stops: Sequence[str], naming: Sequence[str]
) -> list[tuple[str, Sequence[int], Sequence[str]]]:
    """Returns the text that is shown and, where special tokens are in it, the whole one: each with
    the places of its characters, and the stop strings that are looked for in it."""
    if not unshown:
        return [(text, range(len(text)), stops)]
    shown = [at for at in range(len(text)) if at not in unshown]
    return [
        ("".join(text[at] for at in shown), shown, stops),
        (text, range(len(text)), naming),
    ]


def _shown(text: str, unshown: Sequence[int]) -> str:
    return "".join(sign for at, sign in enumerate(text) if at not in unshown)


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next(
        (n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0
    )
