"""What a runtime offers: a `Runtime` opens a `Model`, and a `Model` opens `Session`s."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from edge_spec.core.config import ModelConfig
from edge_spec.core.tree import TokenTree
from edge_spec.errors import ContextFullError, UsageError

if TYPE_CHECKING:
    from edge_spec.core.model_info import ModelInfo
    from edge_spec.core.text_codec import TextCodec


@dataclass(frozen=True)
class ScoredTokens:
    """Part of a vocabulary. ids: [tokens] int32 as bytes, ascending, no duplicates."""

    ids: bytes

    @classmethod
    def of(cls, ids: Iterable[int]) -> ScoredTokens:
        return cls(np.array(sorted(set(ids)), np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.ids) // np.dtype(np.int32).itemsize

    def __str__(self) -> str:
        """Return a text that identifies the subset."""
        return f"{len(self)} tokens {hashlib.sha256(self.ids).hexdigest()[:12]}"


# Dtypes allowed in the state of a session or drafter.
StateType = Literal["<f2", "<f4", "<f8", "<i4", "<i8", "|u1"]
STATE_TYPES: tuple[str, ...] = get_args(StateType)
# hints, which every runtime accepts
_WISHES = ("takes_turns", "prefers_cpu", "may_hold_less", "scored_tokens")


@dataclass(frozen=True)
class Capabilities:
    """What a model's sessions can do, checked when an engine is built."""

    max_rows: int  # in one forward
    trees: bool  # rows may branch
    rollback: bool  # the KV cache can be rewound to any length
    hidden_states: bool  # Forward.hidden is filled
    settled_tokens: int = 0  # from this context length on, kernels stay the same
    rounds_activations: bool = False  # to 8 bits, which may amplify a last-bit difference
    # Rows of a pass that can be dropped without rereading text; None: all.
    rollback_rows: int | None = None
    # A row's bits depend on its text alone, whatever else is in the pass, in the cache or in
    # earlier passes. This follows from the kernels' code, not from measurement.
    invariant_rows: bool = False
    kernels: str | None = None  # those that replace the library's own, or why none do, on one line

    @property
    def verified_rows(self) -> int:
        """Return the most rows of a pass of which all but the first may be dropped."""
        bound = self.rollback_rows
        return self.max_rows if bound is None else min(self.max_rows, bound + 1)


@dataclass(frozen=True, eq=False)
class Forward:
    """Result of a pass over a tree. The arrays, maybe the library's memory, are valid until the
    session's next pass or close."""

    logits: np.ndarray  # [rows, vocab] float32
    hidden: np.ndarray | None = None  # [rows, hidden_size] float32, after the final norm
    features: np.ndarray | None = None  # [rows, features, hidden_size] float32: `core.features`


class Session(Protocol):
    """One KV cache. Calls return when their work is done on the device, because callers time
    them."""

    @property
    def length(self) -> int:
        """Number of committed tokens."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Commit `tokens` without logits. Raises ContextFullError."""

    def forward(self, tree: TokenTree) -> Forward:
        """Score each row given the committed tokens and its ancestors; commit nothing. Raises
        ContextFullError."""

    def commit(self, rows: Sequence[int]) -> None:
        """Keep these rows of the last forward, a path from row 0, and drop the others."""

    def rollback(self, length: int) -> None:
        """Drop all tokens from position `length` on."""

    def close(self) -> None:
        """Free the cache; the session is unusable afterwards."""


class SkippingSession(Session, Protocol):
    """Another session's model without some of its sublayers."""

    skipped: frozenset[int]  # 2 * layer: its attention; 2 * layer + 1: its MLP; may be changed

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        """Return [2 * layers] float: each sublayer's 1 - cosine similarity of input and output,
        mean over `tokens` (block influence: Men et al. 2024, ShortGPT). Commits nothing."""


@runtime_checkable
class HasWays(Protocol):
    """A model with several ways of computing, whose logits differ in their last bits."""

    @property
    def ways(self) -> Sequence[str]:
        """Names, fastest first; only one if the user chose it."""

    @property
    def likeliest_way(self) -> str:
        """The way most likely to score a row alike in all passes, as far as known."""

    @property
    def way(self) -> str:
        """The way of sessions opened from now on."""

    def choose_way(self, name: str) -> None: ...


@runtime_checkable
class SelfDrafting(Protocol):
    """A session whose model can also run in part on the same KV cache. A part's committed tokens
    follow this session's, and are overwritten when it continues; what this session commits, the
    part has committed too."""

    def open_exit(self, num_layers: int) -> Session:
        """Run the first `num_layers` layers, final norm and output matrix. Raises UsageError if the
        model was exported without this exit."""

    def open_skipping(self, skipped: frozenset[int]) -> SkippingSession:
        """Run all but the sublayers `skipped`. Raises as `open_exit` does."""


