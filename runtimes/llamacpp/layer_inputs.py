"""Residual streams that enter layers, as llama.cpp gives them to its own trained drafters.

`llama-ext.h` declares these functions, which no wheel promises to keep: their C++ names are looked
up when they are first wanted, and where one is missing, or for an architecture whose graph does not
set the streams aside, the model is refused. A build would abort the process for such an
architecture, so that only those are asked which are known.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Of llama-cpp-python 0.3.36, as far as they are tried: others with the hook are qwen3moe,
# qwen3next, gemma4, gpt-oss, nemotron_h, mimo2 and minimax-m2. "mistral" is "llama" in GGUF.
ARCHITECTURES = frozenset({"llama", "mistral", "qwen3", "qwen35", "lfm2", "lfm2moe"})
_SWITCH = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_READ = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
_HANDLE = ctypes.c_void_p


@dataclass(frozen=True)
class LayerInputs:
    """want: context, layer, whether the next passes keep its stream. address: context, layer -> of
    [tokens of the last pass, hidden_size] float32, None where there is none."""

    want: Callable[[int, int, bool], None]
    address: Callable[[int, int], int | None]


def layer_inputs(llama: Any) -> LayerInputs | None:
    """llama: the library as ctypes has loaded it. None where the build has no such functions, or
    has other names for them."""
    try:
        switch, read = llama[_SWITCH], llama[_READ]
    except AttributeError:
        return None
    switch.argtypes, switch.restype = [_HANDLE, ctypes.c_uint32, ctypes.c_bool], None
    read.argtypes, read.restype = [_HANDLE, ctypes.c_uint32], _HANDLE
    return LayerInputs(switch, read)
