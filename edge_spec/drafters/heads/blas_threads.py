"""numpy's threads beside those of a runtime: they would wait for each other's cores."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any


def one_blas_thread() -> AbstractContextManager[Any]:
    """Inside, products of numpy are computed by the thread that asks for them. What they are
    elsewhere comes back at the end; it takes some microseconds."""
    limited: AbstractContextManager[Any] = _controller().limit(limits=1, user_api="blas")
    return limited


@cache
def _controller() -> Any:
    """Made once: it looks through all libraries that are loaded."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
