"""What a library logs goes to Python where anybody listens, and else no further than C."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from edge_spec.runtimes.llamacpp.library import LibraryLog
from edge_spec.runtimes.llamacpp.rows import library

DEBUG, INFO, WARNING, ERROR, CONTINUED = 1, 2, 3, 4, 5


@pytest.fixture
def log() -> LibraryLog:
    if not library.path().is_file():
        pytest.skip("this installation was built without a C++ compiler")
    made = LibraryLog("log-test")
    made.send_through(library.function("log"))
    return made


def told(log: LibraryLog, caplog: pytest.LogCaptureFixture) -> list[str]:
    library.function("log_from")(log.least_level)
    for level, text in (
        (DEBUG, b"a tensor\n"), (INFO, b"half "), (CONTINUED, b"a line\n"), (CONTINUED, b".\n"),
        (WARNING, b"odd\n"), (ERROR, b"broken "), (CONTINUED, b"file\n"), (INFO, b"end\n"),
    ):  # fmt: skip
        log.callback(level, text, log.data)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (logging.DEBUG, ["a tensor", "half a line", ".", "odd", "broken file", "end"]),
        (logging.INFO, ["odd", "broken file"]),
        (logging.WARNING, ["broken file"]),
    ],
)
def test_lines_that_nobody_listens_to_stay_in_the_library(
    log: LibraryLog,
    level: int,
    expected: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    received: list[Any] = []
    note = log._logger.log
    monkeypatch.setattr(log._logger, "log", lambda *line: (received.append(line), note(*line)))
    with caplog.at_level(level, "edge_spec.log-test"):
        assert told(log, caplog) == expected
    assert len(received) == len(expected)  # the others were never Python's
    assert log.errors_after(0) == "broken file"
