"""Runs llama.cpp's quantizer once: python llama_quantize.py SOURCE TARGET FILE_TYPE [OUTPUTS].

OUTPUTS: the type of the output matrix.

A program rather than a module: see kquants.quantize. What the library says goes to stdout.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any


def main(source: str, target: str, file_type: str, outputs: str = "") -> int:
    import llama_cpp

    api: Any = llama_cpp

    @api.llama_log_callback  # type: ignore[untyped-decorator]
    def forward(level: int, text: bytes | None, data: Any) -> None:
        sys.stdout.buffer.write(text or b"")
        sys.stdout.buffer.flush()

    api.llama_log_set(forward, None)
    params = api.llama_model_quantize_default_params()
    params.ftype = int(file_type)
    params.allow_requantize = True
    if outputs:
        params.output_tensor_type = int(outputs)
    status: int = api.llama_model_quantize(
        os.fsencode(source), os.fsencode(target), ctypes.byref(params)
    )
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
