"""Describes what a runtime offers: a `Runtime` opens a `Model`, a `Model` opens `Session`s."""

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
    """Names some of a vocabulary. ids: [tokens] int32 as bytes, in rising order, none twice."""

    ids: bytes

    @classmethod
    def of(cls, ids: Iterable[int]) -> ScoredTokens:
        """Takes them in any order."""
        return cls(np.array(sorted(set(ids)), np.int32).tobytes())

    def __len__(self) -> int:
        return len(self.ids) // np.dtype(np.int32).itemsize

    def __str__(self) -> str:
        """Return what differs wherever the tokens do."""
        return f"{len(self)} tokens {hashlib.sha256(self.ids).hexdigest()[:12]}"


# numpy's names of the types that an array of a session's or a drafter's state may have.
StateType = Literal["<f2", "<f4", "<f8", "<i4", "<i8", "|u1"]
STATE_TYPES: tuple[str, ...] = get_args(StateType)
_WISHES = ("takes_turns", "prefers_cpu", "may_hold_less", "scored_tokens")  # that none refuses


@dataclass(frozen=True)
class Capabilities:
    """Says what a model's sessions can do; checked when an engine is built, not in a generation."""

    max_rows: int  # rows that one forward accepts
    trees: bool  # whether rows may branch
    rollback: bool  # whether the KV cache can be rewound to any length
    hidden_states: bool  # whether Forward.hidden is filled
    settled_tokens: int = 0  # of context, from which on no other kernels are chosen
    rounds_activations: bool = False  # to 8 bits, where a last bit that differs may count for much
    # Rows of one pass that can be dropped after it, without reading text again; None: all of them.
    rollback_rows: int | None = None
    # Whether the bits of a row follow from its text alone, whatever else is in its pass, beside it
    # in the cache or in other passes before: by how its kernels compute, not by measurement.
    invariant_rows: bool = False
    kernels: str | None = None  # in place of the library's own, or why not, in one line

    @property
    def verified_rows(self) -> int:
        """Return how many rows a pass may have of which all but the first may be dropped."""
        bound = self.rollback_rows
        return self.max_rows if bound is None else min(self.max_rows, bound + 1)


@dataclass(frozen=True, eq=False)
class Forward:
    """Scores of one pass over a tree. The arrays are valid until the session's next pass or close:
    they may be the library's own memory."""

    logits: np.ndarray  # [rows, vocab] float32
    hidden: np.ndarray | None = None  # [rows, hidden_size] float32, after the final norm
    features: np.ndarray | None = None  # [rows, features, hidden_size] float32: `core.features`


class Session(Protocol):
    """One KV cache. Its calls return when their work is done, on whatever device: clocks are read
    around them."""

    @property
    def length(self) -> int:
        """Committed tokens."""

    def prefill(self, tokens: Sequence[int]) -> None:
        """Commits `tokens` without returning scores. Raises ContextFullError."""

    def forward(self, tree: TokenTree) -> Forward:
        """Scores every row given the committed tokens and the row's ancestors; commits nothing.
        Raises ContextFullError where the rows do not fit."""

    def commit(self, rows: Sequence[int]) -> None:
        """Keeps these rows of the last forward, a path from row 0, and drops the others."""

    def rollback(self, length: int) -> None:
        """Forgets all tokens from position `length` on."""

    def close(self) -> None:
        """Frees the cache; the session is of no use afterwards."""


class SkippingSession(Session, Protocol):
    """Another session's model without some of its sublayers."""

    skipped: frozenset[int]  # 2 * layer: its attention; 2 * layer + 1: its MLP; may be set again

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        """[2 * layers] float: how far each sublayer turns the residual stream, 1 - cosine
        similarity of its input and output, mean over `tokens` after the committed ones (block
        influence: Men et al. 2024, ShortGPT). Commits nothing."""


@runtime_checkable
class HasWays(Protocol):
    """A model that can be computed in several ways, whose scores differ in their last bits."""

    @property
    def ways(self) -> Sequence[str]:
        """Names them, the fastest first; one where the user has chosen."""

    @property
    def likeliest_way(self) -> str:
        """The one likeliest to score a row alike in all passes, as far as that is known before."""

    @property
    def way(self) -> str:
        """The one of sessions that are opened from now on."""

    def choose_way(self, name: str) -> None: ...


@runtime_checkable
class SelfDrafting(Protocol):
    """A session whose model can also be run in part, on the same KV cache. What a part commits is
    after this session's tokens, and overwritten when it goes on; whatever this session commits, the
    part has committed too."""

    def open_exit(self, num_layers: int) -> Session:
        """The first `num_layers` layers, the final norm and the output matrix. Raises UsageError
        where the model was exported without such an exit."""

    def open_skipping(self, skipped: frozenset[int]) -> SkippingSession:
        """The model without the sublayers `skipped`. Raises UsageError as `open_exit` does."""


@runtime_checkable
class Restorable(Protocol):
    """A session whose cache can be taken out, for a snapshot, and put into another session of the
    same model that was opened in the same way."""

    def state(self) -> dict[str, np.ndarray]:
        """Copies what the committed tokens have written, of STATE_TYPES; empty where it cannot.
        Between rounds: it drops rows that are not committed."""

    def restore(self, state: Mapping[str, np.ndarray], length: int) -> None:
        """Takes the place of all committed tokens, so that scores are those of the session that the
        state was taken of. Raises ValueError, and changes nothing, for what is no state of `length`
        tokens."""


