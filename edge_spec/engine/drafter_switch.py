"""Changes the drafters of one conversation, also while an answer is written."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from edge_spec.core.model import SelfDrafting, Session
from edge_spec.drafters import factory
from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.protocol import Drafter, DrafterTraits
from edge_spec.engine.components import AnswerRecorder, EngineComponents
from edge_spec.engine.decoder import Decoder
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.errors import EdgeSpecError

if TYPE_CHECKING:
    from edge_spec.drafters.heads.independent import MedusaNetwork

_log = logging.getLogger(__name__)


class DrafterSwitch:
    """The speculation of a conversation. `offer` is thread-safe and takes effect at the next
    `take`."""

    def __init__(
        self, parts: EngineComponents, session: Session, recorder: AnswerRecorder | None = None
    ) -> None:
        """recorder: of the target's states, if somebody learns from them."""
        self.speculation = parts.speculation
        self._parts = parts
        self._session = session
        self._names = parts.drafter
        self._head: MedusaNetwork | None = None  # replaces that of the parts
        self._recorder = recorder
        self._offered: tuple[str, Speculation] | None = None
        self._off = False
        self._put_by: list[Speculation] = []  # while temporarily replaced
        self._lock = Lock()
        # held while drafters are attached and published, so that `move_to` finds all
        self._moving = Lock()
        self._stats: dict[str, list[float]] = {}  # of earlier drafters
        self._attach(parts.speculation)

    @property
    def names(self) -> str:
        """Return the names last given to `offer`, used from the next round on."""
        with self._lock:
            return self._offered[0] if self._offered else self._names

    def with_head(self, factory: SpeculationFactory) -> SpeculationFactory:
        if self._head is None:
            return factory
        return replace(factory, setting=replace(factory.setting, head=self._head))

    def use_head(self, head: MedusaNetwork | None) -> None:
        """Use a learnt head, or None, from the next `take` on; keep all if drafters cannot be
        made."""
        if head is self._head:
            return
        before, self._head = self._parts, head
        changed = self._parts.speculation_factory
        changed = replace(changed, setting=replace(changed.setting, head=None))
        self._parts = replace(self._parts, speculation_factory=self.with_head(changed))
        try:
            self.offer(self.names)
        except EdgeSpecError as error:
            if head is None:  # the names needed the head
                self.offer("auto")
                return
            self._parts = before
            _log.info("the head that was learnt does not draft: %s", error)

    @property
    def possible(self) -> list[str]:
        return [
            name for name, traits in factory.installed_traits().items() if self._has(name, traits)
        ]

    def _has(self, name: str, traits: DrafterTraits) -> bool:
        speculation_factory = self._parts.speculation_factory
        context = speculation_factory.setting
        return not (
            (traits.draft_model and not context.drafts)
            or (traits.corpora and not context.corpora)
            or (traits.head and (context.head is None or context.head.kind != traits.head))
            or (traits.target_layers and not isinstance(self._session, SelfDrafting))
            or (name in factory.WITH_PARTS and name not in context.parts)
            or (traits.hidden_states and not speculation_factory.capabilities.hidden_states)
        )

    def offer(self, names: str) -> None:
        """Offer drafters. Raises as `Engine.set_drafter` does, changing nothing."""
        speculation = self._parts.speculation_factory.choose(names)
        with self._moving:
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
        """Switch to the last offer; return True if there was one."""
        if self._offered is None:  # in nearly every round
            return False
        with self._lock:
            if self._offered is None or self._off:
                return False
            (self._names, offered), self._offered = self._offered, None
        self._stats |= self.speculation.stats()
        self.speculation.close()
        offered.load_stats(self._stats)
        self.speculation = offered
        return True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Stop drafting and learning within the block."""
        with self._instead(self._parts.speculation_factory.choose("none")):
            yield

    @contextmanager
    def always_verify(self) -> Iterator[Counter[str]]:
        """Verify all draft tokens of fresh drafters within the block.

        Afterwards the drafters start again, because the draft models' caches hold another text.
        Yields what `AlwaysVerifyPolicy` counts.
        """
        exercised: Counter[str] = Counter()
        verifying = replace(self._parts.speculation_factory, always_verify=exercised)
        always_verify = verifying.choose(self.names)
        try:
            self._attach(always_verify)
            with self._instead(always_verify):
                yield exercised
        finally:
            always_verify.close()
            self.offer(self.names)

    @contextmanager
    def _instead(self, speculation: Speculation) -> Iterator[None]:
        before, self._off = (self.speculation, self._off), True
        self._put_by.append(self.speculation)
        self.speculation = speculation
        try:
            yield
        finally:
            self._put_by.pop()
            self.speculation, self._off = before

    def decoder(self, of_answer: Sequence[Drafter] = ()) -> Decoder:
        """Return a decoder. of_answer: drafters of this answer only, asked first, unless drafting
        is off."""
        speculation = self.speculation
        vocab_size = self._parts.model.config.vocab_size
        drafters = list(speculation.drafters)
        if drafters:
            drafters[:0] = [GuardedDrafter(drafter, vocab_size) for drafter in of_answer]
        return Decoder(
            self._session,
            drafters,
            speculation.policy,
            speculation.lossless,
            speculation.overlap,
            vocab_size=vocab_size,
            batch=self._parts.batch,
            recorder=self._recorder,
        )

    def move_to(self, session: Session) -> None:
        """Continue with a new session after the old one failed."""
        with self._moving:
            self._session = session
            with self._lock:
                offered = [] if self._offered is None else [self._offered[1]]
            for speculation in [self.speculation, *self._put_by, *offered]:
                for drafter in speculation.drafters:
                    drafter.attach(self._parts.model, session)

    def stats(self) -> dict[str, list[float]]:
        return self._stats | self.speculation.stats()

    def remember(self, stats: Mapping[str, list[float]]) -> None:
        self._stats |= stats

    def close(self) -> None:
        self.speculation.close()
        with self._lock:
            if self._offered is not None:
                self._offered[1].close()
                self._offered = None

    def _attach(self, speculation: Speculation) -> None:
        for drafter in speculation.drafters:
            drafter.attach(self._parts.model, self._session)
