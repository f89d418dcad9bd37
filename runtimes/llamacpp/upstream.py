"""llama.cpp through llama-cpp-python (tried with 0.3.36)."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from os import environ
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np

from edge_spec.core.model_info import ModelInfo
from edge_spec.errors import EdgeSpecError, MissingDependencyError
from edge_spec.runtimes.llamacpp.compute_thread import in_compute_thread
from edge_spec.runtimes.llamacpp.ggml_devices import NAME, bind_devices, devices, load_backend
from edge_spec.runtimes.llamacpp.guard import DeviceGuard
from edge_spec.runtimes.llamacpp.library import (
    KV_TYPES,
    ContextChoices,
    Library,
    LibraryDevice,
    LibraryLog,
    ModelChoices,
    SequenceForm,
    Way,
)
from edge_spec.runtimes.llamacpp.rows.install import Loading, Packed, Rows, install
from edge_spec.runtimes.llamacpp.rows.library import function
from edge_spec.runtimes.llamacpp.unlisted import steady_rows

_MMAP, _NO_MMAP = 1, 0  # llama_load_mode
# Turns of a waiting thread at a barrier before it sleeps, some 0.1 ms. GNU's OpenMP has 300,000, in
# which it keeps a processor from the thread that it waits for where others want one, too. A step of
# a 1.5B beside one busy process took 36 ms for 49, and as long as before with none (2 cores of a
# Zen 5; benchmarks/results/engines.json).
_SPINS = "4000"
# A single row is shared out among threads, which sums in another order. Two types of keys and
# values keep it to the kernel of wider passes, but prompts, too, which are slower then.
_CPU_WAYS = (
    Way("f16"),
    Way("f16, single rows by the kernel of wider passes", steady_rows=True),
    Way("f16-bf16", kv_type="f16-bf16"),
)
_loading, _binding = Lock(), Lock()  # of the library, which two threads may want first
# Of wheels of ours: a llama-cpp-python compiled for AVX2, at the end of Python's path.
_BUNDLED = Path(__file__).with_name("bundled")


def load_ahead() -> None:
    """Begins to load the library, in a thread of its own: kernels are tried in another process
    before their first use, and there is enough to do meanwhile. Raises MissingDependencyError."""
    _imported()

    def load() -> None:
        with suppress(EdgeSpecError):  # whoever needs the library is told
            library()

    if not _library.cache_info().currsize:
        Thread(target=load, name="edge-spec-library", daemon=True).start()


def _imported() -> tuple[Any, Any]:
    """Returns llama.cpp's functions and ggml's. Raises MissingDependencyError where
    llama-cpp-python is not installed or not for this processor."""
    _check_processor()
    try:
        with _short_spins():
            import llama_cpp
            from llama_cpp._ggml import libggml
    except ImportError as error:
        raise MissingDependencyError(
            f"the runtime llamacpp needs llama-cpp-python: {error}",
            remedy='Run: pip install "edge-spec[llamacpp]" (it is compiled, which needs a C++ '
            "compiler and takes minutes; wheels of a release have it inside).",
        ) from error
    return llama_cpp, libggml


def own_devices() -> list[LibraryDevice]:
    """Returns those of this machine, and waits for no test of kernels. Raises as `library` does."""
    _, ggml, _ = _loaded()
    return devices(ggml, ())


def _loaded() -> tuple[Any, Any, LibraryLog]:
    """Returns llama.cpp's functions, ggml's, and what both log. Raises as `library` does."""
    with _binding:
        return _bound()


@cache
def _bound() -> tuple[Any, Any, LibraryLog]:
    api, libggml = _imported()
    bind_devices(libggml)
    log = LibraryLog(NAME)
    api.llama_log_set(log.callback, log.data)
    load_backend(libggml, log)
    return api, libggml, log


@contextmanager
def _short_spins() -> Iterator[None]:
    """Has GNU's OpenMP, if it is loaded meanwhile, give up spinning early, unless the user chose
    how threads wait. It reads the environment once; other processes get it as it was."""
    is_left = environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if is_left:
        environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        yield
    finally:
        if is_left:
            del environ["GOMP_SPINCOUNT"]


def _check_processor() -> None:
    """An instruction that a processor lacks would end the process. Raises
    MissingDependencyError."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None or _BUNDLED not in Path(found.origin).parents:
        return
    if platform.machine().lower() in ("x86_64", "amd64") and not _has_avx2():
        raise MissingDependencyError(
            "the llama.cpp inside edge-spec's wheel needs a processor with AVX2",
            remedy="Run: pip install --force-reinstall --no-deps llama-cpp-python (it is compiled "
            "for this one, which needs a C++ compiler and takes minutes).",
        )


def _has_avx2() -> bool:
    """As numpy says, which names it alone or with what comes along."""
    found: Mapping[str, Any] = np.show_config(mode="dicts").get("SIMD Extensions", {})
    names = {*found.get("baseline", ()), *found.get("found", ())}
    return not names.isdisjoint(("AVX2", "X86_V3"))


def library() -> Library:
    """Raises MissingDependencyError where llama-cpp-python is not installed, DeviceError for a
    backend that does not load."""
    with _loading:
        return _library()


