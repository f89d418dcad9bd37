"""A smaller model that is open beside its target, and the drafters that it is lent to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy

from edge_spec.core.model import Model, Session
from edge_spec.core.session_errors import close_quietly
from edge_spec.core.watchdog import WatchedModel, WatchedSession
from edge_spec.drafters.composite import Stage
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.errors import HungError


class Draft:
    """A draft that is open beside its target: one model with one session, until `close`, or
    `close_session` where others go on with the model. Its passes are watched: see watchdog.py.

    vocab_size: of what it drafts for. step_s: seconds of one of its passes, as far as known.
    level: makes a level of what drafts for the draft in turn. translated: makes a drafter whose
    draft tokens the target can read, where the draft has other tokens. anticipates: it reads on
    while the target verifies. identity: changes with the model's files and with whatever may change
    a bit of its cache. acceptance: how often a draft token of its was right in earlier answers of
    the pair, where that is known.
    """

    def __init__(
        self,
        model: Model,
        vocab_size: int,
        step_s: float = 0.0,
        level: Callable[[Sequence[Drafter]], Stage] | None = None,
        translated: Callable[[Drafter], Drafter] | None = None,
        anticipates: bool = False,
        identity: str = "",
        acceptance: float | None = None,
    ) -> None:
        self.identity = identity
        self.model = WatchedModel(model)
        self.step_s = step_s
        self._vocab_size = vocab_size
        self._level = level
        self._translated = translated
        self._anticipates = anticipates
        self._acceptance = acceptance
        self._session = self.model.open_session()

    def make_drafter(self, below: Sequence[Drafter] = (), name: str = "draft-model") -> Drafter:
        """Takes over the session from the drafter made before. below: draft for the draft."""
        if self._translated is not None:
            return self._translated(self.make_level(below, name))
        return self.make_level(below, name)

    def make_level(self, below: Sequence[Drafter], name: str) -> DraftModelDrafter:
        """One that a level above reads, in the draft's own tokens."""
        level = self._level(below) if self._level and below else None
        return DraftModelDrafter(
            self.model,
            self._session,
            self._vocab_size,
            level,
            anticipates=self._anticipates,
            name=name,
            reopened=self._reopened,
            acceptance=self._acceptance,
        )

    def fork(self) -> Draft:
        """The same model with a session of its own."""
        other = copy(self)
        other._session = self.model.open_session()
        return other

    def _reopened(self) -> Session:
        """Opens another session in the place of one that has failed. Raises HungError while a pass
        of that one still runs, and what the runtime raises where the device is gone."""
        if isinstance(self._session, WatchedSession) and self._session.hangs:
            raise HungError("a pass of it still hangs", remedy="Load the model again.")
        close_quietly(self._session)
        self._session = self.model.open_session()
        return self._session

    def close_session(self) -> None:
        """Raises nothing, also where the device is lost: others are still to be closed."""
        close_quietly(self._session)

    def close(self) -> None:
        self.close_session()
        self.model.close()
