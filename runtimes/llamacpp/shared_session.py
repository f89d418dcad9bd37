"""A session whose passes others can share: then its tokens are in a cache that all have joined."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.features import OnPrefilled, require_none_alone
from edge_spec.core.model import Forward, require_rollback, require_room
from edge_spec.core.runtime_protocols import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.errors import DeviceMemoryError, SessionError
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.joint import JointCache, JointRows, Member
from edge_spec.runtimes.llamacpp.library import ContextChoices
from edge_spec.runtimes.llamacpp.session import LlamaCppSession
from edge_spec.runtimes.llamacpp.transfer import as_first, holds, write_sequence
from edge_spec.runtimes.llamacpp.weights import GgufWeights

# Passes one after the other, after which a session goes back to a cache of its own, or as many more
# as it takes that going back, which copies all tokens, costs little beside them.
_LONE_PASSES, _TOKENS_A_PASS = 8, 8


class SharedSession(LlamaCppSession):
    """Stands in a cache of its own until its first shared pass. It returns there when it is alone,
    and after a pass that failed; also to read a prompt, unless the kernels are our own: others look
    at cells in blocks."""

    def __init__(
        self,
        weights: GgufWeights,
        choices: ContextChoices,
        context_length: int,
        joint: JointCache,
    ) -> None:
        super().__init__(weights, choices, context_length)
        self.joint = joint
        self._member: Member | None = None
        self.num_lone = 0  # passes since the last one that was shared
        self.has_rows = True  # whether rows of the last pass can be committed
        self.untold: np.ndarray | None = None  # features of its rows, which nobody has scored

    def prefill(self, tokens: Sequence[int]) -> None:
        self.untold = None
        if self._member is not None and self._choices.invariant_rows:
            tokens = tokens[self._read_beside(self._member, tokens) :]
            if not tokens:
                return
        self._return()
        super().prefill(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        self.has_rows, self.untold = True, None
        if self._member is not None:
            self.num_lone += 1
            # A single row may be shared out among threads, by how many cells all have.
            choices = self._choices
            is_steady = len(tree) > 1 or choices.steady_rows or choices.invariant_rows
            most = max(_LONE_PASSES, self.length // _TOKENS_A_PASS)
            if self.num_lone > most or not is_steady:
                self._return()
        if self._member is not None:
            self.require_fitting(tree)
            try:
                return self.joint.score([JointRows(self._member, tree)], len(tree))[0]
            except (SessionError, DeviceMemoryError):
                self._return()
        return super().forward(tree)

    def commit(self, rows: Sequence[int]) -> None:
        if not self.has_rows:
            raise ValueError("the rows of the last pass are gone")
        before = self.length
        if self._member is None:
            super().commit(rows)
        else:
            self.length += len(rows)
            self._member.outcome = (self.length, tuple(rows))
        untold, self.untold = self.untold, None
        if untold is not None and self._features is not None and len(rows):
            self._features.on_prefilled(before, untold[np.asarray(rows)])

    def rollback(self, length: int) -> None:
        if self._member is None:
            super().rollback(length)
        else:
            require_rollback(self.length, length)
            self.length = length
            self._member.outcome = (length, self._member.outcome[1] or ())

    @property
    def shares_features(self) -> bool:
        """See `edge_spec.core.features.SharesFeatures`. Keys and values are its own passes'."""
        return self._shared is None

    def collect_features(self, layers: Sequence[int], on_prefilled: OnPrefilled) -> None:
        self._return()
        self.untold = None
        super().collect_features(layers, on_prefilled)

    def state(self) -> dict[str, np.ndarray]:
        if self._member is None:
            return super().state()
        self._context()
        sequence, form = self.joint.read(self._member), self._library.state_form
        known = as_first(sequence, self.length, form) and holds(sequence, self.length, form)
        return {"sequence": sequence} if known else {}

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        super().restore(state, length)
        self._leave()

    def close(self) -> None:
        self._leave()
        super().close()

    def _leave(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            self._collected.detach()
            self.joint.leave(member)

    def require_fitting(self, tree: TokenTree) -> None:
        """Raises ContextFullError, SessionError where the shared cache cannot score the tree."""
        self._context()
        require_room(self.length, len(tree), self._context_length)

    def join(self) -> Member:
        """Moves its tokens beside those of the others, for a shared pass. Raises SessionError,
        DeviceMemoryError."""
        if self._member is None:
            self._reserve(0)
            self._member = self.joint.join(self._read_sequence(), self.length, self._features)
            self._collected = weakref.finalize(self, _leave, self._member)
        self.num_lone = 0
        return self._member

    def _read_beside(self, member: Member, tokens: Sequence[int]) -> int:
        """Reads a prompt in the shared cache; returns how many of its tokens. Raises
        ContextFullError, SessionError."""
        self._context()
        require_room(self.length, len(tokens), self._context_length)
        before = self.length
        try:
            self.joint.prefill(member, tokens)
        except (SessionError, DeviceMemoryError):
            pass  # it goes on in its own cache
        finally:
            self.length = member.outcome[0]
        return self.length - before

    def _return(self) -> None:
        """Goes back to the cache of its own. Raises SessionError where the library cannot, and
        stays then."""
        if self._member is None:
            return
        sequence = self.joint.read(self._member)
        try:
            self._put_back(sequence)
        except ValueError as error:
            raise SessionError(
                f"a conversation cannot leave the others: {error}", remedy="Begin a new one."
            ) from None
        self._leave()

    def _put_back(self, sequence: np.ndarray) -> None:
        library, length = self._library, self.length
        if length > self._choices.num_tokens:
            self._move_to(self._roomier(length), sequence, length)
            return
        context = self._context()
        self._branches.empty(library.memory(context))
        self._cached = 0
        if length:
            write_sequence(library, context, sequence, 0)
        self._cached = length


def forward_together(parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
    """Scores trees of several sessions in one pass. Raises what `forward` does."""
    sessions = [each.session for each in parts if isinstance(each.session, SharedSession)]
    assert len(sessions) == len(parts)
    require_none_alone(sessions)
    for session in sessions:
        session.has_rows = False
    if max(num_rows, sum(len(part.tree) for part in parts)) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows in one pass")
    joint = sessions[0].joint
    if any(session.joint is not joint for session in sessions):
        raise SessionError(
            "conversations that compute in different ways share no pass",
            remedy="Each is scored alone.",
        )
    for session, part in zip(sessions, parts, strict=True):
        session.require_fitting(part.tree)
    try:
        members = [session.join() for session in sessions]
        rows = [
            JointRows(member, part.tree, part.is_scored)
            for member, part in zip(members, parts, strict=True)
        ]
        outs = joint.score(rows, num_rows)
    except BaseException:
        for session in sessions:
            session.num_lone = _LONE_PASSES  # so that the next pass is in its own cache
        raise
    for session, part, out in zip(sessions, parts, outs, strict=True):
        session.has_rows, session.untold = True, None if part.is_scored else out.features
    return outs


def _leave(member: Member) -> None:
    """The next pass of the others gives its cells up."""
    member.has_left = True
