"""One table for the functions of `llama.h` that a session needs, whichever library has them."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from edge_spec.core.callbacks import library_callback
from edge_spec.core.model import ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.runtimes.llamacpp.rows.install import Rows

PREFILL_TOKENS = 512  # given to the library at once


class KvType(NamedTuple):
    """Describes how a cache stores keys and values."""

    keys: int  # ggml_type
    values: int
    bytes_per_pair: float  # of one element of a key and one of a value


KV_TYPES: Mapping[str, KvType] = {
    "f32": KvType(0, 0, 8),
    "f16": KvType(1, 1, 4),
    "f16-bf16": KvType(1, 30, 4),
    "q8_0": KvType(8, 8, 68 / 32),
    "q4_0": KvType(2, 2, 36 / 32),
}


class LibraryDevice(NamedTuple):
    """A device that the library can put a model on; sizes in bytes, 0 where it does not say."""

    name: str  # as users type it, such as "CPU" or "CUDA0"
    description: str
    is_cpu: bool
    free_bytes: int
    total_bytes: int
    handle: int | None = None  # ggml_backend_dev_t, where the library has them
    server: str | None = None  # host:port, of a device elsewhere
    shares_memory: bool = False  # with the processor


@dataclass(frozen=True)
class Offload:
    """Describes what of a model leaves the CPU.

    num_layers: as --gpu-layers counts them; most: of them; num_cached: of these, how many have
    keys and values; by_device: bytes, by the names that users type.
    """

    num_layers: int
    most: int
    num_cached: int
    by_device: Mapping[str, int]


@dataclass(frozen=True)
class ModelChoices:
    """Describes how to load weights."""

    devices: tuple[LibraryDevice, ...]  # to offload to; empty: all stays on the CPU
    gpu_layers: int | None  # None: all
    mmap: bool | None  # None: what is fastest
    vocabulary_only: bool = False
    num_cached: int = 0  # of the layers, those with keys and values on the devices
    scored_tokens: ScoredTokens | None = None  # on the CPU, with kernels of ours


class Way(NamedTuple):
    """Describes how attention computes on a CPU, where nothing else was asked for."""

    name: str
    kv_type: str = "f16"
    steady_rows: bool = False  # a single row as those of wider passes


@dataclass(frozen=True)
class ContextChoices:
    """Describes how large a context is and how it computes."""

    num_tokens: int
    batch_tokens: int  # that the library computes at once
    max_rows: int  # of one forward; also the sequences that a tree may have
    threads: int
    kv_type: str  # of KV_TYPES
    flash_attention: bool
    on_device: bool  # whether attention may leave the CPU
    steady_rows: bool = False  # whether a single row is scored as those of wider passes are
    num_sequences: int | None = None  # None: max_rows
    num_outputs: int | None = None  # rows of a pass that may be scored; None: max_rows
    kept_states: int = 0  # of recurrent layers: after so many of the last rows of a pass
    invariant_rows: bool = False  # a row's bits follow from the tokens of its sequence, as long as
    # these stand in the cache in their order
    tap: Any = None  # a features.Tap, of streams within its passes


class SequenceForm(NamedTuple):
    """`words_before`, then the number of cells, then for each cell its position and `cell`, in
    words of 32 bits. Keys and values by layers follow, whose types and sizes a library checks."""

    words_before: int
    cell: tuple[int, ...]


LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# ggml_log_level; a warning of the library is rarely one for the user.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_ERROR, _CONTINUED = 4, 5
_MAX_LINE = 160  # characters of an error's line in an error of ours


class LibraryLog:
    """Passes the library's lines on to `logging`, never to the terminal. Attribute `callback` has
    to live as long as the library, which calls it with `data`."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"edge_spec.{name}")
        self._logger.addHandler(logging.NullHandler())  # or errors would go to stderr
        self.num_errors = 0
        self._errors: deque[str] = deque(maxlen=8)
        self._line, self._level = "", 0
        self._receiver = LogCallback(self._receive)
        self.callback, self.data = self._receiver, ctypes.c_void_p()

    def send_through(self, filter: Any) -> None:
        """Has each line go through a function of C, which drops those below `least_level` and calls
        `data` with the others. A thread that loads a model would wait for the interpreter with each
        of hundreds of lines that nobody reads."""
        self.callback = ctypes.cast(filter, LogCallback)
        self.data = ctypes.cast(self._receiver, ctypes.c_void_p)

    @property
    def least_level(self) -> int:
        """The first of the library's levels that anybody listens to by now."""
        heard = (level for level, each in _LEVELS.items() if self._logger.isEnabledFor(each))
        return min(heard, default=_ERROR)

    def errors_after(self, num_errors: int) -> str:
        """The lines of errors that came since there were `num_errors`, the last few."""
        count = min(self.num_errors - num_errors, len(self._errors))
        return " ".join(list(self._errors)[len(self._errors) - count :])

    @library_callback
    def _receive(self, level: int, text: bytes | None, data: Any) -> None:
        if level != _CONTINUED:
            self._level = level
        *lines, self._line = (self._line + (text or b"").decode("utf-8", "replace")).split("\n")
        for line in filter(None, map(str.strip, lines)):
            if self._level == _ERROR:
                self._errors.append(line[:_MAX_LINE])  # it may quote a damaged file
                self.num_errors += 1
            self._logger.log(_LEVELS.get(self._level, logging.DEBUG), line)


