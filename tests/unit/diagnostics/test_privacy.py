"""What of a user's own paths and names stays in a report that is handed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_spec.diagnostics.doctor.document import Privacy


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/usr/lib/x86_64/libcuda.so.1: cannot open", "\u2026/libcuda.so.1: cannot open"),
        (r"C:\Users\me\lib.dll is missing", "\u2026/lib.dll is missing"),
        ("read and/or write 3/4 of it", "read and/or write 3/4 of it"),
    ],
)
def test_paths_keep_their_last_part_alone(said: str, told: str) -> None:
    assert Privacy(["/models/tiny.gguf"]).text(said) == told


def test_a_models_own_directory_goes_even_with_spaces(tmp_path: Path) -> None:
    place = tmp_path / "Jo's models"
    assert Privacy([str(place / "a.gguf")]).text(f"{place}/a.gguf") == "\u2026/a.gguf"
