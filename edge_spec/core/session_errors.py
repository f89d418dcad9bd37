"""Turn a target's failures into EdgeSpecError."""

from __future__ import annotations

import logging
from types import TracebackType

from edge_spec.core.model import Forward, Session, place_before
from edge_spec.errors import DeviceMemoryError, EdgeSpecError, SessionError

_REMEDY = (
    "Ask again: the text is then read again. If it stays, choose another --runtime or --device."
)

_log = logging.getLogger(__name__)


class TranslatedErrors:
    """Turns a runtime's exceptions in the block into SessionError, or DeviceMemoryError where
    memory ran out. EdgeSpecError and `known` pass unchanged."""

    def __init__(self, *known: type[Exception]) -> None:
        self._known: tuple[type[Exception], ...] = (EdgeSpecError, *known)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, self._known):
            return
        if isinstance(error, MemoryError):
            raise DeviceMemoryError(
                "there is too little memory to score this text",
                remedy="Give a shorter --context, or close other programs.",
            ) from error
        raise SessionError(
            f"the model failed while scoring ({type(error).__name__}: {error})", remedy=_REMEDY
        ) from error


translate_errors = TranslatedErrors()


def require_scores(out: Forward, num_rows: int, vocab_size: int | None) -> None:
    """Raise SessionError unless logits are [num_rows, vocab_size]; None: any size."""
    shape = out.logits.shape
    if shape != (num_rows, vocab_size or shape[-1]):
        raise SessionError(
            f"the model gave scores of shape {list(shape)} for {num_rows} rows",
            remedy="Export the model again, or choose another --runtime.",
        )


def roll_back(session: Session, length: int) -> int:
    """Roll back to `length`, to the last kept place before, or to 0 where a sliding window lost
    tokens. Return the tokens left. Raises SessionError."""
    try:
        with translate_errors:
            session.rollback(place_before(session, length))
    except SessionError:
        with translate_errors:
            session.rollback(0)
    return session.length


def close_quietly(session: Session) -> None:
    """Close a session that may have failed."""
    try:
        session.close()
    except Exception as error:
        _log.info("a session could not be closed: %s", error)
