"""Checks that a bundle's files are the ones that it lists, and that the lists agree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edge_spec.diagnostics.doctor.finding import Finding, fault, note, ok, warning
from edge_spec.diagnostics.doctor.subject import Examined, Subject
from edge_spec.errors import BundleError, ModelFileError
from edge_spec.models.bundle import MANIFEST
from edge_spec.models.bundle_files import FileEntry, check_file, check_size
from edge_spec.models.pair_bundle import PROFILES, foreign_files
from edge_spec.models.resolve import joined_types
from edge_spec.models.source import Source
from edge_spec.placement.profile import read_key

_EXPORT_AGAIN = "Export it again."
_SHOWN = 3
HASHED_BYTES = 1_000_000_000  # in all; more takes seconds, and is hashed where it is asked for


def check_files(subject: Subject) -> Iterator[Finding]:
    """Size and sha256 of each, and what is there without being listed."""
    listed = _listed(subject)
    if listed is None:
        yield _unlisted(subject)
        return
    total = sum(entry.num_bytes for entry in listed.values())
    hashed = subject.hashes or total <= HASHED_BYTES
    problems: list[BundleError] = []
    for done, (name, entry) in enumerate(listed.items()):
        subject.progress("Checking files", done / len(listed))
        try:
            (check_file if hashed else check_size)(subject.path, name, entry)
        except BundleError as error:
            problems.append(error)
    subject.progress("Checking files", 1.0)
    for problem in problems[:_SHOWN]:
        yield fault("files", problem.shown, problem.remedy)
    if len(problems) > _SHOWN:
        yield fault("files", f"{len(problems) - _SHOWN} more are wrong", _EXPORT_AGAIN)
    foreign = _foreign(subject, set(listed))
    if foreign:
        names = ", ".join(foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        yield warning("files", f"not listed and not used: {names}", "Delete them.")
    if not problems:
        count = f"{len(listed)} files, {total / 1e6:.1f} MB"
        if hashed:
            yield ok("files", f"{count}, all as they were written")
        else:
            yield note("files", f"{count}, of the right sizes, not hashed", "Add --hash.")


def _unlisted(subject: Subject) -> Finding:
    """Describes files without a list: their headers were read, and that all tensors lie within the
    files, where our own readers know the architecture."""
    path = subject.path
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    whole = "" if subject.is_other and path.is_dir() else ", no tensor is cut off"
    form = "Hugging Face" if path.is_dir() else "GGUF"
    return ok("files", f"{form}, {size / 1e6:.1f} MB{whole}; it has no hashes")


def _listed(subject: Subject) -> dict[str, FileEntry] | None:
    if subject.pair is not None:
        return subject.pair.files
    manifest = subject.variants[0].manifest
    return None if manifest is None or subject.is_other else manifest.files


def _foreign(subject: Subject, listed: set[str]) -> list[str]:
    if subject.pair is not None:
        return foreign_files(subject.path, subject.pair)
    found = (path for path in sorted(subject.path.rglob("*")) if not path.is_dir())
    names = (path.relative_to(subject.path).as_posix() for path in found)
    return [name for name in names if name not in listed | {MANIFEST}]


def check_manifests(subject: Subject) -> Iterator[Finding]:
    """Checks that pair.json and what the variants say of themselves agree."""
    if subject.pair is None:
        return
    disagreeing = False
    for each in subject.variants:
        for what, listed, own in _claims(each):
            if listed != own:
                disagreeing = True
                yield fault(
                    "manifest",
                    f"{each}: pair.json says {what} {listed}, it is {own}",
                    _EXPORT_AGAIN,
                )
    if not disagreeing:
        versions = ", ".join(f"{name} {found}" for name, found in subject.pair.versions.items())
        yield ok("manifest", f"version {subject.pair.schema_version}, written by {versions}")


def _claims(each: Examined) -> Iterator[tuple[str, object, object]]:
    """Yields what is claimed, what pair.json says of it, and what the variant says."""
    variant = each.listed
    if variant is None:
        return
    manifest = each.manifest
    if manifest is None:
        yield "quantization", variant.quantization, joined_types(each.source.weight_types)
        return
    yield "format", variant.format, manifest.format
    yield "quantization", variant.quantization, manifest.quantization
    listed = {name: variant.files.get(f"{variant.path}/{name}") for name in manifest.files}
    wrong = [name for name, entry in listed.items() if entry != manifest.files[name]]
    yield "files that differ:", [], wrong


def check_profiles(subject: Subject) -> Iterator[Finding]:
    """Checks that each can be read, belongs to one of the models, and has the name it is looked for
    by."""
    directory = subject.path / PROFILES
    if subject.pair is None or not directory.is_dir():
        return
    roles = (subject.path / role for role, _ in subject.pair.members())
    identities = {Source(str(path), subject.progress).identity for path in roles}
    found = sorted(directory.glob("*.json"))
    useful = 0
    for file in found:
        problem = _profile_problem(file, identities)
        if problem is None:
            useful += 1
        else:
            yield warning("profiles", f"{file.name}: {problem}", "Delete it, or copy it again.")
    if useful == len(found):
        yield ok("profiles", f"{useful} of devices" if found else "none; measured where it runs")


def _profile_problem(file: Path, identities: set[str]) -> str | None:
    try:
        key = read_key(file)
    except ModelFileError as error:
        return error.shown
    if key.identity not in identities:
        return f"it is of another model ({key.model})"
    if key.path.name != file.name:
        return f"it is looked for as {key.path.name}"
    return None
