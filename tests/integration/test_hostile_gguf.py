"""GGUF files made to break a library: each runs or is refused, and the process lives.

llama.cpp and its fork end the process where an assertion of theirs fails, so every file is opened
in a process of its own that notes what it is at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest

OPEN_FILES = Path(__file__).parents[1] / "fixtures" / "open_files.py"
VARIANTS = ("llama-bias", "qwen3", "llama-llama3")
EVERY = 12  # of the damaged files, where some do
SAMPLED = 25  # of each variant: changes of tensors' descriptions, and random damage

# Metadata that replaces the file's.
TEXTS = {
    "a vocabulary of SentencePiece": {"tokenizer__ggml__model": "llama"},
    "a vocabulary of BERT": {"tokenizer__ggml__model": "bert"},
    "a vocabulary of T5": {"tokenizer__ggml__model": "t5"},
    "no vocabulary": {"tokenizer__ggml__model": "none"},
    "an unknown pre-tokenizer": {"tokenizer__ggml__pre": "x" * 9000},
    "no architecture": {"general__architecture": ""},
    "an architecture of many letters": {"general__architecture": "x" * 9000},
    "a part of several files": {"split__count": "two"},
    "another alignment": {"general__alignment": "32"},
    "a scaling of its own": {"llama__rope__scaling__type": "yarn"},
    "a template without end": {"tokenizer__chat_template": "{% for" * 9000},
}


def damaged(tiny: ModuleType, damage: ModuleType, folder: Path) -> Iterator[tuple[str, bytes]]:
    """About 250 files with a name each, the same in every run."""
    random = np.random.RandomState(0)
    for at, variant in enumerate(VARIANTS):
        model = tiny.build(variant, max_position_embeddings=64)
        path = tiny.write_gguf(model, folder / f"{variant}.gguf")
        data = path.read_bytes()
        header_bytes = data.index(b"blk.1.ffn_down.weight") + 64
        # The variants have the same keys, so each takes every third change.
        yield from list(damage.metadata_changes(path))[at :: len(VARIANTS)]
        tensors = list(damage.tensor_changes(path))
        for chosen in random.permutation(len(tensors))[:SAMPLED]:
            yield tensors[chosen]
        for round in range(SAMPLED):
            yield f"random-{round}", damage.mutated(data, random, header_bytes)
    for name, metadata in TEXTS.items():
        path = tiny.write_gguf(tiny.build(), folder / "text.gguf", **metadata)
        yield name, path.read_bytes()
    yield "half of it", data[: len(data) // 2]
    yield "a byte less", data[:-33]
    yield "nothing after the header", data[:header_bytes]


@pytest.fixture(scope="module")
def files(
    tiny: ModuleType, damage: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """files(kind): a folder of them."""

    @cache
    def write(kind: str) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        if kind == "mislabelled":
            for architecture in sorted(gguf.MODEL_ARCH_NAMES.values()):
                model = tiny.build("llama", model_type=architecture, max_position_embeddings=64)
                tiny.write_gguf(model, folder / f"{architecture}.gguf")
            return folder
        named = list(damaged(tiny, damage, tmp_path_factory.mktemp("good")))
        assert len(named) >= 200
        for number, (name, data) in list(enumerate(named))[:: EVERY if kind == "some" else 1]:
            plain = "".join(sign if sign.isalnum() or sign in ".=-" else "_" for sign in name)
            (folder / f"{number:03}-{plain[:60]}.gguf").write_bytes(data)
        return folder

    return write


def outcomes(runtime: str, folder: Path, log: Path) -> dict[str, str]:
    """What became of each file: "ran", "refused" or what should not have happened."""
    done = subprocess.run(
        [sys.executable, str(OPEN_FILES), runtime, str(folder), str(log)],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
        check=False,
        timeout=300,
    )
    lines = log.read_text(encoding="utf-8").splitlines()
    said = next((line for line in done.stderr.splitlines() if "ASSERT" in line), done.stderr)
    assert done.returncode == 0, f"{lines[-1].strip()} ended the process: {said[:400]}"
    assert (done.stdout, done.stderr) == ("", "")
    pairs = (line.split("\t", maxsplit=1) for line in lines)
    found = {name: outcome for name, outcome in pairs}
    assert len(found) == len(list(folder.iterdir()))
    return found


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("some", 2),
        pytest.param("damaged", 20, marks=pytest.mark.slow),
        pytest.param("mislabelled", 2, marks=pytest.mark.slow),
    ],
)
def test_a_hostile_file_runs_or_is_refused(
    kind: str, least: int, llama: str, files: Callable[[str], Path], tmp_path: Path
) -> None:
    """least: how many have to run, and how many have to be refused."""
    found = outcomes(llama, files(kind), tmp_path / "log")
    unexpected = {n: text for n, text in found.items() if text not in ("ran", "refused")}
    assert not unexpected
    counts = [list(found.values()).count(outcome) for outcome in ("ran", "refused")]
    assert min(counts) >= least  # or the damage is too slight or too coarse to tell