@cache
def _library() -> Library:
    api, ggml, log = _loaded()
    rows = install(ggml)
    if rows.table is not None:
        log.send_through(function("log"))
        api.llama_log_set(log.callback, log.data)
    packed: dict[bytes, Packed] = {}  # what the last load of each file gave to the kernels

    def loaded(source: ModelInfo) -> Packed:
        return packed.get(os.fsencode(source.path), Packed())

    return Library(
        name=NAME,
        log=log,
        batch_type=api.llama_batch,
        devices=lambda *servers: devices(ggml, servers),
        takes_servers=bool(api.llama_supports_rpc()),
        system_info=api.llama_print_system_info,
        flash_kv_types=tuple(KV_TYPES),
        plain_kv_types=("f32", "f16"),
        cpu_ways=_CPU_WAYS,
        steady_rows=partial(steady_rows, api.llama_cpp._lib),
        load_model=partial(_load_model, api, log, rows, packed),
        free_model=api.llama_model_free,
        vocab_size=lambda model: int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))),
        hidden_size=api.llama_model_n_embd,
        is_plain_decoder=partial(_is_plain_decoder, api),
        is_hybrid=api.llama_model_is_hybrid,
        vocabulary=api.llama_model_get_vocab,
        tokenize=api.llama_tokenize,
        token_to_piece=api.llama_token_to_piece,
        token_text=api.llama_vocab_get_text,
        token_attributes=api.llama_vocab_get_attr,
        open_context=partial(_open_context, api),
        free_context=api.llama_free,
        kept_states=getattr(api, "llama_n_rs_seq", lambda context: 0),  # of newer versions
        set_threads=api.llama_set_n_threads,
        decode=in_compute_thread(api.llama_decode),
        synchronize=api.llama_synchronize,
        logits=_address_of("llama_get_logits", api),
        hidden=_address_of("llama_get_embeddings", api),
        want_hidden=api.llama_set_embeddings,
        memory=api.llama_get_memory,
        sequence_remove=api.llama_memory_seq_rm,
        sequence_copy=api.llama_memory_seq_cp,
        sequence_start=api.llama_memory_seq_pos_min,
        state_size=api.llama_state_seq_get_size_ext,
        state_read=api.llama_state_seq_get_data_ext,
        state_write=api.llama_state_seq_set_data_ext,
        state_form=SequenceForm(3, (1, 0)),  # one sequence, which was number 0
        state_window=api.llama_model_n_swa,
        ggml=ggml,
        for_devices=_device_library,
        rows=rows,
        has_invariant_rows=lambda source: rows.takes_attention and loaded(source).is_whole,
        kernels=lambda source: rows.describe(loaded(source)),
    )


@cache
def _device_library(is_guarded: bool) -> Library:
    """Returns the same for models on devices. is_guarded: one that is lost is an error of its
    callers."""
    from llama_cpp import llama_decode
    from llama_cpp._ggml import libggml

    direct = replace(library(), decode=llama_decode)
    return DeviceGuard(direct, libggml).guarded() if is_guarded else direct


def _load_model(
    api: Any,
    log: LibraryLog,
    rows: Rows,
    packed: dict[bytes, Packed],
    path: bytes,
    choices: ModelChoices,
) -> int | None:
    if rows.table is not None:
        function("log_from")(log.least_level)
    params = api.llama_model_default_params()
    params.vocab_only = choices.vocabulary_only
    params.load_mode = _NO_MMAP if choices.mmap is False else _MMAP
    if choices.gpu_layers is not None:
        params.n_gpu_layers = choices.gpu_layers
    handles = [device.handle for device in choices.devices]
    listed = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)  # lives until the return
    params.devices = ctypes.cast(listed, ctypes.c_void_p)
    with Loading(rows, scored_tokens=choices.scored_tokens) as loading:
        handle: int | None = api.llama_model_load_from_file(path, params)
    if not choices.vocabulary_only:
        packed[path] = loading.packed
    if loading.packed.num_failed:  # there was no memory for the packed weights
        if handle is not None:
            api.llama_model_free(handle)
        with Loading(rows, wants_stock=True):
            handle = api.llama_model_load_from_file(path, params)
    return handle


def _open_context(api: Any, model: int, choices: ContextChoices) -> int | None:
    params = api.llama_context_default_params()
    params.n_ctx = choices.num_tokens
    params.n_batch = params.n_ubatch = choices.batch_tokens
    params.n_seq_max = choices.num_sequences or choices.max_rows
    params.n_outputs_max = max(params.n_seq_max, choices.num_outputs or choices.max_rows)
    params.n_rs_seq = choices.kept_states
    params.n_outputs_max_per_seq = 0  # all of them
    params.n_threads = params.n_threads_batch = choices.threads
    params.type_k, params.type_v, _ = KV_TYPES[choices.kv_type]
    params.flash_attn_type = int(choices.flash_attention)
    params.offload_kqv = params.op_offload = choices.on_device
    params.swa_full = True  # or positions before the window could not be rolled back to
    params.kv_unified = True  # branches share the cells of their common prefix
    if choices.tap is not None:
        params.cb_eval = ctypes.cast(choices.tap.callback, type(params.cb_eval))
        params.cb_eval_user_data = choices.tap.data
    handle: int | None = api.llama_init_from_model(model, params)
    return handle


def _is_plain_decoder(api: Any, model: int) -> bool:
    return not (
        api.llama_model_is_recurrent(model)
        or api.llama_model_is_hybrid(model)
        or api.llama_model_is_diffusion(model)
        or api.llama_model_has_encoder(model)
    )


def _address_of(name: str, api: Any) -> Callable[[int], int | None]:
    """A function that returns floats, as one that returns their address: a plain number is made
    and read faster than a typed pointer."""
    function = api.llama_cpp._lib[name]  # another object than the package's own
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_void_p
    found: Callable[[int], int | None] = function
    return found
