"""Replays the corpus of each target, then mutations of it, within bounds of memory and time.

python replay.py MUTATIONS NAME..; a line of JSON for each target, and on stderr what is tried, so
that what ends the process is known. Needs no fuzzer.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import targets
from stored import CORPUS

MAX_BYTES = 1 << 30  # of address space more than at the start
MAX_S = 10.0  # of processor time for an input
MAX_MUTATED_BYTES = 16_384
_TOKENS = (b"0", b"-1", b"1e999", b"null", b"[]", b"{}", b'"', b"[" * 2000, b"\xff", b"\0" * 8)
_NUMBERS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


def mutated(data: bytes, other: bytes, draw: random.Random) -> bytes:
    """Some bits, numbers, parts or tokens of `data` changed, or a part of `other` put in."""
    changed = bytearray(data[:MAX_MUTATED_BYTES])
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(changed))
        end = min(len(changed), at + draw.randint(0, 16))
        kind = draw.randint(0, 4)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randint(0, 7)
        elif kind == 1:
            width = draw.choice((4, 8))
            number = draw.choice(_NUMBERS) % 2 ** (8 * width)
            changed[at : at + width] = number.to_bytes(width, "little")
        elif kind == 2:
            changed[at:end] = draw.choice(_TOKENS)
        elif kind == 3:
            begin = draw.randint(0, len(other))
            changed[at:end] = other[begin : begin + draw.randint(0, 64)]
        else:
            del changed[at:end]
    return bytes(changed)


def inputs(name: str, num_mutations: int) -> Iterator[tuple[str, bytes]]:
    files = sorted((CORPUS / name).iterdir())
    contents = [file.read_bytes() for file in files]
    yield from zip((file.name for file in files), contents, strict=True)
    draw = random.Random(name)
    for number in range(num_mutations):
        data = mutated(draw.choice(contents), draw.choice(contents), draw)
        yield f"mutation {number}", data


def main(num_mutations: int, names: Sequence[str]) -> None:
    _bound_memory()
    for name in names:
        found, count = "", 0
        for label, data in inputs(name, num_mutations):
            print(f"{name}: {label}", file=sys.stderr)
            try:
                with _bounded_time():
                    targets.attempt(targets.TARGETS[name], data)
            except BaseException:  # a panic in Rust is no Exception
                found += f"{label}: {traceback.format_exc()[-1500:]}\n"
            count += 1
        print(json.dumps({"name": name, "inputs": count, "found": found}))


@contextmanager
def _bounded_time() -> Iterator[None]:
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.signal(signal.SIGVTALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"more than {MAX_S} s of processor time")


def _bound_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        used = int(statm.read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, used + MAX_BYTES))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
