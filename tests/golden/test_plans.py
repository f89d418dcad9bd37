"""`plan` chooses and `doctor` says what they did when the golden files were made."""

from __future__ import annotations

import pytest

from golden import plans
from golden.make import difference, stored

pytest.importorskip("onnxruntime")
pytest.importorskip("llama_cpp")


def test_decisions_are_the_recorded_ones() -> None:
    assert difference(stored("plans"), plans.record()) == ""