@dataclass(frozen=True)
class Library:
    """Functions under llama.cpp's present names; handles are addresses, None where one failed.

    `memory` is what the sequence functions take.
    """

    name: str  # as users know it
    log: LibraryLog
    batch_type: type[ctypes.Structure]
    devices: Callable[..., list[LibraryDevice]]  # of servers, as host:port, and of this machine
    takes_servers: bool
    system_info: Callable[[], bytes]  # as llama_print_system_info
    flash_kv_types: tuple[str, ...]  # of KV_TYPES, those that flash attention takes
    plain_kv_types: tuple[str, ...]  # and those that attention takes without it
    cpu_ways: tuple[Way, ...]  # of attention there, the fastest first
    steady_rows: Callable[[int], Callable[[bool], None] | None]  # of a context: what makes a pass
    # score a single row as those of wider passes are; None where that is out of reach
    # model
    load_model: Callable[[bytes, ModelChoices], int | None]
    free_model: Callable[[int], None]
    vocab_size: Callable[[int], int]
    hidden_size: Callable[[int], int]
    is_plain_decoder: Callable[[int], bool]  # attention alone, each token after those before it
    is_hybrid: Callable[[int], bool]  # attention in some layers, a recurrent state in others
    # vocabulary
    vocabulary: Callable[[int], int]  # of a model
    tokenize: Callable[..., int]  # as llama_tokenize, of a vocabulary
    token_to_piece: Callable[..., int]  # as llama_token_to_piece, of a vocabulary
    token_text: Callable[[int, int], bytes | None]
    token_attributes: Callable[[int, int], int]  # as llama_vocab_get_attr
    # context
    open_context: Callable[[int, ContextChoices], int | None]
    free_context: Callable[[int], None]
    kept_states: Callable[[int], int]  # of a context, as it was opened
    set_threads: Callable[[int, int, int], None]  # context, of one row, of more
    # 0: done; 1: no room in the cache; other: failed. On the processor one at a time, in a thread
    # of its own.
    decode: Callable[[int, Any], int]
    synchronize: Callable[[int], None]  # a context: returns when its devices have done all
    logits: Callable[[int], int | None]  # address of [outputs, vocab] float32
    hidden: Callable[[int], int | None]  # address of [outputs, hidden] float32
    want_hidden: Callable[[int, bool], None]
    # cache
    memory: Callable[[int], int]
    sequence_remove: Callable[[int, int, int, int], bool]  # memory, sequence, from, to (-1: end)
    sequence_copy: Callable[[int, int, int, int, int], None]  # memory, source, target, from, to
    sequence_start: Callable[[int, int], int]  # memory, sequence: the smallest position it holds
    state_size: Callable[[int, int, int], int]  # context, sequence, flags: bytes of it
    state_read: Callable[[int, Any, int, int, int], int]  # context, buffer, size, sequence, flags
    state_write: Callable[[int, Any, int, int, int], int]
    state_form: SequenceForm  # of what state_read gives
    state_window: Callable[[int], int]  # tokens that it holds in some layers of a model; 0: all
    ggml: Any = None  # as ctypes has loaded it, for taps
    # The same for models on devices, whose passes wait for none on the processor. Whether devices
    # are of this machine: one of these that is lost raises.
    for_devices: Callable[[bool], Library] | None = None
    # Whether kernels of our own compute all of a model on the CPU, flash attention too.
    has_invariant_rows: Callable[[ModelInfo], bool] = lambda source: False
    rows: Rows | None = None  # kernels of our own in its place; None: of a library without any
    kernels: Callable[[ModelInfo], str | None] = lambda source: None  # the same of a loaded model
