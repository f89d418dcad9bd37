"""Our kernels for few rows in the place of onnxruntime's products of integers, on the CPU.

Whatever stands in the way leaves onnxruntime as it is, and one line says what.
"""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock
from typing import Any

from edge_spec.runtimes.llamacpp.rows import install, library

_log = logging.getLogger(__name__)


def wanted() -> str:
    """Names the kernels that bundles get here, and their own build; "" for none. Raises UsageError
    as `refusal` does."""
    return library.build_name() if refusal() is None else ""


def refusal() -> str | None:
    """Why bundles get none here; None where they do. Raises UsageError for a variable of the
    environment that names what is not."""
    try:
        return install.refusal()
    except (OSError, AttributeError) as error:
        return " ".join(str(error).split())


def description() -> str:
    """One line for `devices` and `doctor`."""
    reason = refusal()
    return f"rows: {library.table()}" if reason is None else f"rows: off, {reason}"


class OwnProducts:
    """Changes the graphs of one bundle, or of one head, before they are loaded: all of them or
    none, since rows of the two kinds differ. reason: why none."""

    def __init__(self, reason: str | None) -> None:
        self._reason = reason
        self._lock = Lock()  # segments load at the same time
        self._num_replaced = self._num_left = 0
        self._is_settled = False  # a graph has been loaded

    @property
    def description(self) -> str:
        """One line for stats."""
        if self._reason is not None:
            return f"rows: off, {self._reason}"
        if not self._num_replaced:
            return "rows: off, there are no kernels for its types"
        left = f", not {self._num_left}" if self._num_left else ""
        return f"rows: {library.table()}, {self._num_replaced} matrices{left}"

    def changed(self, graph: Path | bytes, folder: Path | None, threads: int) -> bytes | None:
        """The graph with our operator, None where it stays as it is. folder: as `rows_graph` has
        it. Counts those of files, which others are made of."""
        if self._reason is not None:
            return None
        from edge_spec.runtimes.ort.rows_graph import rows_graph

        made = rows_graph(graph, folder, threads)
        if isinstance(graph, Path):
            with self._lock:
                self._num_replaced += made.num_replaced
                self._num_left += made.num_left
        return made.model if made.num_replaced else None

    def register(self, options: Any) -> None:
        """Makes the operator known to a session. Raises what onnxruntime does."""
        library.library()  # which keeps it loaded once no session has it
        options.register_custom_ops_library(str(library.path()))

    def loaded(self) -> None:
        self._is_settled = True

    def refuse(self, error: Exception) -> bool:
        """Whether graphs stay as they are from now on; not where others have been changed."""
        with self._lock:
            if self._is_settled:
                return False
            self._reason = " ".join(str(error).split())
            _log.info("onnxruntime computes by itself: %s", self._reason)
            return True
