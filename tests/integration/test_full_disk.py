"""A disk that takes no more leaves every writer's old file and nothing else, told in one line: its
part is that of a limit on the size of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.export import ExportOptions
from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.engine.snapshot_file import Description, Snapshot, write_snapshot
from edge_spec.errors import EdgeSpecError, StorageError
from edge_spec.exporters.checkpoint import StoredCheckpoint
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.loader import load_engine
from edge_spec.models.bundle import open_bundle
from edge_spec.models.model_plan import prepare_model
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.placement.layer_selection import ChosenPart, save_parts
from edge_spec.text.vocabulary import Vocabulary
from fixtures.silence import quiet

resource = pytest.importorskip("resource")

LIMIT_BYTES = 600  # of a file: fewer than any of these has
DESCRIBED = Description(
    model="tiny",
    fingerprint="",
    computing="",
    drafts=(),
    exact=False,
    noise=0.0,
    plain_s=(),
    learnt={},
    note=None,
)


def keep_chat(folder: Path, version: int) -> None:
    tokens = np.full(20_000, version, np.int32)
    write_snapshot(folder / "chat.snapshot", Snapshot(DESCRIBED, tokens, {}, {}))


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() or path.name.startswith("."))
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in files
        if path.suffix != ".lock"
    }


@contextmanager
def limited() -> Iterator[None]:
    """Files may have no more than LIMIT_BYTES, as by `ulimit -f`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def require_one_line(error: EdgeSpecError | OSError) -> None:
    assert isinstance(error, EdgeSpecError) and "\n" not in str(error)
    assert "File too large: " in str(error)


def test_a_file_that_may_not_be_as_large_leaves_the_old_one(tmp_path: Path, cache: Path) -> None:
    keep_chat(tmp_path, 1)
    before = contents(tmp_path)
    with pytest.raises((EdgeSpecError, OSError)) as caught, limited():
        keep_chat(tmp_path, 2)
    require_one_line(caught.value)
    assert contents(tmp_path) == before
    keep_chat(tmp_path, 2)
    assert contents(tmp_path) != before


def test_exports_leave_the_old_bundle_and_file(
    tmp_path: Path, cache: Path, checkpoint: Callable[..., StoredCheckpoint]
) -> None:
    bundle, gguf, options = tmp_path / "bundle", tmp_path / "model.gguf", ExportOptions(check=False)
    source = Source(str(checkpoint().path), quiet)
    OnnxExporter().export(checkpoint(), bundle, options, quiet)
    GgufExporter().export(checkpoint(), gguf, options, quiet)
    save_parts(open_bundle(bundle), {"layer-skip": ChosenPart(None, (1,), 0.5, 0.5, 1.0)})
    before = contents(tmp_path)
    writers: list[Callable[[], Any]] = [
        lambda: OnnxExporter().export(checkpoint(), bundle, options, quiet),
        lambda: GgufExporter().export(checkpoint(), gguf, options, quiet),
        lambda: prepare_model(source, "ort", quiet),
    ]
    for write in writers:
        with pytest.raises(EdgeSpecError) as caught, limited():
            write()
        require_one_line(caught.value)
        assert contents(tmp_path) == before
    open_bundle(bundle)


def test_what_is_learnt_is_not_saved_and_one_line_says_so(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocabulary = Vocabulary.of({f"t{i}": i for i in range(300)})
    answers = KeptAnswers(cache / "n.json", vocabulary)
    for turn in range(2):
        before = contents(tmp_path)
        with limited():
            answers.add(np.random.default_rng(turn).integers(0, 300, 2000).tolist(), 0)
        assert contents(tmp_path) == before
        answers.add([1, turn], 0)
        assert contents(tmp_path) != before
    assert len(caplog.messages) == 1 and "cannot be saved" in caplog.text


def test_a_cache_that_is_a_file_is_told_by_whoever_needs_it(
    cache: Path, checkpoint: Callable[..., StoredCheckpoint]
) -> None:
    cache.write_text("")
    with pytest.raises(StorageError, match=r"Not a directory: .*set EDGE_SPEC_CACHE"):
        prepare_model(Source(str(checkpoint().path), quiet), "ort", quiet)


def test_where_nothing_can_be_kept_answers_are_as_ever_and_one_line_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gguf: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    options = LoadOptions(runtime="reference", drafter="answers,suffix")
    answers = []
    for cache in ("cache", "file"):
        monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / cache))
        with load_engine(str(gguf()), options, quiet) as engine:
            answers.append(engine.generate("the inn and the inn and", max_tokens=24).text)
    assert answers[0] == answers[1]
    assert [line for line in caplog.messages if "cannot be saved" in line] == caplog.messages
    assert len(caplog.messages) == 1
