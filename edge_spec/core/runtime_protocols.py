"""Describes what a runtime may do beside opening models: each of these is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from edge_spec.core.model import Forward, Runtime, Session
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.text_codec import TextCodec
from edge_spec.core.tree import TokenTree


@runtime_checkable
class ReadsMoreFormats(Runtime, Protocol):
    """A runtime whose `open` takes bundles of further formats, too; what has to be converted for it
    becomes what it `reads`."""

    also_reads: tuple[str, ...]


@runtime_checkable
class LaidOut(Protocol):
    """A runtime whose bundles are laid out for one of its devices."""

    def compute(self, providers: Sequence[str]) -> str | None:
        """Returns what a conversion for these devices is asked for (`ExportOptions.compute`).

        Raises UsageError, DeviceError for devices that `open` would refuse.
        """


@runtime_checkable
class ScreeningRuntime(Runtime, Protocol):
    """A runtime that tells from a file's header whether it can run the model."""

    def require_runnable(self, source: Any) -> None:
        """Leaves the weights unread. source: what `open` takes.

        Raises UnsupportedModelError, MissingDependencyError.
        """


@runtime_checkable
class HasOwnKernels(Runtime, Protocol):
    """A runtime that may put kernels of its own in the place of its library's."""

    def kernels(self) -> str:
        """Names those that compute here, so that another build of them has another name; "" where
        the library's own do. Quick, and raises nothing: it is asked before a model is opened."""


@runtime_checkable
class OpensBeside(Runtime, Protocol):
    """A runtime that may open a file while other threads run."""

    @property
    def opens_beside(self) -> bool:
        """Says whether `open` hardly ever waits for the interpreter."""


@runtime_checkable
class DeviceScreeningRuntime(Runtime, Protocol):
    """A runtime that tells, without a model, whether devices can be started."""

    def require_devices(self, providers: Sequence[str]) -> None:
        """Is asked before a model is converted for them. Raises UsageError for a name that it does
        not know, DeviceError, MissingDependencyError."""


@runtime_checkable
class TokenizingRuntime(Runtime, Protocol):
    """A runtime with a tokenizer of its own, for files that `tokenizers` cannot do justice to."""

    def open_tokenizer(self, source: ModelInfo) -> TextCodec: ...


class PassPart(NamedTuple):
    """One session's rows in a pass that several share. is_scored: whether anybody reads their
    scores; those of a slice of a prompt need not be made."""

    session: Session
    tree: TokenTree
    is_scored: bool = True


@runtime_checkable
class SharesPasses(Protocol):
    """A model that scores the trees of several of its sessions in one pass over its weights.

    The weights of a matrix are read once for all rows, which is most of what a pass of a few rows
    takes (Yu et al. 2022, Orca: selective batching); attention stays that of each session.
    """

    def prepare_sharing(self, num_sessions: int) -> int:
        """Makes what passes of `num_sessions` sessions need; returns how many may share one, 1 for
        none: where memory is short, say. Takes long; any thread may call it, during passes too."""

    def forward_together(self, parts: Sequence[PassPart], num_rows: int) -> list[Forward]:
        """Returns the scores of each part and leaves its session as its own `forward` would. One
        thread at a time may call it, while other sessions may make passes of their own. None of
        the sessions `collects_alone`.

        num_rows: of the pass, which is widened to them; at least those of all parts. Beside rows
        that are not scored, those of the others may come without hidden states. Where it
        raises, none of the sessions has a last forward to commit, and each may score its tree by
        itself.
        """


def forward_one_by_one(parts: Sequence[PassPart]) -> list[Forward]:
    """Returns what a shared pass gives, by passes of each session's own."""
    return [part.session.forward(part.tree) for part in parts]
