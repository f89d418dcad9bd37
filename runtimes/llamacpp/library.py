"""llama.cpp's and ggml's functions, and the options of models and contexts."""

from __future__ import annotations

import copy
import ctypes
import logging
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from edge_spec.core.callbacks import library_callback
from edge_spec.core.config import ModelConfig
from edge_spec.core.model import ScoredTokens
from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import DeviceError
from edge_spec.models.devices import free_bytes
from edge_spec.runtimes.kv_cache import MAX_ROWS
from edge_spec.runtimes.llamacpp.compute_thread import in_compute_thread
from edge_spec.runtimes.llamacpp.rows.install import Rows, install, loading
from edge_spec.runtimes.llamacpp.rows.library import Load
from edge_spec.runtimes.llamacpp.rows.library import function as rows_function

NAME = "llama.cpp"  # shown to users
NO_REASON = "it gives no reason"
PREFILL_TOKENS = 512  # per pass


class KvType(NamedTuple):
    """The ggml types of keys and values."""

    keys: int  # ggml_type
    values: int
    bytes_per_pair: float  # of a key and a value element


KV_TYPES: Mapping[str, KvType] = {
    "f32": KvType(0, 0, 8),
    "f16": KvType(1, 1, 4),
    "f16-bf16": KvType(1, 30, 4),
    "q8_0": KvType(8, 8, 68 / 32),
    "q4_0": KvType(2, 2, 36 / 32),
}
PLAIN_KV_TYPES = ("f32", "f16")  # allowed without flash attention
DEFAULT_KV_TYPE = "f16"  # as large as "f16-bf16"


def cache_bytes(config: ModelConfig, num_tokens: int, kv_type: str | None) -> int:
    """Return the bytes of keys and values. Raises KeyError for an unknown type."""
    kind = KV_TYPES[(kv_type or DEFAULT_KV_TYPE).lower()]
    return int(config.cached_keys * num_tokens * kind.bytes_per_pair)


class LibraryDevice(NamedTuple):
    """A device; sizes in bytes, 0 if not reported."""

    name: str  # such as "CPU" or "CUDA0"
    description: str
    is_cpu: bool
    free_bytes: int
    total_bytes: int
    handle: int | None = None  # ggml_backend_dev_t
    server: str | None = None  # host:port of a remote device
    shares_memory: bool = False  # with the CPU


@dataclass(frozen=True)
class Offload:
    """The part of a model that leaves the CPU. num_layers: for --gpu-layers, of `most`; num_cached:
    those with KV cache; by_device: bytes by name."""

    num_layers: int
    most: int
    num_cached: int
    by_device: Mapping[str, int]


@dataclass(frozen=True)
class ModelChoices:
    """How to load weights."""

    devices: tuple[LibraryDevice, ...]  # to offload to; empty: CPU only
    gpu_layers: int | None  # None: all
    mmap: bool | None  # None: the fastest
    vocabulary_only: bool = False
    num_cached: int = 0  # layers with KV cache on the devices
    scored_tokens: ScoredTokens | None = None  # on the CPU, with our kernels


VOCABULARY_ONLY = ModelChoices((), None, None, vocabulary_only=True)


@dataclass(frozen=True)
class ContextChoices:
    """How to open a context."""

    num_tokens: int
    threads: int
    kv_type: str  # key of KV_TYPES
    flash_attention: bool
    on_device: bool  # whether attention may leave the CPU
    steady_rows: bool = False  # score single rows with the kernels of wider passes
    num_sequences: int = MAX_ROWS  # one for each leaf of a tree
    num_outputs: int = MAX_ROWS  # most scored rows of a pass
    kept_states: int = 0  # recurrent states kept after a pass's last rows
    invariant_rows: bool = False  # a row's bits follow from its sequence's tokens if
    # the cache has them in order
    tap: Any = None  # a features.Tap


LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
# ggml_log_level. Few of the library's warnings are for users.
_LEVELS = {1: logging.DEBUG, 2: logging.DEBUG, 3: logging.INFO, 4: logging.ERROR}
_ERROR, _CONTINUED = 4, 5
_MAX_LINE = 160  # characters of a log line that errors quote


class LibraryLog:
    """Sends the library's log to `logging`. `callback`, called with `data`, must outlive the
    library."""

    def __init__(self, name: str = NAME) -> None:
        self._logger = logging.getLogger(f"edge_spec.{name}")
        self._logger.addHandler(logging.NullHandler())  # keeps errors off stderr
        self.num_errors = 0
        self._errors: deque[str] = deque(maxlen=8)
        self._line, self._level = "", 0
        self._receiver = LogCallback(self._receive)
        self.callback, self.data = self._receiver, ctypes.c_void_p()

    def send_through(self, filter: Any) -> None:
        """Let a C function drop lines below `least_level`: hundreds of Python calls would delay
        loading."""
        self.callback = ctypes.cast(filter, LogCallback)
        self.data = ctypes.cast(self._receiver, ctypes.c_void_p)

    @property
    def least_level(self) -> int:
        heard = (level for level, each in _LEVELS.items() if self._logger.isEnabledFor(each))
        return min(heard, default=_ERROR)

    def errors_after(self, num_errors: int) -> str:
        """Return the last few error lines since the count was `num_errors`."""
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


_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_TEXT, _BOOL = ctypes.c_char_p, ctypes.c_bool
# Missing from llama-cpp-python, or bound there with typed pointers, which are slower.
UNBOUND: tuple[tuple[str, list[Any], Any], ...] = (
    ("llama_get_logits", [_HANDLE], _HANDLE),  # [outputs, vocab] float32
    ("llama_get_embeddings", [_HANDLE], _HANDLE),  # [outputs, hidden] float32
    ("ggml_backend_load", [_TEXT], _HANDLE),
    ("ggml_backend_dev_count", [], _SIZE),
    ("ggml_backend_dev_get", [_SIZE], _HANDLE),
    ("ggml_backend_dev_name", [_HANDLE], _TEXT),
    ("ggml_backend_dev_description", [_HANDLE], _TEXT),
    ("ggml_backend_dev_type", [_HANDLE], _INT),
    ("ggml_backend_dev_memory", [_HANDLE, *[ctypes.POINTER(_SIZE)] * 2], None),
    ("ggml_backend_reg_by_name", [_TEXT], _HANDLE),
    ("ggml_backend_reg_dev_count", [_HANDLE], _SIZE),
    ("ggml_backend_reg_dev_get", [_HANDLE, _SIZE], _HANDLE),
    ("ggml_backend_reg_get_proc_address", [_HANDLE, _TEXT], _HANDLE),
)
_SCHEDULER_OF = "_ZNK13llama_context9get_schedEv"  # llama_context::get_sched() const
# For `steady_switch`. The first is in no header, and wheels may lack it.
_UNLISTED: tuple[tuple[str, list[Any], Any], ...] = (
    (_SCHEDULER_OF, [_HANDLE], _HANDLE),
    ("ggml_backend_sched_get_n_backends", [_HANDLE], _INT),
    ("ggml_backend_sched_get_backend", [_HANDLE, _INT], _HANDLE),
    ("ggml_backend_is_cpu", [_HANDLE], _BOOL),
    ("ggml_backend_cpu_set_use_ref", [_HANDLE, _BOOL], None),
)
BACKEND = "GGML_BACKEND_PATH"  # environment variable: an extra backend
_IS_UNIFIED = sys.platform == "darwin" and platform.machine() == "arm64"  # CPU and GPU share memory
_CPU, _INTEGRATED_GPU, _ACCELERATED_CPU = 0, 2, 3  # ggml_backend_dev_type
_MMAP, _NO_MMAP = 1, 0  # llama_load_mode


