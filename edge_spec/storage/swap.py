"""Two directories change places in one step, where the system can."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux: renameat2(2)
_RENAME_SWAP = 2  # macOS: renamex_np(2)


def swapped(first: Path, second: Path) -> bool:
    """Says whether they have changed places; False if this system or file system cannot do it."""
    try:
        library = ctypes.CDLL(None)
        if sys.platform == "linux":
            status = library.renameat2(
                _AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE
            )
        elif sys.platform == "darwin":
            status = library.renamex_np(os.fsencode(first), os.fsencode(second), _RENAME_SWAP)
        else:
            return False
    except (AttributeError, OSError, TypeError):  # no such function; Windows has no CDLL(None)
        return False
    return bool(status == 0)
