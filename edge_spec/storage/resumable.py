"""Steps of a file that only grows: to be deleted once distill has its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

KEPT_DAYS = 7
_PIECE_BYTES = 1 << 22


class StepFile:
    """A file that only grows, and a log of the steps in which it does.

    A line of the log holds a seal and, as JSON, where a step ends in the file and what its writer
    has to know of it. The seal is the SHA-256 of the one before, of the file up to there and of the
    JSON: a step that is damaged, or was not written to its end, does not count, nor do those after
    it, and the file is cut there. One pass for all seals is as fast as to read the file.

    check: called before a step is logged, and may raise.
    """

    def __init__(self, path: Path, log: Path, check: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.steps: list[Any] = []  # that were found finished
        self.end = 0  # bytes
        self._check = check
        self._digest = hashlib.sha256()
        self._seal = ""
        path.touch()
        log.touch()
        self._read(log)
        self._file = path.open("r+b")
        self._file.truncate(self.end)
        self._file.seek(self.end)
        self._log = log.open("ab")

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.end += memoryview(data).nbytes

    def finish(self, step: Any) -> None:
        """step: what JSON can hold; see `steps`."""
        self._check()
        self._file.flush()
        body = json.dumps([self.end, step]).encode()
        self._seal = self._sealed(body)
        self._log.write(f"{self._seal} ".encode() + body + b"\n")
        self._log.flush()

    def sha256(self) -> str:
        """Returns the digest of all that was written."""
        return self._digest.hexdigest()

    def __enter__(self) -> StepFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()
        self._file.close()

    def _sealed(self, body: bytes) -> str:
        parts = self._seal.encode(), self._digest.digest(), body
        return hashlib.sha256(b"".join(parts)).hexdigest()

    def _read(self, log: Path) -> None:
        """Takes up the steps that are whole, and cuts the log after them."""
        size = self.path.stat().st_size
        num_good = 0
        with self.path.open("rb") as file, log.open("rb") as lines:
            for line in lines:
                seal, _, body = line.partition(b" ")
                end, step = _parsed(body)
                if not self.end <= end <= size:
                    break
                before = self._digest.copy()
                self._pass(file, end - self.end)
                sealed = self._sealed(body[:-1]).encode()
                if not line.endswith(b"\n") or seal != sealed:
                    self._digest = before
                    break
                self._seal, self.end = seal.decode(), end
                self.steps.append(step)
                num_good += len(line)
        os.truncate(log, num_good)

    def _pass(self, file: Any, num_bytes: int) -> None:
        while num_bytes > 0:
            piece = file.read(min(num_bytes, _PIECE_BYTES))
            if not piece:  # it is shorter by now
                return
            self._digest.update(piece)
            num_bytes -= len(piece)


def _parsed(body: bytes) -> tuple[int, Any]:
    """Returns where a step ends, -1 for a line that is none, and what was noted of it."""
    with suppress(ValueError):
        found = json.loads(body)
        if isinstance(found, list) and len(found) == 2 and isinstance(found[0], int):
            return found[0], found[1]
    return -1, None
