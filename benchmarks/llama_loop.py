"""A model on llama.cpp without anything of ours around it, for benchmarks of kernels: tokens in,
logits out. A model is opened either with our kernels or with the library's own, and both may be
open in one process, so that they can be measured in turns."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.runtimes.llamacpp import upstream
from edge_spec.runtimes.llamacpp.rows.install import loading

_HEAP_FIELDS = ("RssAnon", "RssFile", "VmHWM")


class LlamaLoop:
    """ours: with our kernels; else with those of the library."""

    def __init__(
        self, path: str, ours: bool, threads: int, num_tokens: int, batch_tokens: int = 512
    ) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self.ours = ours
        self._rows = upstream.library().rows
        start = time.perf_counter()
        self._model = self._load(path)
        self._context = self._open(threads, num_tokens, batch_tokens)
        self.load_s = time.perf_counter() - start
        self._memory = self._api.llama_get_memory(self._context)
        self._vocabulary = self._api.llama_model_get_vocab(self._model)
        self.vocab_size = int(self._api.llama_vocab_n_tokens(self._vocabulary))
        self._batch = self._api.llama_batch_init(num_tokens, 0, 1)
        self.length = 0

    def _load(self, path: str) -> Any:
        rows = self._rows
        params = self._api.llama_model_default_params()
        params.n_gpu_layers = 0
        with loading(rows, wants_stock=not self.ours) as load:
            model = self._api.llama_model_load_from_file(path.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp does not load {path}")
        if self.ours and not load.num_packed:
            raise SystemExit(f"nothing of {path} has our kernels: {rows.description}")
        self.left = load.left
        return model

    def _open(self, threads: int, num_tokens: int, batch_tokens: int) -> Any:
        params = self._api.llama_context_default_params()
        params.n_ctx = params.n_batch = num_tokens
        params.n_ubatch = batch_tokens
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 1
        params.offload_kqv = params.op_offload = False
        context = self._api.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit("llama.cpp opens no context")
        return context

    def tokens_of(self, text: str) -> list[int]:
        """Returns none for a model without a vocabulary."""
        if self._api.llama_vocab_type(self._vocabulary) == 0:
            return []
        raw = text.encode()
        found = (ctypes.c_int32 * (len(raw) + 8))()
        size = len(found)
        num = self._api.llama_tokenize(self._vocabulary, raw, len(raw), found, size, True, True)
        return list(found[:num])

    def forward(self, tokens: Sequence[int], all_rows: bool = True) -> float:
        """Appends tokens in one pass; returns its seconds. all_rows: else the last one's logits."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, self.length + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = all_rows or i == len(tokens) - 1
        start = time.perf_counter()
        status = self._api.llama_decode(self._context, batch)
        self._api.llama_synchronize(self._context)
        seconds = time.perf_counter() - start
        if status:
            raise SystemExit(f"llama.cpp ends a pass of {len(tokens)} rows with status {status}")
        self.length += len(tokens)
        return seconds

    def logits(self, num_rows: int) -> np.ndarray:
        """Returns those of the last pass's first `num_rows` rows that were asked for; a copy."""
        first = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(first, (num_rows, self.vocab_size)).copy()

    def truncate(self, length: int) -> None:
        self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.length = length

    def set_threads(self, threads: int) -> None:
        self._api.llama_set_n_threads(self._context, threads, threads)

    def close(self) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def resident_mb() -> dict[str, float]:
    """Returns what /proc says of this process: heap, mapped files, and the peak of both."""
    lines = map(str.split, Path("/proc/self/status").read_text("utf-8").splitlines())
    return {
        fields[0][:-1]: int(fields[1]) * 1024 / 1e6
        for fields in lines
        if fields and fields[0][:-1] in _HEAP_FIELDS
    }
