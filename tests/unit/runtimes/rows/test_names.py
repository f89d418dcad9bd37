"""What was measured of kernels is kept under their name, which is known before llama.cpp opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp.rows import install, library


def test_kernels_are_named_by_table_and_build_and_by_nothing_where_they_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(install.VARIABLE, raising=False)
    monkeypatch.delenv(install.TABLE_VARIABLE, raising=False)
    built = tmp_path / "library"
    monkeypatch.setattr(library, "path", lambda: built)
    monkeypatch.setattr(library, "table", lambda: "avx2")
    names = {runtimes.own_kernels("llamacpp")}  # there is no library
    assert names == {""}
    for content in (b"one build", b"another"):
        built.write_bytes(content)
        names.add(runtimes.own_kernels("llamacpp"))
    assert len(names) == 3 and all(name.startswith("avx2 ") for name in names - {""})
    monkeypatch.setattr(library, "table", lambda: "portable")
    assert runtimes.own_kernels("llamacpp") == ""  # slower than llama.cpp's
    monkeypatch.setattr(library, "table", lambda: "avx2")
    monkeypatch.setenv(install.VARIABLE, "off")
    assert runtimes.own_kernels("llamacpp") == ""
    assert runtimes.own_kernels("ort") == ""
