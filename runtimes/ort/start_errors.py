"""Why a provider does not start, found in what onnxruntime prints or raises.

The patterns stand for messages of onnxruntime 1.31.1 (cuda_call.cc, provider_bridge_ort.cc), of the
dynamic linkers of Linux and Windows, and of CUDA's cudaGetErrorString.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from edge_spec.errors import DeviceError, DeviceMemoryError
from edge_spec.runtimes.ort.cuda_driver import NO_DEVICE, NO_DRIVER, OLD_DRIVER

_MAX_WORDS = 200  # characters of the library's own


class Cause(NamedTuple):
    """Says what is wrong, what can be done about it, and how the library says it."""

    cause: str
    remedy: str
    words: str

    def __str__(self) -> str:
        return f"{self.cause} ({self.words}). {self.remedy}"


_INSTALL = 'Run: pip install "edge-spec[gpu]", which brings them from NVIDIA\'s packages.'
_NO_MEMORY = (
    "the device has too little free memory",
    "Close what else uses it, or choose a smaller --context, model or another --device.",
)


def _missing(library: str) -> str:
    """Returns a pattern of linkers' messages that a library is missing or of another version."""
    return (
        rf"(lib{library}[\w.-]*\.so[.\d]*: [^\n]*|undefined symbol: \w+, version lib{library}[^\n]*"
        rf'|depends on "{library}[^"]*" which is missing)'
    )


def _failed(*codes: int) -> str:
    """Returns how cuda_call.cc begins; the rest of its line is a place in the source."""
    return rf"CUDA failure ({'|'.join(map(str, codes))}): [^;\n]*"


_LIBRARIES = ("cudnn", "cublas", "cudart", "curand", "cufft", "nvrtc", "nvJitLink")
# The first that matches; each failure is followed by onnxruntime's general one, which is the last.
_KNOWN: tuple[tuple[str, tuple[str, str]], ...] = (
    (rf"{_failed(35, 803)}|[^\n:;]*driver version is insufficient[^;\n]*", OLD_DRIVER),
    (_failed(100), NO_DEVICE),
    (
        rf"{_failed(101)}|Invalid device id\.[^\n;]*",
        ("it has no device of this number", "edge-spec devices lists those there are."),
    ),
    (
        _failed(209, 222, 98),
        (
            "this onnxruntime has no kernels for the device",
            "Use llama.cpp (--runtime llamacpp) built for it, or another onnxruntime-gpu.",
        ),
    ),
    (
        rf"{_failed(2)}|Failed to allocate memory[^\n;]*|cudaErrorMemoryAllocation[^\n;]*",
        _NO_MEMORY,
    ),
    (f"{_missing('cuda(?!rt)')}|{_missing('nvcuda')}", NO_DRIVER),
    (
        "|".join(map(_missing, _LIBRARIES))
        + r"|CUDNN failure[^;\n]*|CUDNN_STATUS_[^;\n]*"
        + r"|LoadLibrary failed with error 126|Require cuDNN [^\n(]*",
        ("CUDA's or cuDNN's libraries are missing, or of another version", _INSTALL),
    ),
)


def find_cause(text: str) -> Cause | None:
    """Returns the cause that is known by its words; None for any other text."""
    for pattern, (cause, remedy) in _KNOWN:
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            words = " ".join(match[0].split()).rstrip(" .")
            return Cause(cause, remedy, words[:_MAX_WORDS])
    return None


def start_error(names: Sequence[str], text: str) -> DeviceError | None:
    """Returns the error of a session on these devices; None where its cause is not known."""
    found = find_cause(text)
    if found is None:
        return None
    kind = DeviceMemoryError if (found.cause, found.remedy) == _NO_MEMORY else DeviceError
    return kind(
        f"onnxruntime cannot start {', '.join(names)}: {found.cause} ({found.words})",
        remedy=found.remedy,
    )
