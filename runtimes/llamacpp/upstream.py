"""llama.cpp through llama-cpp-python (tested with 0.3.36)."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from os import environ
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np

from edge_spec.errors import EdgeSpecError, MissingDependencyError, install
from edge_spec.runtimes.llamacpp.library import Library

# A thread's spins at a barrier before it sleeps, about 0.1 ms. GNU's OpenMP spins 300,000 times,
# taking the processor from the thread it waits for. With 4,000, a step of a 1.5B beside a busy
# process took 36 ms instead of 49, and as long as before without one (2 cores of a Zen 5;
# benchmarks/results/engines.json).
_SPINS = "4000"
_opening = Lock()  # two threads may open the library at once
# In our wheels: llama-cpp-python for AVX2, last in Python's path.
_BUNDLED = Path(__file__).with_name("bundled")


def load_ahead() -> None:
    """Load the library in a thread: testing its kernels takes a while. Raises
    MissingDependencyError."""
    _imported()

    def load() -> None:
        with suppress(EdgeSpecError):  # raised again when it is used
            _ = library().rows

    Thread(target=load, name="edge-spec-library", daemon=True).start()


def _imported() -> tuple[Any, Any]:
    """Import llama.cpp and ggml. Raises MissingDependencyError if llama-cpp-python is missing or
    not for this processor."""
    _check_processor()
    try:
        with _short_spins():
            import llama_cpp
            from llama_cpp._ggml import libggml
    except ImportError as error:
        raise MissingDependencyError(
            f"the runtime llamacpp needs llama-cpp-python: {error}",
            remedy=f"{install('llamacpp')} (it is compiled, which needs a C++ "
            "compiler and takes minutes; wheels of a release have it inside).",
        ) from error
    return llama_cpp, libggml


def library() -> Library:
    """Raises MissingDependencyError without llama-cpp-python, DeviceError for a backend that does
    not load."""
    with _opening:
        return _open()


@cache
def _open() -> Library:
    return Library(*_imported())


@contextmanager
def _short_spins() -> Iterator[None]:
    """Shorten the spinning of an OpenMP loaded meanwhile, unless the user chose a wait policy.
    OpenMP reads the environment once; child processes get it restored."""
    is_left = environ.keys().isdisjoint(("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))
    if is_left:
        environ["GOMP_SPINCOUNT"] = _SPINS
    try:
        yield
    finally:
        if is_left:
            del environ["GOMP_SPINCOUNT"]


def _check_processor() -> None:
    """Refuse a bundled library that would crash this processor. Raises MissingDependencyError."""
    found = find_spec("llama_cpp")
    if found is None or found.origin is None or _BUNDLED not in Path(found.origin).parents:
        return
    if platform.machine().lower() in ("x86_64", "amd64") and not _has_avx2():
        raise MissingDependencyError(
            "the llama.cpp inside edge-spec's wheel needs a processor with AVX2",
            remedy="Run: pip install --force-reinstall --no-deps llama-cpp-python (it is compiled "
            "for this one, which needs a C++ compiler and takes minutes).",
        )


def _has_avx2() -> bool:
    """numpy reports AVX2 alone or as part of a level."""
    found: Mapping[str, Any] = np.show_config(mode="dicts").get("SIMD Extensions", {})
    names = {*found.get("baseline", ()), *found.get("found", ())}
    return not names.isdisjoint(("AVX2", "X86_V3"))