@runtime_checkable
class Restorable(Protocol):
    """A session whose cache can be saved, and restored into another session of the same model that
    was opened alike."""

    def state(self) -> dict[str, np.ndarray]:
        """Copy the committed tokens' state, of STATE_TYPES; empty if impossible. Call between
        rounds: it drops uncommitted rows."""

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Replace all committed tokens, so that logits equal those of the saved session. Raises
        ValueError, changing nothing, unless this is a state of `length` tokens."""


@runtime_checkable
class KeepsPlaces(Protocol):
    """A session that rereads text after a rollback, except to kept places."""

    def keep_place(self) -> None:
        """Keep what a rollback to here needs. Call between passes. Short of memory, it drops places
        never used first."""

    def place_before(self, length: int) -> int:
        """Return the longest length, at most this, that `rollback` reaches without rereading."""


def place_before(session: Session, length: int) -> int:
    """Return `length`, or what `KeepsPlaces` returns."""
    return session.place_before(length) if isinstance(session, KeepsPlaces) else length


def keep_place(session: Session) -> None:
    """Keep this place if the session can."""
    if isinstance(session, KeepsPlaces):
        session.keep_place()


@runtime_checkable
class Interruptible(Protocol):
    """A session whose passes another thread can end, as far as its library can."""

    def interrupt(self) -> None:
        """Make the running pass and all later ones raise SessionError. Any thread may call it."""


def require_room(length: int, rows: int, context_length: int) -> None:
    """Raise ContextFullError if a session has no room for `rows` more."""
    if length + rows > context_length:
        raise ContextFullError(
            f"{length + rows} tokens do not fit the context of {context_length}",
            remedy="Shorten the prompt.",
        )


def require_rollback(current: int, length: int) -> None:
    """Raise ValueError if a session cannot roll back to `length`."""
    if not 0 <= length <= current:
        raise ValueError(f"cannot roll back from {current} to {length} tokens")


def require_state(
    state: Mapping[str, np.ndarray],
    expected: Mapping[str, tuple[Sequence[int], DTypeLike]],
    length: int,
    context_length: int,
) -> None:
    """Raise ValueError unless the state has the expected shapes and dtypes."""
    if not 0 <= length <= context_length:
        raise ValueError(f"{length} tokens for a context of {context_length}")
    if state.keys() != expected.keys():
        raise ValueError(f"a state of {sorted(state)} instead of {sorted(expected)}")
    for name, (shape, kind) in expected.items():
        array = state[name]
        if array.shape != tuple(shape) or array.dtype != kind:
            raise ValueError(
                f"{name} is {array.dtype} of shape {array.shape}, expected {np.dtype(kind)} of "
                f"{tuple(shape)}"
            )


class Model(Protocol):
    """Loaded weights, shared by its sessions."""

    config: ModelConfig
    capabilities: Capabilities

    def open_session(self) -> Session: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RuntimeOptions:
    """How to load a model. None: the runtime chooses."""

    threads: int | None = None
    providers: tuple[str, ...] = ()  # devices in order of preference, such as "cuda", "cpu"
    context_length: int | None = None  # tokens; None: what the model was trained for
    gpu_layers: int | None = None  # off the CPU; None: as many as fit
    kv_type: str | None = None  # of cached keys and values, such as "f16"
    mmap: bool | None = None  # weights stay in their file, shared with other processes
    flash_attention: bool | None = None
    takes_turns: bool = False  # with other models, which waiting threads would slow down
    prefers_cpu: bool = False  # unless a device is named
    # cache shorter than context_length allowed, where its size is fixed
    may_hold_less: bool = False
    # For a draft: other tokens may read -infinity if that is faster. A runtime that cannot leave
    # them out scores all.
    scored_tokens: ScoredTokens | None = None
    # host:port of each; their devices are added
    rpc_servers: tuple[str, ...] = field(default=(), metadata={"option": "rpc"})

    def require_only(self, runtime: str, *known: str) -> None:
        """Raise UsageError for an option that the runtime does not know."""
        for option in fields(self):
            if (
                option.name not in (*known, *_WISHES)
                and getattr(self, option.name) != option.default
            ):
                name = option.metadata.get("option", option.name.replace("_", "-"))
                raise UsageError(
                    f"{runtime} has no option {name}",
                    remedy="Leave it out, or choose another --runtime.",
                )


class Runtime:
    """A library that can run models, found by the entry point group `edge_spec.runtimes`. Only
    `open` is required.

    `reads` names what `open` takes: "checkpoint" (a `Checkpoint`), "gguf" (a `ModelInfo` whose path
    is a GGUF file), or another exporter's format (a `Bundle` that contains it), to which models are
    converted. `also_reads` names further formats of bundles.
    """

    name: str
    reads: str
    also_reads: tuple[str, ...] = ()

    def open(self, source: Any, options: RuntimeOptions) -> Model:
        raise NotImplementedError

    def require_runnable(self, source: Any) -> None:
        """Refuse a model by its header. source: as for `open`, weights unread. Raises
        UnsupportedModelError, MissingDependencyError."""

    def require_devices(self, providers: Sequence[str]) -> None:
        """Refuse devices before a conversion for them. Raises UsageError for an unknown name,
        DeviceError, MissingDependencyError."""

    def compute(self, providers: Sequence[str]) -> str | None:
        """Return `ExportOptions.compute` for these devices. Raises UsageError, DeviceError as
        `open` would."""
        return None

    def kernels(self) -> str:
        """Name the kernels that replace the library's own; each build has another name. Quick, and
        raises nothing: called before a model is opened."""
        return ""

    @property
    def opens_beside(self) -> bool:
        """Return whether `open` mostly runs without the interpreter lock."""
        return False

    def open_tokenizer(self, source: ModelInfo) -> TextCodec | None:
        """Return the library's tokenizer, for files that `tokenizers` handles badly."""
        return None


class Progress(Protocol):
    """Callback during long work: `fraction` runs from 0 to 1."""

    def __call__(self, what: str, fraction: float) -> None: ...
