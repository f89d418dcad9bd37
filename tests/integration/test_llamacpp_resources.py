"""What a llama.cpp session holds outside Python: memory, handles, files and the terminal."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import EdgeSpecError, SessionError, UsageError
from edge_spec.loader import load_engine
from edge_spec.models import devices as memory
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel, cache

Files = Callable[..., Path]
Tokens = Callable[..., list[int]]
OpenLlama = Callable[..., LlamaCppModel]


def library_of(runtime: str) -> Any:
    return runtimes.load_runtime(runtime)._library()  # type: ignore[attr-defined]


class Recorded:
    """A library that counts what is opened and freed, by handle."""

    def __init__(self, runtime: str) -> None:
        self.opened: Counter[tuple[str, int]] = Counter()
        self.freed: Counter[tuple[str, int]] = Counter()
        self.order: list[str] = []
        library = library_of(runtime)
        self.library = library.replacing(
            load_model=self._opening("model", library.load_model),
            open_context=self._opening("context", library.open_context),
            llama_model_free=self._freeing("model", library.llama_model_free),
            llama_free=self._freeing("context", library.llama_free),
        )

    def _opening(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            handle = function(*arguments)
            if handle is not None:
                self.opened[kind, handle] += 1
            return handle

        return call

    def _freeing(self, kind: str, function: Callable[[int], None]) -> Callable[[int], None]:
        def call(handle: int) -> None:
            self.freed[kind, handle] += 1
            self.order.append(kind)
            function(handle)

        return call

    def assert_all_freed_once(self) -> None:
        gc.collect()
        assert self.opened.total() >= 2
        assert self.freed == self.opened
        assert self.order[-1] == "model"  # contexts read it


@pytest.fixture
def recorded(llama: str, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded = Recorded(llama)
    runtime = type(runtimes.load_runtime(llama))
    monkeypatch.setattr(runtime, "_library", staticmethod(lambda: recorded.library))
    return recorded


@pytest.mark.parametrize("ends", ["s s m m", "m", "", "m m s s"])
def test_handles_are_freed_once(
    ends: str, llama: str, recorded: Recorded, gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    """`s` closes the session, `m` the model; what is not closed is collected."""
    model = open_llama(llama, gguf())
    one, other = model.open_session(), model.open_session()
    one.prefill(tokens(5))
    for end in ends.split():
        one.close() if end == "s" else model.close()
    del model, one, other
    recorded.assert_all_freed_once()


def test_handles_are_freed_once_after_a_growth(
    llama: str,
    recorded: Recorded,
    gguf: Files,
    open_llama: OpenLlama,
    tokens: Tokens,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "FIRST_TOKENS", 8)
    one = open_llama(llama, gguf()).open_session()
    for count in (8, 8, 40):
        one.prefill(tokens(count))
    one._weights.library = recorded.library.replacing(
        llama_state_seq_set_data_ext=lambda *arguments: 0
    )
    with pytest.raises(SessionError, match="could not move 56 tokens"):
        one.prefill(tokens(60))
    assert recorded.opened.total() == recorded.freed.total() + 2  # the model and the last cache
    one.close()
    del one
    recorded.assert_all_freed_once()


@pytest.mark.parametrize("draft", ["none", "same"])
def test_an_engine_that_fails_to_load_leaves_nothing_open(
    draft: str, llama: str, recorded: Recorded, gguf: Files
) -> None:
    path = str(gguf())
    options = LoadOptions(
        runtime=llama,
        draft=() if draft == "none" else (path,),
        draft_runtime=llama,
        draft_n_max=1000,
        threads=1,
    )
    with pytest.raises(UsageError, match="at most 63"):
        load_engine(path, options, lambda what, fraction: None)
    gc.collect()
    assert recorded.opened.total() > 0
    assert recorded.freed == recorded.opened


def test_a_closed_session_says_so_instead_of_reading_freed_memory(
    llama: str, gguf: Files, open_llama: OpenLlama, tokens: Tokens
) -> None:
    model = open_llama(llama, gguf())
    one, other = model.open_session(), model.open_session()
    one.prefill(tokens(5))
    one.close()
    model.close()
    for closed in (one, other):
        for call in (lambda s: s.prefill([1]), lambda s: s.forward(TokenTree.chain(1))):
            with pytest.raises(SessionError, match="closed"):
                call(closed)
        closed.rollback(0)


def damaged(path: Path, at: Path) -> Any:
    """What `open_published` returned before the file lost the last of its weights."""
    at.write_bytes(path.read_bytes())
    published = runtimes.open_model_info(at)
    at.write_bytes(path.read_bytes()[:-4000])
    return published


def test_nothing_is_written_to_the_terminal(
    llama: str,
    gguf: Files,
    open_llama: OpenLlama,
    tokens: Tokens,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = open_llama(llama, gguf())
    one = model.open_session()
    one.prefill(tokens(9))
    one.forward(TokenTree.chain(1, tokens(4)))
    one.close()
    model.close()
    with pytest.raises(EdgeSpecError) as caught:
        runtime = runtimes.load_runtime(llama)
        runtime.open(damaged(gguf(), tmp_path / "cut.gguf"), RuntimeOptions(threads=1))
    assert "cut.gguf" in str(caught.value) and "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_opening_and_closing_many_times_leaves_no_file_open(llama: str, gguf: Files) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("needs /proc")

    def cycle() -> None:
        options = LoadOptions(runtime=llama, draft=(str(gguf()),), draft_runtime=llama, threads=1)
        with load_engine(str(gguf()), options, lambda what, fraction: None) as engine:
            engine.generate("the", max_tokens=4)

    cycle()  # the library opens what it keeps
    gc.collect()
    before = len(list(folder.iterdir()))
    for _ in range(10):
        cycle()
    gc.collect()
    assert len(list(folder.iterdir())) == before


def resident_pages(library: ctypes.CDLL, blocks: list[int], size: int) -> int:
    """Counts the whole pages of these blocks that have memory behind them.

    The process's own count would tell what its other threads take meanwhile, too.
    """
    page = mmap.PAGESIZE
    count = 0
    for block in blocks:
        start = -(-block // page) * page
        pages = (block + size - start) // page
        present = (ctypes.c_ubyte * pages)()
        size_t = ctypes.c_size_t(pages * page)
        if library.mincore(ctypes.c_void_p(start), size_t, present) == 0:
            count += sum(flag & 1 for flag in present)
        else:  # the end of the heap, with the addresses themselves, was given back
            assert ctypes.get_errno() == errno.ENOMEM
    return count


@pytest.mark.skipif(memory._malloc_trim is None, reason="only glibc keeps what was freed")
def test_with_a_session_goes_what_malloc_has_kept(
    llama: str, gguf: Files, open_llama: OpenLlama
) -> None:
    """Forks with a draft left 100 MB an hour that nobody used."""
    library = ctypes.CDLL(None, use_errno=True)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
    one = open_llama(llama, gguf()).open_session()
    blocks, pins = [], []
    for _ in range(1000):
        blocks.append(library.malloc(100_000))  # too small for a mapping of its own
        ctypes.memset(blocks[-1], 1, 100_000)
        pins.append(library.malloc(4_000))  # keeps the block from the heap's end
    for block in blocks:
        library.free(block)
    before = resident_pages(library, blocks, 100_000)
    one.close()
    # What closing itself allocates may take a few of them again.
    assert resident_pages(library, blocks, 100_000) < before / 2
    for pin in pins:
        library.free(pin)
