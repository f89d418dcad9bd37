"""What was measured of kernels is kept under their name, which is known before llama.cpp opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.errors import UsageError
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
    monkeypatch.setattr(library, "tables", lambda: ["avx2", "portable"])
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


@pytest.mark.parametrize("name", ["avx1024", "AVX2"])
def test_kernels_that_do_not_run_here_are_refused_with_those_that_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = tmp_path / "library"
    built.touch()
    monkeypatch.setattr(library, "path", lambda: built)
    monkeypatch.setattr(library, "tables", lambda: ["avx2", "portable"])
    monkeypatch.setattr(library, "table", lambda: "avx2")
    monkeypatch.delenv(install.VARIABLE, raising=False)
    monkeypatch.setenv(install.TABLE_VARIABLE, name)
    for ask in (install.wanted, lambda: install.install(None)):
        with pytest.raises(UsageError, match=f"EDGE_SPEC_ROWS_KERNELS.*{name}") as refused:
            ask()
        assert "avx2 or portable" in str(refused.value.remedy)
    monkeypatch.setenv(install.TABLE_VARIABLE, "avx2")
    assert install.wanted().startswith("avx2 ")


def test_a_switch_that_says_neither_on_nor_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(install.VARIABLE, "no")
    with pytest.raises(UsageError, match="EDGE_SPEC_ROWS is 'no'"):
        install.wanted()
    monkeypatch.setenv(install.VARIABLE, "off")
    assert install.wanted() == ""
