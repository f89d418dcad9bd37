"""Describes what a runtime may do beside opening models: each of these is optional."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Runtime
from edge_spec.core.model_info import ModelInfo
from edge_spec.core.text_codec import TextCodec


@runtime_checkable
class ReadsMoreFormats(Runtime, Protocol):
    """A runtime whose `open` takes bundles of further formats, too; what has to be converted for it
    becomes what it `reads`."""

    also_reads: tuple[str, ...]


@runtime_checkable
class FormatByDevice(Runtime, Protocol):
    """A runtime one of whose devices takes another format than the others."""

    def format_on(self, providers: Sequence[str]) -> str:
        """Returns what models are opened and converted in for devices of these names."""


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
class ConfigScreeningRuntime(Runtime, Protocol):
    """A runtime that does not run all that is converted for it."""

    def require_config(self, config: ModelConfig, path: Path) -> None:
        """Is asked before a model is converted. path: of the model, for the message. Raises
        UnsupportedModelError."""


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