class Library:
    """llama.cpp's and ggml's functions under their C names; handles are addresses.

    `run` calls a function where passes run: in the compute thread. `api` and `ggml` are
    llama-cpp-python's.
    """

    def __init__(self, api: Any, ggml: Any) -> None:
        """Raises DeviceError for a backend that does not load."""
        self.api, self.ggml = api, ggml
        self.log = LibraryLog()
        self._installing, self._installed = Lock(), list[Rows]()  # shared with copies
        self._loads: dict[bytes, Load] = {}  # latest of each file
        self.run: Callable[..., Any] = in_compute_thread
        self._bind(UNBOUND)
        with suppress(AttributeError):
            self._bind(_UNLISTED)
        self.llama_log_set(self.log.callback, self.log.data)
        self._load_backend()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("llama_"):
            raise AttributeError(name)
        found = self.__dict__[name] = getattr(self.api, name)
        return found

    def _bind(self, functions: Sequence[tuple[str, list[Any], Any]]) -> None:
        for name, arguments, result in functions:
            # An item is a new function object. Rebinding the package's would free memory that a
            # running call may read.
            found = (self.ggml if name.startswith("ggml") else self.api.llama_cpp._lib)[name]
            found.argtypes, found.restype = arguments, result
            self.__dict__[name] = found

    def replacing(self, **functions: Any) -> Library:
        """Return a copy with other functions or methods."""
        made = copy.copy(self)
        made.__dict__.update(functions)
        return made

    @property
    def rows(self) -> Rows:
        """Our kernels, if they pass their test: the first use takes seconds, in another process.
        Raises UsageError as `install` does."""
        with self._installing:
            if not self._installed:
                self._installed.append(install(self.ggml))
                if self._installed[0].table is not None:
                    self.log.send_through(rows_function("log"))
                    self.llama_log_set(self.log.callback, self.log.data)
            return self._installed[0]

    # Models

    def load_model(self, path: bytes, choices: ModelChoices) -> int | None:
        rows, api = self.rows, self.api
        if rows.table is not None:
            rows_function("log_from")(self.log.least_level)
        params = api.llama_model_default_params()
        params.vocab_only = choices.vocabulary_only
        params.load_mode = _NO_MMAP if choices.mmap is False else _MMAP
        if choices.gpu_layers is not None:
            params.n_gpu_layers = choices.gpu_layers
        handles = [device.handle for device in choices.devices]
        listed = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)  # outlives the call
        params.devices = ctypes.cast(listed, ctypes.c_void_p)
        with loading(rows, scored_tokens=choices.scored_tokens) as load:
            handle: int | None = api.llama_model_load_from_file(path, params)
        if not choices.vocabulary_only:
            self._loads[path] = load
        if load.num_failed:  # no memory for packed weights
            if handle is not None:
                api.llama_model_free(handle)
            with loading(rows, wants_stock=True):
                handle = api.llama_model_load_from_file(path, params)
        return handle

    def vocab_size(self, model: int) -> int:
        return int(self.llama_vocab_n_tokens(self.llama_model_get_vocab(model)))

    def has_invariant_rows(self, source: ModelInfo) -> bool:
        """Return whether our kernels compute a loaded model's rows entirely, attention included."""
        return self.rows.takes_attention and self._load_of(source).is_whole

    def kernels(self, source: ModelInfo) -> str:
        return self.rows.describe(self._load_of(source))

    def _load_of(self, source: ModelInfo) -> Load:
        return self._loads.get(os.fsencode(source.path), Load())

    # Contexts

    def open_context(self, model: int, choices: ContextChoices) -> int | None:
        params = self.api.llama_context_default_params()
        params.n_ctx = choices.num_tokens
        params.n_batch = params.n_ubatch = PREFILL_TOKENS
        params.n_seq_max = choices.num_sequences
        params.n_outputs_max = max(choices.num_sequences, choices.num_outputs)
        params.n_rs_seq = choices.kept_states
        params.n_outputs_max_per_seq = 0  # no limit
        params.n_threads = params.n_threads_batch = choices.threads
        params.type_k, params.type_v, _ = KV_TYPES[choices.kv_type]
        params.flash_attn_type = int(choices.flash_attention)
        params.offload_kqv = params.op_offload = choices.on_device
        params.swa_full = True  # or no rollback to before the window
        params.kv_unified = True  # branches share cells of their prefix
        if choices.tap is not None:
            params.cb_eval = ctypes.cast(choices.tap.callback, type(params.cb_eval))
            params.cb_eval_user_data = choices.tap.data
        handle: int | None = self.api.llama_init_from_model(model, params)
        return handle

    def steady_switch(self, context: int) -> Callable[[bool], None] | None:
        """Return a switch that makes single rows use wider passes' kernels on the CPU, None if the
        build lacks it.

        ggml's flash attention splits a single row's cells among threads, which changes the order of
        its sums (ggml-cpu/ops.cpp). The backend's switch turns such kernels off.
        """
        try:
            scheduler = getattr(self, _SCHEDULER_OF)(context)
            for number in reversed(range(self.ggml_backend_sched_get_n_backends(scheduler))):
                backend = self.ggml_backend_sched_get_backend(scheduler, number)
                if self.ggml_backend_is_cpu(backend):
                    return lambda on: self.ggml_backend_cpu_set_use_ref(backend, on)
        except AttributeError:
            pass
        return None

    # Devices

    def devices(self, *servers: str) -> list[LibraryDevice]:
        """Return servers' (host:port) devices in llama.cpp's order, then local ones."""
        found = []
        for server in servers:
            registry = self._add_server(server.encode())
            count = self.ggml_backend_reg_dev_count(registry) if registry else 0
            handles = [self.ggml_backend_reg_dev_get(registry, i) for i in range(count)]
            found += [self._device(handle, server) for handle in handles]
        local = map(self.ggml_backend_dev_get, range(self.ggml_backend_dev_count()))
        return found + [self._device(handle) for handle in local]

    def _add_server(self, server: bytes) -> int | None:
        """Register a server; the process ends if it does not answer, or dies later."""
        self.ggml.ggml_set_abort_callback(_END)
        registry = self.ggml_backend_reg_by_name(b"RPC")
        address = self.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_rpc_add_server")
        found: int | None = ctypes.CFUNCTYPE(_HANDLE, _TEXT)(address)(server)
        return found

    def _device(self, handle: int, server: str | None = None) -> LibraryDevice:
        kind = self.ggml_backend_dev_type(handle)
        is_cpu = kind in (_CPU, _ACCELERATED_CPU)
        free, total = _SIZE(), _SIZE()
        self.ggml_backend_dev_memory(handle, ctypes.byref(free), ctypes.byref(total))
        return LibraryDevice(
            name=self.ggml_backend_dev_name(handle).decode(),
            description=self.ggml_backend_dev_description(handle).decode(),
            is_cpu=is_cpu,
            free_bytes=(is_cpu and free_bytes()) or free.value,
            total_bytes=total.value,
            handle=handle,
            server=server,
            shares_memory=kind == _INTEGRATED_GPU or _IS_UNIFIED,
        )

    def _load_backend(self) -> None:
        path = os.environ.get(BACKEND)
        if path and not self.ggml_backend_load(os.fsencode(path)):
            raise DeviceError(
                f"{NAME} cannot load the backend {path}: {self.log.errors_after(0) or NO_REASON}",
                remedy="Compile it from the sources of the installed llama-cpp-python, or unset "
                f"{BACKEND}.",
            )


def _end(message: bytes) -> None:
    """Exit before the library aborts, which would start a debugger for a backtrace."""
    reason = message.decode("utf-8", "replace").split(": ", 1)[-1].strip()  # drop the source line
    remedy = "Start an RPC server that is gone again."
    print(f"edge-spec: {NAME} cannot go on: {reason}. {remedy}", file=sys.stderr, flush=True)
    os._exit(1)


_END = ctypes.CFUNCTYPE(None, _TEXT)(_end)
