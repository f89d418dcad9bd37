"""Every exporter writes the bytes that it wrote when the golden files were made."""

from __future__ import annotations

import pytest

from golden import exports
from golden.make import difference, stored


def test_files_of_tiny_checkpoints_are_the_recorded_ones() -> None:
    found = exports.record(exports.QUICK)
    expected = {name: value for name, value in stored("exports").items() if name in found}
    assert difference(expected, found) == ""


@pytest.mark.slow
def test_files_of_every_family_are_the_recorded_ones() -> None:
    assert difference(stored("exports"), exports.record()) == ""
