"""Wheels of a release with llama-cpp-python inside: what pip and Python make of them."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from edge_spec.errors import MissingDependencyError
from edge_spec.runtimes.llamacpp import upstream

SCRIPT = Path(__file__).parents[2] / ".github" / "bundle_llama.py"
OURS = {
    "edge_spec/__init__.py": "",
    "edge_spec-0.1.0.dist-info/METADATA": """Metadata-Version: 2.4
Name: edge-spec
Version: 0.1.0
Requires-Dist: numpy>=2.0
Provides-Extra: llamacpp
Requires-Dist: llama-cpp-python<0.4,>=0.3.36; extra == "llamacpp"

# edge-spec
""",
    "edge_spec-0.1.0.dist-info/WHEEL": """Wheel-Version: 1.0
Generator: setuptools (80.0.0)
Root-Is-Purelib: true
Tag: py3-none-any

""",
    "edge_spec-0.1.0.dist-info/RECORD": "",
}
PRINTS = """
import site, sys
from importlib.metadata import version
site.addsitedir(sys.argv[1])
import llama_cpp
print(llama_cpp.BUILT, version("llama-cpp-python"))
"""


def llama(version: str) -> dict[str, str]:
    return {
        "llama_cpp/__init__.py": "BUILT = 'for all'",
        "llama_cpp/lib/libllama.so": "binary",
        "bin/convert.py": "of no use",
        "lib/cmake/llama.cmake": "of no use",
        f"llama_cpp_python-{version}.dist-info/METADATA": f"""Metadata-Version: 2.4
Name: llama_cpp_python
Version: {version}
Requires-Dist: diskcache>=5.6.1
Provides-Extra: server
Requires-Dist: fastapi; extra == "server"

# Bindings
""",
        f"llama_cpp_python-{version}.dist-info/RECORD": "",
    }


def wheel(folder: Path, name: str, files: dict[str, str]) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for each, text in files.items():
            archive.writestr(each, text)
    return path


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bundle_llama", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(script: ModuleType, tmp_path: Path) -> Path:
    ours = wheel(tmp_path, "edge_spec-0.1.0-py3-none-any.whl", OURS)
    theirs = wheel(tmp_path, "llama_cpp_python-0.3.36-py3-none-any.whl", llama("0.3.36"))
    license_file = tmp_path / "llama.cpp" / "LICENSE"
    license_file.parent.mkdir()
    license_file.write_text("MIT")
    path: Path = script.bundle(ours, theirs, tmp_path / "out", [license_file])
    return path


def run(code: str, *arguments: str | Path, path: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(path)} if path is not None else {}
    command = [sys.executable, "-S", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip()


def test_what_pip_installs_is_imported_and_known_by_its_version(made: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*pip, "--target", tmp_path / "site", made], check=True)
    assert run(PRINTS, tmp_path / "site") == "for all 0.3.36"
    assert not (tmp_path / "site" / "lib").exists()


def test_an_installed_one_comes_first(made: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(made).extractall(tmp_path / "site")
    (tmp_path / "own" / "llama_cpp").mkdir(parents=True)
    (tmp_path / "own" / "llama_cpp" / "__init__.py").write_text("BUILT = 'by the user'")
    assert run(PRINTS, tmp_path / "site", path=tmp_path / "own").startswith("by the user")


def test_every_file_stands_in_a_record_with_its_hash(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        names = archive.namelist()
        record = "edge_spec-0.1.0.dist-info/RECORD"
        rows = list(csv.reader(archive.read(record).decode().splitlines()))
        assert {row[0] for row in rows} == set(names)
        for name, digest, size in rows[:-1]:
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data))


def test_what_it_imports_is_required_and_its_licenses_are_there(made: Path) -> None:
    with zipfile.ZipFile(made) as archive:
        metadata = archive.read("edge_spec-0.1.0.dist-info/METADATA").decode()
        names = archive.namelist()
    head, _, body = metadata.partition("\n\n")
    assert "Requires-Dist: diskcache>=5.6.1" in head
    assert "fastapi" not in head
    assert body.strip() == "# edge-spec"
    assert any(name.endswith("licenses/bundled/llama.cpp-LICENSE") for name in names)


def test_the_wheel_is_for_the_machines_of_the_libraries(script: ModuleType, tmp_path: Path) -> None:
    ours = wheel(tmp_path, "edge_spec-0.1.0-py3-none-any.whl", OURS)
    name = "llama_cpp_python-0.3.36-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl"
    theirs = wheel(tmp_path, name, llama("0.3.36"))
    made = script.bundle(ours, theirs, tmp_path / "out")
    assert made.name.endswith("-py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl")
    with zipfile.ZipFile(made) as archive:
        text = archive.read("edge_spec-0.1.0.dist-info/WHEEL").decode()
    assert "py3-none-any" not in text
    assert "Root-Is-Purelib: false\nTag: py3-none-manylinux_2_27_x86_64\n" in text


def test_a_version_that_was_not_tried_is_refused(script: ModuleType, tmp_path: Path) -> None:
    ours = wheel(tmp_path, "edge_spec-0.1.0-py3-none-any.whl", OURS)
    theirs = wheel(tmp_path, "llama_cpp_python-0.4.0-py3-none-any.whl", llama("0.4.0"))
    with pytest.raises(ValueError, match=r"does not take llama-cpp-python 0\.4\.0"):
        script.bundle(ours, theirs, tmp_path / "out")


@pytest.mark.parametrize(
    ("is_bundled", "machine", "is_refused"),
    [
        (True, "x86_64", True),
        (True, "AMD64", True),
        (True, "arm64", False),
        (False, "x86_64", False),  # compiled here, for this processor
    ],
)
def test_a_processor_without_avx2_is_told_before_it_would_crash(
    monkeypatch: pytest.MonkeyPatch, is_bundled: bool, machine: str, is_refused: bool
) -> None:
    import llama_cpp

    folder = Path(llama_cpp.__file__).parents[1]
    monkeypatch.setattr(upstream, "_BUNDLED", folder if is_bundled else folder / "bundled")
    monkeypatch.setattr(upstream, "_has_avx2", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: machine)
    if is_refused:
        with pytest.raises(MissingDependencyError, match="a processor with AVX2"):
            upstream._check_processor()
    else:
        upstream._check_processor()


@pytest.mark.parametrize(
    ("found", "has"),
    [
        ({"baseline": ["X86_V2"], "found": ["X86_V3", "X86_V4"]}, True),  # numpy 2.4
        ({"baseline": ["SSE", "SSE2"], "found": ["SSSE3", "AVX", "FMA3", "AVX2"]}, True),  # 2.3
        ({"baseline": ["SSE", "SSE2"], "found": ["SSSE3", "AVX"], "not found": ["AVX2"]}, False),
        ({}, False),
    ],
)
def test_numpy_says_whether_a_processor_has_avx2(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, list[str]], has: bool
) -> None:
    monkeypatch.setattr(
        "numpy.show_config", lambda mode: {"SIMD Extensions": found} if found else {}
    )
    assert upstream._has_avx2() is has
