"""What computes a head's steps: how near it is to float32, and what is kept of it."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.heads import (
    FLOAT_BITS,
    WEIGHTS_FILE,
    ComputesHeads,
    HeadMatrix,
    MedusaHead,
    StoredStep,
)
from edge_spec.drafters.heads.drafting import rows_of
from edge_spec.drafters.heads.independent import MedusaNetwork
from edge_spec.errors import MissingDependencyError, ModelFileError
from edge_spec.loader.head import StoredBackend, head_backend
from edge_spec.models import runtimes
from edge_spec.models.kept import ENTRY
from edge_spec.storage.atomic import CACHE_VARIABLE

OUT, IN, COUNT = 96, 64, 3
FILES = ("step.onnx", WEIGHTS_FILE, ENTRY)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "heads"


@pytest.fixture
def head(tmp_path: Path) -> Path:
    directory = tmp_path / "head"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def medusa(path: Path, num_blocks: int = 1, shared: bool = False) -> MedusaHead:
    """Random heads; some have an output matrix each, read in two parts."""
    random = np.random.default_rng(0)

    def output() -> HeadMatrix:
        parts = [random.standard_normal((OUT // 2, IN), np.float32) for _ in range(2)]
        return HeadMatrix(tuple(partial(np.asarray, part) for part in parts), is_output=True)

    def block() -> tuple[np.ndarray, np.ndarray]:
        weight = random.standard_normal((IN, IN), np.float32) * np.float32(0.2)
        return weight, random.standard_normal(IN).astype(np.float32)

    blocks = tuple(tuple(block() for _ in range(num_blocks)) for _ in range(COUNT))
    outputs = tuple(output() for _ in range(1 if shared else COUNT))
    ids = np.arange(OUT) * 2 if shared else None
    return MedusaHead(path, IN, 2 * OUT if shared else OUT, COUNT, blocks, outputs, ids)


def formula(head: MedusaHead, state: np.ndarray, index: int) -> np.ndarray:
    """The scores of one head: W (z + SiLU(A z + b)), block after block."""
    for weight, bias in head.blocks[index]:
        inner = weight @ state + bias
        state = state + inner / (1 + np.exp(-inner))
    output = head.outputs[0 if len(head.outputs) == 1 else index]
    return np.concatenate([read() for read in output.parts]) @ state


@pytest.fixture
def state() -> np.ndarray:
    return np.random.default_rng(1).standard_normal(IN).astype(np.float32)


def runtime() -> ComputesHeads:
    found = runtimes.load_runtime("ort")
    assert isinstance(found, ComputesHeads)
    return found


@pytest.mark.parametrize("asked", [[0, 1, 2], [1], [0, 2]])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_medusa_heads_are_scored_as_by_their_formula(
    num_blocks: int, shared: bool, asked: list[int], head: Path, state: np.ndarray
) -> None:
    """1e-4 of scores around 10: float32 of sums of IN terms in another order."""
    described = medusa(head, num_blocks, shared)
    expected = np.stack([formula(described, state, index) for index in asked])
    network = MedusaNetwork(described, StoredBackend(runtime(), FLOAT_BITS))
    found = network.step(state, asked)
    np.testing.assert_allclose(found.logits, expected, atol=1e-4)
    likeliest = np.argsort(-expected, axis=1)[:, :4]
    np.testing.assert_array_equal(found.likeliest, likeliest)
    shares = np.exp(expected) / np.exp(expected).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        found.shares, np.take_along_axis(shares, likeliest, axis=1), rtol=1e-3
    )
    assert found.likeliest.shape == (len(asked), 4)
    if shared:
        ranked = [each for row in rows_of(found, network.token_ids) for each in row.ranked()]
        assert not any(token % 2 for token, _ in ranked)  # ids of the target


def test_the_likeliest_tokens_are_scored_again_by_8_bits(head: Path, state: np.ndarray) -> None:
    """Scores of about 8, of which sums of IN weights in 4 bits miss about 0.7, in 8 bits 0.05."""
    nothing = np.zeros((IN, IN), np.float32), np.zeros(IN, np.float32)
    described = replace(medusa(head), blocks=((nothing,),) * COUNT)
    expected = formula(described, state, 0)
    found = MedusaNetwork(described, StoredBackend(runtime(), 4)).step(state, [0]).logits[0]
    likeliest, errors = np.argsort(-found)[:8], np.abs(found - expected)
    assert errors[likeliest].max() < 0.25 < np.delete(errors, likeliest).max()


def test_what_was_made_once_is_read_from_the_cache(
    cache: Path, head: Path, state: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = medusa(head)

    def opened(target: str = "target") -> np.ndarray:
        return MedusaNetwork(described, head_backend(head, target, 64)).step(state, [0, 1]).logits

    first = opened()
    unkept = MedusaNetwork(described, head_backend(head, "target", 64, keeps=False))
    np.testing.assert_array_equal(unkept.step(state, [0, 1]).logits, first)

    def fail(*_: object) -> bytes:
        raise AssertionError("made again")

    monkeypatch.setattr(runtimes, "step_graph", fail)
    np.testing.assert_array_equal(opened(), first)
    with pytest.raises(AssertionError, match="made again"):  # tables of another target
        opened("other")
    (head / "config.json").write_text('{"changed": 1}')
    with pytest.raises(AssertionError, match="made again"):
        opened()
    (kept,) = (each for each in cache.iterdir() if each.is_dir())
    assert sorted(each.name for each in kept.iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["changed", "cut", "empty", "missing"])
def test_a_damaged_one_is_made_again(
    name: str, damage: str, cache: Path, head: Path, state: np.ndarray
) -> None:
    def opened() -> np.ndarray:
        network = MedusaNetwork(medusa(head), head_backend(head, "target", 64))
        return network.step(state, [2]).logits

    first = opened()
    (file,) = cache.glob(f"*/{name}")
    whole = file.read_bytes()
    at = len(whole) // 2
    if damage == "missing":
        file.unlink()
    else:
        damaged = {
            "changed": whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :],
            "cut": whole[:at],
            "empty": b"",
        }
        file.write_bytes(damaged[damage])
    np.testing.assert_array_equal(opened(), first)
    assert file.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_only_time(
    cache: Path, head: Path, state: np.ndarray, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text("no directory")
    network = MedusaNetwork(medusa(head), head_backend(head, "target", 64))
    found = network.step(state, [0]).logits
    assert found.shape == (1, OUT)
    assert "not kept" in caplog.text


def test_without_onnxruntime_one_line_says_what_to_install(
    head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingDependencyError) as caught:
        head_backend(head, "target", 64)
    assert ".[cpu]" in caught.value.remedy


def test_what_is_no_graph_is_refused_in_one_line(head: Path) -> None:
    with pytest.raises(ModelFileError, match="cannot load Medusa heads") as caught:
        runtime().open_head(StoredStep(b"nothing", b""), medusa(head), None)
    assert caught.value.remedy == "Update onnxruntime."
