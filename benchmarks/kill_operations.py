"""Holds what is written and read again while processes are killed: each kind of kept file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_spec.core.export import ExportOptions
from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.engine.snapshot_file import Description, Snapshot, read_snapshot, write_snapshot
from edge_spec.exporters.gguf import GgufExporter
from edge_spec.exporters.onnx import OnnxExporter
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models.bundle import Manifest, may_replace, open_bundle
from edge_spec.models.hub import HubReference
from edge_spec.models.hub_download import find_cached, pull
from edge_spec.models.source import Source
from edge_spec.placement.layer_selection import ChosenPart, save_parts, saved_parts
from edge_spec.scheduler.profile import ProfileKey, load_learnt, save_learnt
from edge_spec.text.vocabulary import Vocabulary

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fixtures import tiny_models

VOCABULARY = Vocabulary.of({f"t{i}": i for i in range(1 << 16)})
NUM_VALUES = 1 << 18  # of the larger files: 1 MB is long enough to be hit
KEY = ProfileKey("tiny", "abc", "F32", "ort", "1", "", None, (), "cpu")
REFERENCE = HubReference("org/tiny", "main")


class MisloadError(Exception):
    pass


@dataclass(frozen=True)
class Operation:
    """read: the version that is there, None where there is nothing; raises where it misloads.

    is_ordered: whether a newer version is a larger number. may_vanish: whether a kill may take the
    old one away, as with what is made again without loss.
    """

    write: Callable[[int], object]
    read: Callable[[], int | None]
    is_ordered: bool = True
    may_vanish: bool = False


def quiet(what: str, fraction: float) -> None:
    pass


def same(values: Any) -> int:
    """The one value that all of them are."""
    (value,) = set(values)
    return int(value)


def exports(model: Path, folder: Path) -> dict[str, Operation]:
    """Exports the tiny model, by turns in two quantizations: an even and an odd version."""
    checkpoint = open_checkpoint(model)
    bundle, gguf = folder / "bundle", folder / "model.gguf"

    def write_bundle(version: int) -> None:
        quantization = ("fp32", "int8")[version % 2]
        OnnxExporter().export(checkpoint, bundle, ExportOptions(quantization, check=False), quiet)

    def read_bundle() -> int | None:
        path = Source(str(bundle), quiet).path
        if not may_replace(path, Manifest):
            raise MisloadError("it cannot be replaced")
        return int(open_bundle(bundle).manifest.quantization.startswith("int8"))

    def write_gguf(version: int) -> None:
        quantization = ("F16", "Q8_0")[version % 2]
        GgufExporter().export(checkpoint, gguf, ExportOptions(quantization, check=False), quiet)

    def read_gguf() -> int | None:
        opened = open_checkpoint(gguf)
        for name in opened.names():
            opened.float32(name)
        return int("Q8_0" in opened.weight_types)

    return {
        "export": Operation(write_bundle, read_bundle, is_ordered=False, may_vanish=True),
        "gguf": Operation(write_gguf, read_gguf, is_ordered=False),
    }


def parts_of(bundle: Path) -> Operation:
    def write(version: int) -> None:
        part = ChosenPart(None, (version,), 0.5, 0.5, 1.0)
        save_parts(open_bundle(bundle), {"layer-skip": part})

    def read() -> int | None:
        if not may_replace(bundle, Manifest):
            raise MisloadError("it cannot be replaced")
        found = saved_parts(open_bundle(bundle))
        return found["layer-skip"].skipped[0] if found else None

    return Operation(write, read, may_vanish=True)


def in_cache(cache: Path) -> dict[str, Operation]:
    answers = cache / "n.json"

    def write_answers(version: int) -> None:
        kept = KeptAnswers(answers, VOCABULARY)
        digits = [version // 10**place % 10 for place in range(4)]
        kept.add([1, *[version % 10 + 2] * 2000, *digits], 0)

    def read_answers() -> int | None:
        kept = KeptAnswers(answers, VOCABULARY)  # warns of what is damaged
        return answers.read_text().count("\n") if kept.indexes else None

    def write_measurement(version: int) -> None:
        save_learnt(KEY, {"suffix": [float(version)] * 5000})

    def read_measurement() -> int | None:
        learnt = load_learnt(KEY)  # warns of what is damaged
        return same(learnt["suffix"]) if learnt else None

    return {
        "answers": Operation(write_answers, read_answers),
        "measurement": Operation(write_measurement, read_measurement),
    }


def large(folder: Path) -> dict[str, Operation]:
    snapshot = folder / "chat.snapshot"
    described = Description(
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

    def write_snapshot_of(version: int) -> None:
        tokens = np.full(NUM_VALUES, version, np.int32)
        write_snapshot(snapshot, Snapshot(described, tokens, {}, {}))

    return {
        "snapshot": Operation(
            write_snapshot_of, lambda: same(np.unique(read_snapshot(snapshot).tokens))
        ),
    }


def downloads(hub: Any) -> Operation:
    """The hub has one newer version a round; the content of the files says what is there."""

    def content(version: int) -> dict[str, bytes]:
        return {"tiny.gguf": version.to_bytes(4, "little") * NUM_VALUES}

    def read() -> int | None:
        found = find_cached(REFERENCE)
        return found and same(np.fromfile(found.path, "<i4"))

    def write(version: int) -> None:
        pull(REFERENCE, quiet)

    hub.offer = lambda version: hub.add(REFERENCE.repository, content(version))
    return Operation(write, read)


def operations(folder: Path, hub: Any) -> dict[str, Operation]:
    model = tiny_models.write_hf(tiny_models.build(), folder / "tiny")
    bundle = folder / "with-parts"
    OnnxExporter().export(open_checkpoint(model), bundle, ExportOptions("fp32", check=False), quiet)
    return {
        **exports(model, folder),
        "parts": parts_of(bundle),
        **in_cache(folder),
        **large(folder),
        "download": downloads(hub),
    }
