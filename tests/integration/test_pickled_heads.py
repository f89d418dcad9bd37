"""Pickled weights of heads become safetensors with the same numbers, and nothing in a pickle is
run."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.cli.main import run
from edge_spec.core.heads import EagleHead
from edge_spec.distill.pickled import convert_pickled
from edge_spec.errors import EdgeSpecError, ModelFileError, UsageError
from edge_spec.exporters.heads import open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.exporters.safetensors_reader import INTEGERS, read_safetensors
from fixtures import heads

LAYERS, VOCAB = 7, 265
FORMS = ("safeailab", "eagle-1")


@pytest.fixture
def target(tiny: ModuleType, tmp_path: Path) -> Path:
    return Path(tiny.write_hf(tiny.build("llama", num_hidden_layers=LAYERS), tmp_path / "hf"))


@pytest.fixture
def pickled(tmp_path: Path) -> Callable[..., Path]:
    """pickled(form, change): a head whose weights PyTorch has stored. change: of the tensors."""
    torch = pytest.importorskip("torch")

    def write(form: str = "safeailab", change: Callable[[Any], Any] = dict) -> Path:
        head = heads.draw(LAYERS, VOCAB, form)
        path = head.write(tmp_path / "head")
        (path / "model.safetensors").unlink()
        tensors = {name: torch.from_numpy(each) for name, each in head.stored().items()}
        torch.save(change(tensors), path / "pytorch_model.bin")
        (path / "training_args.bin").write_bytes(pickle.dumps(Path("left by a training")))
        return path

    return write


class Runs:
    """Writes a file as soon as it is read from a pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self._path, "it ran")


@pytest.mark.parametrize("form", FORMS)
def test_tensors_are_the_same_numbers(
    form: str, pickled: Callable[..., Path], target: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run(["export", str(pickled(form)), str(out), "--format", "safetensors"]) == 0
    whole = heads.draw(LAYERS, VOCAB, form)
    assert [each.name for each in sorted(out.iterdir())] == ["config.json", "model.safetensors"]
    found = read_safetensors(out / "model.safetensors", INTEGERS)
    assert found.keys() == whole.stored().keys()
    for name, expected in whole.stored().items():
        if expected.dtype == np.float32:
            np.testing.assert_array_equal(found[name].float32(), expected)
    opened = open_head(out, open_checkpoint(target).config)
    assert isinstance(opened, EagleHead)
    ids = None if form == "eagle-1" else whole.ids  # of all tokens
    np.testing.assert_array_equal(opened.token_ids, ids)


def test_views_and_shared_memory_become_tensors_of_their_own(
    pickled: Callable[..., Path], tmp_path: Path
) -> None:
    def change(tensors: Any) -> Any:
        name = "midlayer.mlp.down_proj.weight"
        return tensors | {name: tensors[name].T.contiguous().T, "again": tensors[name].bfloat16()}

    convert_pickled(pickled(change=change), tmp_path / "out")
    found = read_safetensors(tmp_path / "out" / "model.safetensors", INTEGERS)
    expected = heads.draw(LAYERS, VOCAB, "safeailab").tensors["mlp.down_proj.weight"]
    np.testing.assert_array_equal(found["midlayer.mlp.down_proj.weight"].float32(), expected)
    np.testing.assert_allclose(found["again"].float32(), expected, rtol=2**-8)


def test_nothing_that_a_pickle_names_is_run(
    pickled: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran, out = tmp_path / "ran", tmp_path / "out"
    path = pickled(change=lambda tensors: tensors | {"hidden": Runs(ran)})
    assert run(["export", str(path), str(out), "--format", "safetensors"]) == 1
    error = capsys.readouterr().err
    assert "nothing of it was run" in error and error.count("\n") == 1
    assert "weights_only" not in error  # PyTorch advises to run it after all
    assert "GLOBAL" in error  # what it names is told
    assert not ran.exists() and not out.exists()


def test_nor_of_a_pickle_without_pytorchs_archive(
    pickled: Callable[..., Path], tmp_path: Path
) -> None:
    path, ran = pickled(), tmp_path / "ran"
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(Runs(ran)))
    with pytest.raises(ModelFileError, match="nothing of it was run"):
        convert_pickled(path, tmp_path / "out")
    assert not ran.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors: list(tensors.values()), "no tensors by name"),
        (lambda tensors: {}, "no tensors by name"),
        (lambda tensors: {"state_dict": tensors}, "state_dict is a dict"),
        (lambda tensors: tensors | {"x": tensors["fc.weight"].double()}, "x is a float64"),
        (lambda tensors: tensors | {3: tensors["fc.weight"]}, "3 is a float32"),
    ],
)
def test_what_is_no_list_of_tensors_is_refused(
    change: Callable[[Any], Any], told: str, pickled: Callable[..., Path], tmp_path: Path
) -> None:
    path = pickled(change=change)
    with pytest.raises(ModelFileError) as caught:
        convert_pickled(path, tmp_path / "out")
    assert told in caught.value.message and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_damaged_pickles_are_refused_in_one_line(
    pickled: Callable[..., Path], tmp_path: Path
) -> None:
    """Cut off anywhere, and with bytes changed: either tensors or one line, never another end."""
    path = pickled("eagle-1")
    whole, random = (path / "pytorch_model.bin").read_bytes(), np.random.default_rng(0)
    refused = 0
    for number in range(200):
        damaged = bytearray(whole)
        if number % 2:
            for at in random.integers(len(whole), size=20):
                damaged[at] = random.integers(256)
        else:
            del damaged[int(random.integers(len(whole))) :]
        (path / "pytorch_model.bin").write_bytes(damaged)
        try:
            convert_pickled(path, tmp_path / f"out-{number}")
        except EdgeSpecError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 100  # all that were cut off, at least


# Without PyTorch, too.


def test_without_pytorch_the_command_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edge_spec.distill.pickled.find_spec", lambda name: None)
    path = heads.draw(LAYERS, VOCAB, "safeailab").write(tmp_path / "head")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    arguments = ["export", str(path), str(tmp_path / "out"), "--format", "safetensors"]
    assert run(arguments) == 1
    assert 'pip install "edge-spec[distill]"' in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run([*arguments, "--quant", "int4"]) == 2
    assert "keeps tensors as they are" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("hf", "no directory of a trained head"),
        ("nowhere", "no directory of a trained head"),
        ("head", "has no pickled weights"),
    ],
)
def test_what_needs_no_conversion_is_left(
    name: str, told: str, target: Path, tmp_path: Path
) -> None:
    heads.draw(LAYERS, VOCAB, "safeailab").write(tmp_path / "head")
    with pytest.raises(UsageError) as caught:
        convert_pickled(tmp_path / name, tmp_path / "out")
    assert told in caught.value.message


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = heads.draw(LAYERS, VOCAB, "safeailab").write(tmp_path / "head")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(UsageError, match="exists already"):
        convert_pickled(path, path)
    assert (path / "pytorch_model.bin").is_file()
