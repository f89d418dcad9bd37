"""Tiny models on disk, written once a session. See tests/fixtures/tiny_models.py."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.bundle import Bundle, open_bundle
from edge_spec.errors import EdgeSpecError, ModelFileError, UnsupportedModelError
from edge_spec.exporters.checkpoint import Checkpoint, open_checkpoint
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.model import ExportOptions, Session
from edge_spec.tree import TokenTree

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module that builds tiny models; --import-mode=importlib cannot import it by name."""
    spec = spec_from_file_location("tiny_models", FIXTURES / "tiny_models.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["tiny_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hf(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """hf(variant, kind="F32", num_shards=1): a Hugging Face directory."""

    @cache
    def write(variant: str = "llama", kind: str = "F32", num_shards: int = 1) -> Path:
        directory = tmp_path_factory.mktemp("hf") / variant
        return Path(tiny.write_hf(tiny.build(variant), directory, kind, num_shards))

    return write


@pytest.fixture(scope="session")
def gguf(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """gguf(variant, kind="F32"): a GGUF file of the same weights."""

    @cache
    def write(variant: str = "llama", kind: str = "F32") -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"{variant}-{kind}.gguf"
        return Path(tiny.write_gguf(tiny.build(variant), path, kind))

    return write


@pytest.fixture(scope="session")
def checkpoint(hf: Callable[..., Path]) -> Callable[..., Checkpoint]:
    return cache(lambda variant="llama": open_checkpoint(hf(variant)))


@pytest.fixture(scope="session")
def exported(
    checkpoint: Callable[..., Checkpoint], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bundle]:
    """exported(variant, quantization, block_size): a bundle that its own check has passed."""

    @cache
    def export(variant: str = "llama", quantization: str = "fp32", block_size: int = 32) -> Bundle:
        out = tmp_path_factory.mktemp("bundle") / variant
        options = ExportOptions(quantization, block_size, check=True)
        OnnxExporter().export(checkpoint(variant), out, options, lambda what, fraction: None)
        return open_bundle(out)

    return export


@pytest.fixture(scope="session")
def tokens() -> Callable[..., list[int]]:
    """tokens(count, seed=0): token ids of the tiny vocabulary, the same in every run."""
    return lambda count, seed=0: np.random.RandomState(seed).randint(0, 262, count).tolist()


@pytest.fixture(scope="session")
def scores() -> Callable[[Session, list[int]], np.ndarray]:
    """scores(session, tokens): logits [tokens, vocab] of the tokens as one chain, uncommitted."""

    def score(session: Session, chain: list[int]) -> np.ndarray:
        return session.forward(TokenTree.chain(chain[0], chain[1:])).logits.copy()

    return score


@pytest.fixture(scope="session")
def random_tree(tokens: Callable[..., list[int]]) -> Callable[..., TokenTree]:
    """random_tree(rows, seed): branches at random, so that paths are not contiguous."""

    def grow(rows: int, seed: int = 0) -> TokenTree:
        random: Any = np.random.RandomState(seed)
        parents = [-1, *(random.randint(0, row) for row in range(1, rows))]
        ones = np.ones(rows, np.float32)
        return TokenTree(np.array(tokens(rows, seed), np.int32), np.array(parents, np.int32), ones)

    return grow


@pytest.fixture(scope="session")
def read() -> Callable[[Path], None]:
    """read(path): everything of a model that an export reads."""

    def read_all(path: Path) -> None:
        checkpoint = open_checkpoint(path)
        with np.errstate(all="ignore"):  # damaged weights may be infinite
            for name in checkpoint.names():
                checkpoint.float32(name)
        checkpoint.tokenizer_json()

    return read_all


@pytest.fixture(scope="session")
def refusal(read: Callable[[Path], None]) -> Callable[..., EdgeSpecError]:
    """refusal(path, file): the error of a bad model, one line that names `file`, with a remedy."""

    def refused(path: Path, file: str = "") -> EdgeSpecError:
        with pytest.raises((ModelFileError, UnsupportedModelError)) as caught:
            read(path)
        text = str(caught.value)
        assert (file or path.name) in text
        assert caught.value.remedy
        assert text.endswith(caught.value.remedy)
        assert "\n" not in text
        assert len(text) < 500
        return caught.value

    return refused


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """1 GiB more than now: believing a count in a damaged file ends in MemoryError."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
