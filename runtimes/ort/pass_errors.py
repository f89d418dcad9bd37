"""Says what a pass in onnxruntime failed with."""

from __future__ import annotations

import re

from edge_spec.errors import DeviceMemoryError, EdgeSpecError, SessionError

# As onnxruntime's arena, the C++ library, and CUDA say it.
_OUT_OF_MEMORY = re.compile(r"failed to allocate|bad_?alloc|out of memory", re.IGNORECASE)


def pass_error(error: Exception, rows: int, start: int) -> EdgeSpecError:
    """Returns the error of a pass over `rows` rows after `start` tokens that failed."""
    what = f"onnxruntime failed on {rows} rows at {start} tokens: {error}"
    if _OUT_OF_MEMORY.search(str(error)):
        remedy = "Give a shorter --context, or another --device."
        return DeviceMemoryError(what, remedy=remedy)
    remedy = "Try fewer rows (--draft-n-max) or another --device."
    return SessionError(what, remedy=remedy)
