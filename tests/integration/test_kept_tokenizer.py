"""A tokenizer that was made of a GGUF file's metadata is kept, used again, and made again where it
is damaged or no longer the file's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.exporters import gguf_tokenizer
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.models import model_text, runtimes
from edge_spec.models.draft_choice import describe
from edge_spec.models.kept import ENTRY
from edge_spec.models.model_plan import ModelPlan
from edge_spec.models.model_text import kept_tokenizer_json
from edge_spec.models.source import Source
from edge_spec.storage.atomic import cache_directory
from edge_spec.text.tokenizer import Tokenizer

TEXTS = [
    "the thin man",
    "  two spaces,\n\na line and 1234 digits",
    "<|im_start|>user\nwhy? \U0001f30d na\u00efve \u4f60\u597d<|im_end|>",
    "\x00 and \ufffd",
    "",
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


@pytest.fixture
def num_made(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many tokenizers were made of metadata so far. None is shared with a file that is open."""
    made: list[Path] = []
    make = gguf_tokenizer.tokenizer_from_gguf

    def counted(metadata: Any, path: Path) -> Any:
        made.append(path)
        return make(metadata, path)

    monkeypatch.setattr(
        "edge_spec.exporters.gguf_model_info._tokenizer_json",
        lambda file: str(counted(file.metadata, file.path).to_str()),
    )
    return lambda: len(made)


def kept(path: Path) -> str:
    return kept_tokenizer_json(runtimes.open_model_info(path))


def kept_file(path: Path) -> Path:
    return cache_directory() / "tokenizers" / digest(path) / "tokenizer.json"


def digest(path: Path) -> str:
    return str(runtimes.open_model_info(path).tokenizer_digest)


def test_it_is_made_once_and_is_the_same_then(
    cache: Path, num_made: Callable[[], int], gguf: Callable[..., Path]
) -> None:
    fresh = runtimes.open_model_info(gguf()).tokenizer_json()
    assert num_made() == 1 and not cache.exists()
    assert kept(gguf()) == fresh and num_made() == 2
    assert kept(gguf()) == fresh and num_made() == 2
    assert kept_file(gguf()).parent.parent == cache


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_kept_ones_agree_with_the_librarys(
    kind: str,
    cache: Path,
    trained: ModuleType,
    tokenized: Callable[..., StoredCheckpoint],
    gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    pytest.importorskip("llama_cpp")
    path = gguf()
    if kind == "sentencepiece":
        path = trained.export(tokenized(trained.sentencepiece("none")), tmp_path / "out.gguf")
    kept(path)
    published = runtimes.open_model_info(path)
    ours = Tokenizer(kept_tokenizer_json(published))
    assert kept_file(path).is_file()
    library = runtimes.load_runtime("llamacpp").open_tokenizer(published)
    assert library.vocabulary() == ours.vocabulary()
    for text in TEXTS:
        assert library.encode(text) == ours.encode(text), text


def test_loading_keeps_it_and_looking_at_a_model_does_not(
    cache: Path, num_made: Callable[[], int], gguf: Callable[..., Path]
) -> None:
    source = Source(str(gguf()), lambda what, fraction: None)
    plan = ModelPlan(source, "reference")
    found = plan.find()
    assert found is not None and not num_made()
    assert found.text is found.text
    assert num_made() == 1 and not cache.exists()
    encoded = [plan.prepare(source.progress).text.tokenizer.encode(TEXTS[2]) for _ in range(2)]
    assert encoded[0] == encoded[1] and num_made() == 2
    describe(gguf())
    assert num_made() == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def of_another(path: Path) -> None:
    """A whole one under the wrong name."""
    entry = json.loads(path.with_name(ENTRY).read_text("utf-8"))
    path.with_name(ENTRY).write_text(json.dumps({**entry, "key": {"digest": "0" * 64}}))


@pytest.mark.parametrize("damage", [cut, flipped, emptied, of_another])
def test_a_damaged_one_is_made_again(
    damage: Callable[[Path], None],
    cache: Path,
    num_made: Callable[[], int],
    gguf: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    fresh = kept(gguf())
    file = kept_file(gguf())
    whole = file.read_bytes()
    damage(file)
    assert kept(gguf()) == fresh and num_made() == 2
    (line,) = caplog.messages
    assert f"{file.parent} is removed: it " in line and "\n" not in line
    assert file.read_bytes() == whole
    assert kept(gguf()) == fresh and num_made() == 2


def test_its_name_changes_with_what_it_is_made_of_alone(
    cache: Path,
    gguf: Callable[..., Path],
    tiny: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def written(name: str, **metadata: str) -> str:
        return digest(tiny.write_gguf(tiny.build(), tmp_path / f"{name}.gguf", **metadata))

    same = digest(gguf())
    assert digest(gguf(kind="Q8_0")) == same  # other weights
    assert written("licensed", general__license="mit") == same
    assert written("other", tokenizer__ggml__pre="starcoder") != same
    assert written("named", general__name="Phi-3") != same  # which is refused
    monkeypatch.setattr("tokenizers.__version__", "0.0.1")
    of_library = digest(gguf())
    monkeypatch.setattr(gguf_tokenizer, "TOKENIZER_VERSION", 0)
    assert len({same, of_library, digest(gguf())}) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(
    cache: Path, num_made: Callable[[], int], gguf: Callable[..., Path]
) -> None:
    cache.parent.mkdir()
    cache.write_text("a file in the place of the directory")
    assert kept(gguf()) == kept(gguf()) and num_made() == 2


def test_one_that_is_larger_than_any_is_not_read(
    cache: Path,
    num_made: Callable[[], int],
    gguf: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh = kept(gguf())
    bound = len(fresh.encode())
    monkeypatch.setattr(model_text, "MAX_TOKENIZER_BYTES", bound)
    assert kept(gguf()) == fresh and num_made() == 1
    monkeypatch.setattr(model_text, "MAX_TOKENIZER_BYTES", bound - 1)
    assert kept(gguf()) == fresh and num_made() == 2  # not read
