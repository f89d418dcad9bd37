"""Who guesses in one conversation, and how that changes while an answer is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock

from edge_spec import plugins
from edge_spec.decoder import Decoder
from edge_spec.drafters.forced import ForcedDrafter
from edge_spec.drafters.guarded import GuardedDrafter
from edge_spec.drafters.protocol import Attached, CountingText, Drafter, TextCounts
from edge_spec.model import SelfDrafting, Session
from edge_spec.parts import Parts
from edge_spec.speculation import Speculation


class Drafting:
    """The speculation of a conversation. `offer` may be called by any thread; what it offers is
    used from the next `take` on."""

    def __init__(self, parts: Parts, session: Session) -> None:
        self.speculation = parts.speculation
        self._parts = parts
        self._session = session
        self._names = parts.drafter
        self._offered: tuple[str, Speculation] | None = None
        self._off = False
        self._lock = Lock()
        self._learnt: dict[str, list[float]] = {}  # by drafters that were used before
        self._counted = TextCounts()  # by the same
        self._attach(parts.speculation)

    @property
    def names(self) -> str:
        """As `offer` was given them: those of the next round."""
        with self._lock:
            return self._offered[0] if self._offered else self._names

    @property
    def possible(self) -> list[str]:
        """Drafters that are installed and that this conversation can have."""
        setting = self._parts.speculator.setting
        missing = set() if setting.drafts else set(plugins.PAIR_DRAFTERS)
        missing |= set() if setting.corpora else {"corpus"}
        missing |= set() if isinstance(self._session, SelfDrafting) else set(plugins.SELF_DRAFTERS)
        return sorted(set(plugins.names("drafters")) - missing)

    def offer(self, names: str) -> None:
        """Raises as `Engine.set_drafter` does, and then changes nothing."""
        speculation = self._parts.speculator.choose(names)
        try:
            self._attach(speculation)
        except BaseException:
            speculation.close()
            raise
        with self._lock:
            replaced, self._offered = self._offered, (names, speculation)
        if replaced is not None:
            replaced[1].close()

    def take(self) -> bool:
        """Changes to what was offered last; whether there was something."""
        with self._lock:
            if self._offered is None or self._off:
                return False
            (self._names, offered), self._offered = self._offered, None
        self._learnt |= self.speculation.learnt()
        self._counted = self.text_counts
        self.speculation.close()
        offered.relearn(self._learnt)
        self.speculation = offered
        return True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nobody guesses within the block, and nobody learns from it."""
        drafting, self._off = self.speculation, True
        self.speculation = self._parts.speculator.choose("none")
        try:
            yield
        finally:
            self.speculation, self._off = drafting, False

    def decoder(self, *, follows_grammar: bool = False) -> Decoder:
        """follows_grammar: what the answer's grammar spells out is guessed too, if anything is."""
        speculation = self.speculation
        drafters = list(speculation.drafters)
        if follows_grammar and drafters:
            vocab_size = self._parts.model.config.vocab_size
            forced: Drafter = GuardedDrafter(ForcedDrafter(), vocab_size)
            drafters.insert(0, forced)
        return Decoder(
            self._session,
            drafters,
            speculation.policy,
            speculation.overlap,
            speculation.anticipation,
            tie_margin=speculation.tie_margin,
        )

    @property
    def text_counts(self) -> TextCounts:
        """Of all drafters so far."""
        drafters = self.speculation.drafters
        counts = [each.text_counts for each in drafters if isinstance(each, CountingText)]
        return TextCounts(*map(sum, zip(self._counted, *counts, strict=True)))

    def learnt(self) -> dict[str, list[float]]:
        return self._learnt | self.speculation.learnt()

    def remember(self, learnt: Mapping[str, list[float]]) -> None:
        """For drafters that are offered later."""
        self._learnt |= learnt

    def close(self) -> None:
        self.speculation.close()
        with self._lock:
            if self._offered is not None:
                self._offered[1].close()
                self._offered = None

    def _attach(self, speculation: Speculation) -> None:
        for drafter in speculation.drafters:
            if isinstance(drafter, Attached):
                drafter.attach(self._parts.model, self._session)