@runtime_checkable
class KeepsPlaces(Protocol):
    """A session that reads text again after a rollback, but to places that it was asked to keep."""

    def keep_place(self) -> None:
        """Keeps what going back to here takes. Between passes; where memory for this ends, it
        forgets places, first those that were never of use."""

    def place_before(self, length: int) -> int:
        """Return the longest length up to this one that `rollback` reads nothing again for."""


def place_before(session: Session, length: int) -> int:
    """Return it, for any session: the length itself where all can be gone back to."""
    return session.place_before(length) if isinstance(session, KeepsPlaces) else length


def keep_place(session: Session) -> None:
    """Does, where that is of use."""
    if isinstance(session, KeepsPlaces):
        session.keep_place()


@runtime_checkable
class Interruptible(Protocol):
    """A session whose passes can be ended from another thread, as far as its library can."""

    def interrupt(self) -> None:
        """The pass that runs, and each after it, raises SessionError. Any thread may call."""


def require_room(length: int, rows: int, context_length: int) -> None:
    """Checks that a session has room for rows. Raises ContextFullError."""
    if length + rows > context_length:
        raise ContextFullError(
            f"{length + rows} tokens do not fit the context of {context_length}",
            remedy="Shorten the prompt.",
        )


def require_rollback(current: int, length: int) -> None:
    """Checks that a session can forget so far back. Raises ValueError."""
    if not 0 <= length <= current:
        raise ValueError(f"cannot roll back from {current} to {length} tokens")


def require_state(
    state: Mapping[str, np.ndarray],
    expected: Mapping[str, tuple[Sequence[int], DTypeLike]],
    length: int,
    context_length: int,
) -> None:
    """Checks a state before it is restored. expected: shapes and types. Raises ValueError."""
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
    """Loaded weights. Sessions of one model share them."""

    config: ModelConfig
    capabilities: Capabilities

    def open_session(self) -> Session: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class RuntimeOptions:
    """Says how to load a model. None leaves the choice to the runtime."""

    threads: int | None = None
    providers: tuple[str, ...] = ()  # devices in order of preference, such as "cuda", "cpu"
    context_length: int | None = None  # tokens; None: what the model was trained for
    gpu_layers: int | None = None  # how many layers leave the CPU; None: as many as fit
    kv_type: str | None = None  # of the cache's keys and values, such as "f16"
    mmap: bool | None = None  # whether weights stay in their file, shared with other processes
    flash_attention: bool | None = None
    takes_turns: bool = False  # with other models: threads that wait for work would slow these down
    prefers_cpu: bool = False  # where no device is named, also if there are faster ones
    may_hold_less: bool = False  # than context_length, where its cache has a fixed size
    # Of a model that drafts: others read -infinity where that makes its passes faster. A runtime
    # that cannot leave them out scores all.
    scored_tokens: ScoredTokens | None = None
    # host:port of each, whose devices are added
    rpc_servers: tuple[str, ...] = field(default=(), metadata={"option": "rpc"})

    def require_only(self, runtime: str, *known: str) -> None:
        """Raises UsageError if an option is set that the runtime does not know."""
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
    """The entry point `edge_spec.runtimes`: one library that can run models. Only `open` has to be
    written.

    `reads` names what `open` takes: "checkpoint" (a `Checkpoint`), "gguf" (a `ModelInfo` whose
    path is a GGUF file), or another exporter's format (a `Bundle` that holds it), to which models
    are converted; `also_reads` names further bundles.
    """

    name: str
    reads: str
    also_reads: tuple[str, ...] = ()

    def open(self, source: Any, options: RuntimeOptions) -> Model:
        raise NotImplementedError

    def require_runnable(self, source: Any) -> None:
        """Refuses a model by its header. source: what `open` takes, whose weights stay unread.
        Raises UnsupportedModelError, MissingDependencyError."""

    def require_devices(self, providers: Sequence[str]) -> None:
        """Refuses devices before a model is converted for them. Raises UsageError for a name that
        it does not know, DeviceError, MissingDependencyError."""

    def compute(self, providers: Sequence[str]) -> str | None:
        """Return what a conversion for these devices is asked for (`ExportOptions.compute`). Raises
        UsageError, DeviceError for devices that `open` would refuse."""
        return None

    def kernels(self) -> str:
        """Name the kernels that take the place of the library's own here, so that another build of
        them has another name. Quick, and raises nothing: it is asked before a model is opened."""
        return ""

    @property
    def opens_beside(self) -> bool:
        """Return whether `open` hardly waits for the interpreter, so that other threads run."""
        return False

    def open_tokenizer(self, source: ModelInfo) -> TextCodec | None:
        """Return the library's tokenizer, for files that `tokenizers` cannot do justice to."""
        return None


class Progress(Protocol):
    """Told about long work: `fraction` runs from 0 to 1."""

    def __call__(self, what: str, fraction: float) -> None: ...


@runtime_checkable
class TellsNodePlacement(Protocol):
    """A model whose library says which device took which of its operators."""

    def node_placement(self) -> Mapping[str, Mapping[str, int]]:
        """Counts operators, such as "MatMulNBits", by the provider that took them, such as
        "CUDAExecutionProvider"."""
