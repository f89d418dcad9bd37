"""ik_llama.cpp through ik-llama-cpp-python (tried with 0.1.5).

An older fork of the same API with its own kernels: the sequence functions take a context and have
other names, and a context gives logits or hidden states but not both. The package binds the part
that its own high-level class uses; the rest is bound here.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial
from typing import Any

from edge_spec.errors import MissingDependencyError
from edge_spec.fitting.memory import free_bytes
from edge_spec.runtimes.llamacpp.library import (
    KV_TYPES,
    PREFILL_TOKENS,
    ContextChoices,
    Library,
    LibraryDevice,
    ModelChoices,
    SequenceForm,
    Way,
)
from edge_spec.runtimes.llamacpp.logs import LibraryLog, LogCallback

NAME = "ik_llama.cpp"
_ALL_LAYERS = 999
_HANDLE, _INT, _SIZE = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t
_FLAGS = (ctypes.c_bool, ctypes.c_bool)
_UNBOUND: tuple[tuple[str, list[Any], Any], ...] = (
    ("llama_log_set", [LogCallback, _HANDLE], None),
    ("llama_print_system_info", [], ctypes.c_char_p),
    ("llama_set_n_threads", [_HANDLE, ctypes.c_uint32, ctypes.c_uint32], None),
    ("llama_get_logits", [_HANDLE], _HANDLE),
    ("llama_synchronize", [_HANDLE], None),
    ("llama_model_has_recurrent", [_HANDLE], ctypes.c_bool),
    ("llama_model_has_encoder", [_HANDLE], ctypes.c_bool),
    ("llama_vocab_get_text", [_HANDLE, _INT], ctypes.c_char_p),
    ("llama_vocab_tokenize", [_HANDLE, ctypes.c_char_p, _INT, _HANDLE, _INT, *_FLAGS], _INT),
    ("llama_token_to_piece_vocab", [_HANDLE, _INT, _HANDLE, _INT, _INT, ctypes.c_bool], _INT),
    ("llama_kv_cache_seq_rm", [_HANDLE, _INT, _INT, _INT], ctypes.c_bool),
    ("llama_kv_cache_seq_cp", [_HANDLE, _INT, _INT, _INT, _INT], None),
    ("llama_kv_cache_seq_keep", [_HANDLE, _INT], None),
    ("llama_kv_cache_seq_pos_min", [_HANDLE, _INT], _INT),
    ("llama_kv_cache_defrag", [_HANDLE], None),
    ("llama_kv_cache_update", [_HANDLE], _INT),
    ("llama_state_seq_get_size", [_HANDLE, _INT, ctypes.c_uint32], _SIZE),
    ("llama_state_seq_get_data", [_HANDLE, _HANDLE, _SIZE, _INT, ctypes.c_uint32], _SIZE),
    ("llama_state_seq_set_data", [_HANDLE, _HANDLE, _SIZE, _INT, ctypes.c_uint32], _SIZE),
    ("ggml_backend_reg_get_count", [], _SIZE),
    ("ggml_backend_reg_get_name", [_SIZE], ctypes.c_char_p),
)


@cache
def library() -> Library:
    """Raises MissingDependencyError where ik-llama-cpp-python is not installed."""
    try:
        from ik_llama_cpp import _ctypes_api as api
    except (ImportError, OSError) as error:
        raise MissingDependencyError(
            f"the runtime ik needs ik-llama-cpp-python: {error}",
            remedy='Run: pip install "edge-spec[ik]".',
        ) from error
    bound: Any = api
    unbound = bound._lib
    for name, arguments, result in _UNBOUND:
        function = getattr(unbound, name)
        function.argtypes, function.restype = arguments, result
    log = LibraryLog(NAME)
    unbound.llama_log_set(log.callback, None)

    return Library(
        name=NAME,
        log=log,
        batch_type=bound.llama_batch,
        devices=lambda: _devices(unbound),
        takes_servers=False,
        system_info=unbound.llama_print_system_info,
        # Any other ends the process when the first token is scored.
        flash_kv_types=("f16", "q4_0", "q8_0"),
        plain_kv_types=("f16",),
        # Its flash attention has another kernel for a single row.
        cpu_ways=(Way("flash attention"), Way("no flash attention", flash_attention=False)),
        steady_rows=lambda context: None,
        load_model=partial(_load_model, bound),
        free_model=bound.llama_free_model,
        vocab_size=lambda model: int(
            bound.llama_vocab_n_tokens(bound.llama_model_get_vocab(model))
        ),
        hidden_size=bound.llama_model_n_embd,
        is_plain_decoder=lambda model: (
            not (unbound.llama_model_has_recurrent(model) or unbound.llama_model_has_encoder(model))
        ),
        is_hybrid=lambda model: False,
        # Its kernel for these types is wrong from 32 rows on where a matrix has a number of
        # columns that is no multiple of 128.
        max_batch_tokens=lambda types: 31 if types & {"Q4_1", "Q5_1"} else PREFILL_TOKENS,
        applies_rope_factors=False,  # reads rope_freqs.weight, but rotates without it
        checks_tokens=False,  # reads beyond its table
        vocabulary=bound.llama_model_get_vocab,
        tokenize=unbound.llama_vocab_tokenize,
        token_to_piece=unbound.llama_token_to_piece_vocab,
        token_text=unbound.llama_vocab_get_text,
        open_context=partial(_open_context, bound),
        free_context=bound.llama_free,
        kept_states=lambda context: 0,
        set_threads=unbound.llama_set_n_threads,
        decode=bound.llama_decode,
        synchronize=unbound.llama_synchronize,
        logits=unbound.llama_get_logits,
        hidden=None,
        want_hidden=None,
        memory=lambda context: context,
        sequence_remove=unbound.llama_kv_cache_seq_rm,
        sequence_copy=unbound.llama_kv_cache_seq_cp,
        sequence_keep=unbound.llama_kv_cache_seq_keep,
        sequence_start=unbound.llama_kv_cache_seq_pos_min,
        make_contiguous=partial(_make_contiguous, unbound),
        # Its flash attention gives other logits then, by far; without it they differ in last bits.
        shares_cells=False,
        state_size=unbound.llama_state_seq_get_size,
        state_read=unbound.llama_state_seq_get_data,
        state_write=unbound.llama_state_seq_set_data,
        state_form=SequenceForm(0, (0,)),
        state_window=lambda model: 0,
    )


def _make_contiguous(unbound: Any, context: int) -> None:
    unbound.llama_kv_cache_defrag(context)
    unbound.llama_kv_cache_update(context)


def _load_model(bound: Any, path: bytes, choices: ModelChoices) -> int | None:
    params = bound.llama_model_default_params()
    params.vocab_only = choices.vocabulary_only
    # Rearranging the weights for its kernels while loading needs memory of its own for them.
    params.use_mmap = choices.vocabulary_only or choices.mmap is True
    params.repack_tensors = not params.use_mmap
    names = ",".join(device.name for device in choices.devices)
    params.devices = names.encode()
    layers = _ALL_LAYERS if choices.gpu_layers is None else choices.gpu_layers
    params.n_gpu_layers = layers if choices.devices else 0
    handle: int | None = bound.llama_model_load_from_file(path, params)
    return handle


def _open_context(bound: Any, model: int, choices: ContextChoices) -> int | None:
    params = bound.llama_context_default_params()
    # A pass needs its cells side by side, so there have to be some to spare.
    params.n_ctx = choices.num_tokens + choices.max_rows
    params.n_batch, params.n_ubatch = PREFILL_TOKENS, choices.batch_tokens
    params.n_seq_max = choices.max_rows
    params.n_threads = params.n_threads_batch = choices.threads
    params.type_k, params.type_v, _ = KV_TYPES[choices.kv_type]
    params.flash_attn = choices.flash_attention
    params.offload_kqv = choices.on_device
    handle: int | None = bound.llama_init_from_model(model, params)
    return handle


def _devices(ggml: Any) -> list[LibraryDevice]:
    """Lists backends: this fork knows no devices, and says nothing of their memory."""
    names = [
        ggml.ggml_backend_reg_get_name(i).decode() for i in range(ggml.ggml_backend_reg_get_count())
    ]
    memory = free_bytes() or 0
    return [
        LibraryDevice(name, name, name == "CPU", memory if name == "CPU" else 0, 0)
        for name in names
    ]
