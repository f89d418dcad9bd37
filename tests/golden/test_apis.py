"""Every API answers, streams and refuses as it did when the golden files were made."""

from __future__ import annotations

from golden import apis
from golden.make import difference, stored


def test_replies_are_the_recorded_ones() -> None:
    assert difference(stored("apis"), apis.record()) == ""
