"""Puts a wheel of llama-cpp-python into one of ours, so that pip installs both without a compiler.

    python .github/bundle_llama.py OURS.whl LLAMA.whl OUT --license LICENSE

The package index has llama-cpp-python as sources alone. A release therefore builds it, as it is, in
the version of the extra `llamacpp`, and its files lie in a folder of our package that a .pth file
adds to the end of Python's path. A llama-cpp-python that the user has installed comes first there,
and pip knows of ours: it upgrades or replaces it as any other.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Iterable, Mapping
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

NAME = "llama-cpp-python"
EXTRA = "llamacpp"
FOLDER = "edge_spec/runtimes/llamacpp/bundled"
PATH_FILE = "edge_spec_bundled.pth"
Files = dict[str, bytes]  # of a wheel, by their names
_TIME = (1980, 1, 1, 0, 0, 0)  # the same inputs make the same bytes


def bundle(ours: Path, llama: Path, out: Path, licenses: Iterable[Path] = ()) -> Path:
    """Writes a wheel into the folder `out`. licenses: of what llama-cpp-python is made of. Raises
    ValueError for a version that the extra does not take."""
    ours_files, llama_files = _read(ours), _read(llama)
    ours_info, llama_info = _info(ours_files), _info(llama_files)
    metadata = message_from_bytes(ours_files[f"{ours_info}/METADATA"])
    needs = message_from_bytes(llama_files[f"{llama_info}/METADATA"])
    _check_version(metadata, needs)
    inner = _bundled(llama_files, llama_info, licenses)
    _, version, _, tags = parse_wheel_filename(llama.name)
    platforms = sorted({tag.platform for tag in tags})
    files = {name: data for name, data in ours_files.items() if name != f"{ours_info}/RECORD"}
    files |= {f"{FOLDER}/{name}": data for name, data in inner.items()}
    files[PATH_FILE] = f"{FOLDER}\n".encode()
    files[f"{ours_info}/METADATA"] = _with_needs(ours_files[f"{ours_info}/METADATA"], needs)
    files[f"{ours_info}/WHEEL"] = _wheel(ours_files[f"{ours_info}/WHEEL"], platforms)
    files[f"{ours_info}/RECORD"] = _record(files, f"{ours_info}/RECORD")
    out.mkdir(parents=True, exist_ok=True)
    made = out / f"{ours_info.removesuffix('.dist-info')}-py3-none-{'.'.join(platforms)}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), data, zipfile.ZIP_DEFLATED, 9)
    print(f"{made}: with {NAME} {version}, {made.stat().st_size / 1e6:.1f} MB")
    return made


def _read(wheel: Path) -> Files:
    with zipfile.ZipFile(wheel) as archive:
        return {each: archive.read(each) for each in archive.namelist() if not each.endswith("/")}


def _info(files: Files) -> str:
    return next(name for name in files if name.endswith(".dist-info/METADATA")).rpartition("/")[0]


def _check_version(ours: Message, llama: Message) -> None:
    wanted = [
        each
        for each in map(Requirement, ours.get_all("Requires-Dist", []))
        if each.name == NAME and each.marker is not None and each.marker.evaluate({"extra": EXTRA})
    ]
    if not wanted or not all(each.specifier.contains(llama["Version"]) for each in wanted):
        raise ValueError(f"the extra {EXTRA} does not take {NAME} {llama['Version']}")


def _bundled(files: Files, info: str, licenses: Iterable[Path]) -> Files:
    """What Python imports, the libraries beside it, and what pip knows it by. What else such a
    wheel brings would lie at the top of an installation: headers, and programs for C."""
    kept = {
        name: data
        for name, data in files.items()
        if name.startswith(("llama_cpp/", "llama_cpp_python.", f"{info}/"))
        and name != f"{info}/RECORD"
    }
    for path in licenses:
        kept[f"{info}/licenses/bundled/{path.parent.name}-{path.name}"] = path.read_bytes()
    kept[f"{info}/RECORD"] = _record(kept, f"{info}/RECORD")
    return kept


def _with_needs(metadata: bytes, llama: Message) -> bytes:
    """What it imports has to be installed, too: pip asks the outer wheel alone."""
    needs = [each for each in llama.get_all("Requires-Dist", []) if "extra ==" not in each]
    head, blank, body = metadata.partition(b"\n\n")
    lines = "".join(f"\nRequires-Dist: {each}" for each in needs).encode()
    return head + lines + blank + body


def _wheel(text: bytes, platforms: Iterable[str]) -> bytes:
    lines = [
        line for line in text.decode().splitlines() if not line.startswith(("Tag:", "Root-Is-"))
    ]
    tags = [f"Tag: py3-none-{platform}" for platform in platforms]
    return "\n".join([*filter(None, lines), "Root-Is-Purelib: false", *tags, ""]).encode()


def _record(files: Mapping[str, bytes], own_name: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(data)])
    writer.writerow([own_name, "", ""])
    return text.getvalue().encode()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ours", type=Path)
    parser.add_argument("llama", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--license", type=Path, action="append", default=[])
    asked = parser.parse_args()
    bundle(asked.ours, asked.llama, asked.out, asked.license)
