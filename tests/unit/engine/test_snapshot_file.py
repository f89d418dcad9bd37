"""The file of a conversation: whole or refused, whatever happened to it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_spec.core.model import STATE_TYPES
from edge_spec.engine.snapshot_file import (
    Description,
    Snapshot,
    read_snapshot,
    write_snapshot,
)
from edge_spec.errors import SnapshotError

START = struct.Struct("<16sQQ32s")  # magic, version, bytes of the header, sha256
NOTE = {"messages": [{"role": "user", "content": "Grüße \ud800"}], "n": 1.5}
DESCRIPTION = Description(
    model="test",
    fingerprint="f",
    computing="c",
    drafts=("d",),
    exact=False,
    noise=0.3,
    plain_s=(0.1, 0.0),  # a coarse clock sees no time pass
    learnt={"suffix": [1.0, 2.0]},
    note=NOTE,
)


def snapshot() -> Snapshot:
    rng = np.random.default_rng(0)
    cache = {name: (100 * rng.random((2, 3))).astype(name) for name in STATE_TYPES}
    cache["strided"] = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]
    drafters = {"a/b": np.zeros((0, 5), np.int32), "number": np.array(3.5)}
    return Snapshot(DESCRIPTION, np.array([5, 6, 7], np.int32), cache, drafters)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "chat.snapshot"
    write_snapshot(path, snapshot())
    return path


def write(path: Path, header: Any, rest: bytes = b"", version: int = 1, **changes: Any) -> None:
    """A file whose checksum is right; header: JSON, or what stands in its place."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    magic = changes.get("magic", b"edge-spec chat\0\0")
    size = changes.get("header_bytes", len(encoded))
    digest = hashlib.sha256(START.pack(magic, version, size, b"") + encoded + rest).digest()
    path.write_bytes(START.pack(magic, version, size, digest) + encoded + rest)


def header(*arrays: Any, **changes: Any) -> dict[str, Any]:
    tokens = {"name": "tokens/", "type": "<i4", "shape": [0]}
    description = json.loads(json.dumps(DESCRIPTION.model_dump())) | changes
    return {"description": description, "arrays": [tokens, *arrays]}


def test_what_is_read_is_what_was_written(path: Path) -> None:
    read, written = read_snapshot(path), snapshot()
    assert read.description == DESCRIPTION
    assert read.tokens.dtype == np.int32 and read.tokens.tolist() == [5, 6, 7]
    for found, expected in (
        (read.cache, written.cache),
        (read.drafters, written.drafters),
    ):
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tobytes() == array.tobytes(), name


def test_only_its_owner_can_read_it(path: Path) -> None:
    if os.name == "posix":
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]  # nothing beside it


@pytest.mark.parametrize("bit", [0, 7])
def test_every_flipped_bit_is_found(path: Path, bit: int) -> None:
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(SnapshotError) as found:
            read_snapshot(path)
        assert str(path) in str(found.value) and "\n" not in str(found.value)


def test_a_file_that_is_cut_or_longer_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(SnapshotError):
            read_snapshot(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(SnapshotError, match="damaged"):
        read_snapshot(path)


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "empty", "text", "newer"])
def test_what_is_no_snapshot_is_named(kind: str, path: Path) -> None:
    whole = path.read_bytes()
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no pipes in its file system")
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("Dear diary, " * 100)
    elif kind == "newer":
        path.write_bytes(whole[:16] + struct.pack("<Q", 2) + whole[24:])
    expected = {"newer": "version 2, this edge-spec reads version 1"}.get(
        kind, "there is no file" if kind in ("missing", "directory", "pipe") else "is no snapshot"
    )
    with pytest.raises(SnapshotError, match=expected):
        read_snapshot(path)


def test_a_place_that_cannot_be_written_is_named(path: Path) -> None:
    with pytest.raises(SnapshotError, match="cannot write"):
        write_snapshot(path / "below", snapshot())
    (path.parent / "directory").mkdir()
    with pytest.raises(SnapshotError, match="cannot write"):
        write_snapshot(path.parent / "directory", snapshot())
    assert read_snapshot(path).tokens.tolist() == [5, 6, 7]


ARRAY = {"name": "cache/kv", "type": "<f4", "shape": [2]}
HUGE = 2**39


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'{"description": ' + b'{"a":' * 100_000,
        b"1" * 10_000,
        [],
        {},
        header(ARRAY),
        header(ARRAY | {"shape": [HUGE, HUGE, HUGE]}),
        header(ARRAY | {"shape": [0, HUGE, HUGE, HUGE]}),
        header(ARRAY | {"shape": [-2]}),
        header(ARRAY | {"shape": [1] * 9}),
        header(ARRAY | {"shape": [0], "type": "|O"}),
        header(ARRAY | {"shape": [0], "type": "<f4,<f4"}),
        header(ARRAY | {"shape": [0], "name": "other"}),
        header(*[ARRAY | {"shape": [0]}] * 2),
        header(ARRAY | {"shape": [0], "more": 1}),
        header(more=1),
        header(note=[1]),
        header(exact="perhaps"),
        header(plain_s=[-1.0]),
        header(noise=-1.0),
        header(plain_s=[1.0] * 257),
        header(learnt={"suffix": [float("nan")]}),
        {"description": header()["description"], "arrays": []},
        {"description": header()["description"], "arrays": [ARRAY | {"shape": [0]}]},
        {
            "description": header()["description"],
            "arrays": [ARRAY | {"shape": [0], "name": "tokens/"}],
        },
    ],
    ids=range(27),
)
def test_a_header_that_is_wrong_is_refused_though_its_checksum_is_right(
    wrong: Any, tmp_path: Path
) -> None:
    write(tmp_path / "file", wrong)
    with pytest.raises(SnapshotError, match="is damaged"):
        read_snapshot(tmp_path / "file")
    write(tmp_path / "file", header())  # it is not this test that makes it wrong
    assert len(read_snapshot(tmp_path / "file").tokens) == 0


def test_no_more_is_allocated_than_the_file_has(tmp_path: Path) -> None:
    write(tmp_path / "file", header(), header_bytes=2**62)
    with pytest.raises(SnapshotError, match="a header of"):
        read_snapshot(tmp_path / "file")
    write(tmp_path / "file", header(ARRAY | {"shape": [2**30]}))
    with pytest.raises(SnapshotError, match="its header tells of"):
        read_snapshot(tmp_path / "file")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARRAYS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["tokens/", "cache/kv", "drafters/a", "x", ""]) | st.text(),
        "type": st.sampled_from([*STATE_TYPES, "|O", "<U4", "f4"]),
        "shape": st.lists(st.integers(-1, 5) | st.integers(), max_size=9),
    }
)


@given(
    changes=st.dictionaries(st.sampled_from(list(DESCRIPTION.model_dump())), JSON, max_size=2),
    arrays=st.lists(ARRAYS, max_size=3),
    rest=st.binary(max_size=64),
)
def test_a_made_up_header_is_read_as_it_is_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: Any, arrays: Any, rest: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "made-up"
    made = header(**changes)
    write(path, {**made, "arrays": arrays or made["arrays"]}, rest)
    try:
        read = read_snapshot(path)
    except SnapshotError as error:
        assert "\n" not in str(error)
    else:
        held = [read.tokens, *read.cache.values(), *read.drafters.values()]
        assert sum(array.nbytes for array in held) == len(rest)
