"""Faults that happen at a chosen call: of a model's sessions, or of a drafter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from threading import Event
from typing import Any, TypeVar, cast

import numpy as np

from edge_spec.core.model import (
    Forward,
    Model,
    Restorable,
    SelfDrafting,
    Session,
    SkippingSession,
    keep_place,
    place_before,
)
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.forwarding import DrafterWrapper
from edge_spec.drafters.protocol import Drafter

_Result = TypeVar("_Result")

SESSION_CALLS = ("open_session", "prefill", "forward", "commit", "rollback", "state", "restore")
DRAFTER_CALLS = (
    "use_sampler",
    "prepare",
    "begin",
    "propose",
    "observe",
    "anticipate",
    "state_dict",
    "load_state_dict",
    "stats",
)
_SCORING = ("forward", "propose")  # the calls whose result can be wrong


class FaultKind(StrEnum):
    RAISES = "raises"  # RuntimeError
    MEMORY = "memory"  # MemoryError
    HANGS = "hangs"  # until `Fault.released` is set, and then goes on as if nothing had been
    NAN = "nan"  # scores, or what a draft token was sampled from, are no numbers
    SHAPE = "shape"  # one token or row too few


@dataclass(eq=False)
class Fault:
    """Goes wrong once, at the `at`-th call of `call`, counted over all sessions of a model.

    Raises ValueError for a kind that this call cannot have: only "forward" and "propose" return
    what can be no number or of a wrong shape.
    """

    kind: FaultKind
    call: str
    at: int = 1
    released: Event = field(default_factory=Event)  # what one that hangs waits for
    happened: Event = field(default_factory=Event)
    num_calls: int = 0

    def __post_init__(self) -> None:
        self.kind = FaultKind(self.kind)
        if self.kind in (FaultKind.NAN, FaultKind.SHAPE) and self.call not in _SCORING:
            raise ValueError(f"{self.call} returns nothing that could be {self.kind}")

    def __str__(self) -> str:
        return f"{self.call} {self.kind} at call {self.at}"

    def around(self, call: str, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns, unless this is the call that goes wrong."""
        if call != self.call:
            return work()
        self.num_calls += 1
        if self.num_calls != self.at:
            return work()
        self.happened.set()
        if self.kind is FaultKind.RAISES:
            raise RuntimeError(f"{call} failed, as it was told to")
        if self.kind is FaultKind.MEMORY:
            raise MemoryError
        if self.kind is FaultKind.HANGS:
            self.released.wait()
            return work()
        return cast(_Result, _spoilt(work(), self.kind))


def _spoilt(result: object, kind: FaultKind) -> object:
    if isinstance(result, Forward):
        logits = np.full_like(result.logits, np.nan)
        return Forward(logits if kind is FaultKind.NAN else result.logits[:, :-1])
    assert isinstance(result, TokenTree)
    rows = len(result)
    if kind is FaultKind.SHAPE:
        return replace(result, tokens=result.tokens.astype(np.float32)[:, None])
    if result.draft_probs:
        sampled_from = [None if q is None else q * np.nan for q in result.draft_probs]
        return replace(result, draft_probs=tuple(sampled_from))
    return replace(result, confidence=np.full(rows, np.nan, np.float32))


class FaultyModel:
    """Another model whose sessions go wrong. Use it in the place of the other, which it closes.

    part_faults: of the parts that its sessions open for self-speculation.
    """

    def __init__(
        self, model: Model, faults: Sequence[Fault], part_faults: Sequence[Fault] = ()
    ) -> None:
        self.capabilities = model.capabilities
        self.config = model.config
        self._model = model
        self._faults = faults
        self._part_faults = part_faults

    def open_session(self) -> Session:
        session = _around(self._faults, "open_session", self._model.open_session)
        return faulty_session(session, self._faults, self._part_faults)

    def close(self) -> None:
        self._model.close()


def faulty_session(
    session: Session, faults: Sequence[Fault], part_faults: Sequence[Fault] = ()
) -> Session:
    """Wraps a session with the optional methods that the session has."""
    if isinstance(session, SelfDrafting):
        return _SelfDrafting(session, faults, part_faults)
    kind = _Restorable if isinstance(session, Restorable) else FaultySession
    return kind(session, faults)


def _around(faults: Sequence[Fault], call: str, work: Callable[[], _Result]) -> _Result:
    for fault in faults:
        work = _bound(fault, call, work)
    return work()


def _bound(fault: Fault, call: str, work: Callable[[], _Result]) -> Callable[[], _Result]:
    return lambda: fault.around(call, work)


class FaultySession:
    """Another session, whose faults come before what the call would have done."""

    def __init__(self, session: Session, faults: Sequence[Fault]) -> None:
        self._session = session
        self._faults = faults

    @property
    def length(self) -> int:
        return self._session.length

    def prefill(self, tokens: Sequence[int]) -> None:
        _around(self._faults, "prefill", lambda: self._session.prefill(tokens))

    def forward(self, tree: TokenTree) -> Forward:
        return _around(self._faults, "forward", lambda: self._session.forward(tree))

    def commit(self, rows: Sequence[int]) -> None:
        _around(self._faults, "commit", lambda: self._session.commit(rows))

    def rollback(self, length: int) -> None:
        _around(self._faults, "rollback", lambda: self._session.rollback(length))

    def keep_place(self) -> None:
        _around(self._faults, "keep_place", lambda: keep_place(self._session))

    def place_before(self, length: int) -> int:
        return place_before(self._session, length)

    def close(self) -> None:
        self._session.close()


class _Restorable(FaultySession):
    def state(self) -> dict[str, np.ndarray]:
        assert isinstance(self._session, Restorable)
        return _around(self._faults, "state", self._session.state)

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        session = self._session
        assert isinstance(session, Restorable)
        _around(self._faults, "restore", lambda: session.restore(state, length))


class _SelfDrafting(_Restorable):
    def __init__(
        self, session: Session, faults: Sequence[Fault], part_faults: Sequence[Fault]
    ) -> None:
        super().__init__(session, faults)
        self._part_faults = part_faults

    def open_exit(self, num_layers: int) -> Session:
        assert isinstance(self._session, SelfDrafting)
        return FaultySession(self._session.open_exit(num_layers), self._part_faults)

    def open_skipping(self, skipped: frozenset[int]) -> SkippingSession:
        assert isinstance(self._session, SelfDrafting)
        return _Skipping(self._session.open_skipping(skipped), self._part_faults)


class _Skipping(FaultySession):
    def __init__(self, session: SkippingSession, faults: Sequence[Fault]) -> None:
        super().__init__(session, faults)
        self._part = session

    @property
    def skipped(self) -> frozenset[int]:
        return self._part.skipped

    @skipped.setter
    def skipped(self, skipped: frozenset[int]) -> None:
        self._part.skipped = skipped

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        return self._part.influence(tokens)


class FaultyDrafter(DrafterWrapper):
    """Another drafter that goes wrong once; what it cannot do, it still cannot."""

    def __init__(self, drafter: Any, fault: Fault) -> None:
        super().__init__(drafter)
        self._fault = fault

    def _ask(self, name: str, *given: Any) -> Any:
        """Leaves out what every `Drafter` inherits, which does nothing, and so cannot fail."""
        inherited = getattr(type(self._drafter), name, None) in (None, getattr(Drafter, name))
        work = partial(super()._ask, name, *given)
        return work() if inherited or name not in DRAFTER_CALLS else self._fault.around(name, work)
