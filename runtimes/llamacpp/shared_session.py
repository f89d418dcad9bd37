"""A session whose passes others can share: then its tokens are in a cache that all have joined."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import numpy as np

from edge_spec.core.model import Forward, require_rollback, require_room
from edge_spec.core.shared_pass import PassPart
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError
from edge_spec.runtimes.llamacpp.joint import JointCache, Member
from edge_spec.runtimes.llamacpp.library import ContextChoices
from edge_spec.runtimes.llamacpp.session import MAX_ROWS, LlamaCppSession
from edge_spec.runtimes.llamacpp.transfer import write_sequence
from edge_spec.runtimes.llamacpp.weights import GgufWeights

_LONE_PASSES = 8  # one after the other, after which a session goes back to a cache of its own


class SharedSession(LlamaCppSession):
    """In a cache of its own until its first shared pass. It returns there to read a prompt, whose
    kernels look at cells in blocks, when it is alone, and after a pass that failed."""

    def __init__(
        self,
        weights: GgufWeights,
        choices: ContextChoices,
        context_length: int,
        joint: JointCache,
    ) -> None:
        super().__init__(weights, choices, context_length)
        self._joint = joint
        self._member: Member | None = None
        self._num_lone = 0  # passes since the last one that was shared
        self._has_rows = True  # whether rows of the last pass can be committed

    def prefill(self, tokens: Sequence[int]) -> None:
        self._return()
        super().prefill(tokens)

    def forward(self, tree: TokenTree) -> Forward:
        self._has_rows = True
        if self._member is not None:
            self._num_lone += 1
            if self._num_lone > _LONE_PASSES or not self._scores_alike(len(tree)):
                self._return()
        if self._member is None:
            return super().forward(tree)
        self._prepare(tree)
        return self._joint.score([(self._member, tree)], len(tree))[0]

    def commit(self, rows: Sequence[int]) -> None:
        if not self._has_rows:
            raise ValueError("the rows of the last pass are gone")
        if self._member is None:
            super().commit(rows)
        else:
            self.length += len(rows)
            self._member.outcome = (self.length, tuple(rows))

    def rollback(self, length: int) -> None:
        if self._member is None:
            super().rollback(length)
        else:
            require_rollback(self.length, length)
            self.length = length
            self._member.outcome = (length, self._member.outcome[1])

    def state(self) -> dict[str, np.ndarray]:
        self._return()
        return super().state()

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        super().restore(state, length)
        if self._member is not None:
            self._joint.leave(self._member)
            self._member = None

    def close(self) -> None:
        if self._member is not None:
            self._joint.leave(self._member)
            self._member = None
        super().close()

    def _scores_alike(self, rows: int) -> bool:
        """Whether a pass of its own scores the same in either cache: on devices that is not known,
        and a single row may be shared out among threads by how many cells all have."""
        choices = self._choices
        return not choices.on_device and (rows > 1 or choices.steady_rows)

    def _prepare(self, tree: TokenTree) -> None:
        """Before a pass in the shared cache. Raises ContextFullError, SessionError."""
        self._require_known(tree.tokens)
        self._context()
        require_room(self.length, len(tree), self._context_length)

    def _join(self) -> Member:
        """Raises SessionError, DeviceMemoryError."""
        if self._member is None:
            self._reserve(0)
            self._member = self._joint.join(self._read_sequence(), self.length)
            weakref.finalize(self, _has_left, self._member).atexit = False
        self._num_lone = 0
        return self._member

    def _return(self) -> None:
        """To the cache of its own. Raises SessionError where the library cannot, and stays then."""
        member = self._member
        if member is None:
            return
        sequence = self._joint.take_out(member)
        try:
            self._put_back(sequence)
        except ValueError as error:
            raise SessionError(
                f"a conversation cannot leave the others: {error}", remedy="Begin a new one."
            ) from None
        self._member = None

    def _put_back(self, sequence: np.ndarray) -> None:
        library, length = self._library, self.length
        if length > self._choices.num_tokens:
            self._move_to(self._room_for(length), sequence, length)
            return
        context = self._context()
        library.sequence_remove(library.memory(context), 0, -1, -1)
        self._cached, self._branches, self._has_holes = 0, None, False
        if length:
            write_sequence(library, context, sequence, 0)
        self._cached = length

    @staticmethod
    def forward_together(parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Scores trees of several sessions in one pass. Raises what `forward` does."""
        sessions = [_own(part) for part in parts]
        for session in sessions:
            session._has_rows = False
        if max(num_rows, sum(len(part.tree) for part in parts)) > MAX_ROWS:
            raise ValueError(f"more than {MAX_ROWS} rows in one pass")
        joint = sessions[0]._joint
        if any(session._joint is not joint for session in sessions):
            raise SessionError(
                "conversations that compute in different ways share no pass",
                remedy="Each is scored alone.",
            )
        for session, part in zip(sessions, parts, strict=True):
            session._prepare(part.tree)
        try:
            members = [session._join() for session in sessions]
            trees = [part.tree for part in parts]
            found = joint.score(list(zip(members, trees, strict=True)), num_rows)
        except BaseException:
            for session in sessions:
                session._num_lone = _LONE_PASSES  # so that the next pass is in its own cache
            raise
        for session in sessions:
            session._has_rows = True
        return [
            out if part.scored else Forward(out.logits[:0])
            for part, out in zip(parts, found, strict=True)
        ]


def _own(part: PassPart) -> SharedSession:
    assert isinstance(part.session, SharedSession)
    return part.session


def _has_left(member: Member) -> None:
    member.has_left = True
