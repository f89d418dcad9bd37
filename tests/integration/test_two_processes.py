"""Two processes that write the same files at once lose nothing and damage nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.engine.snapshot_file import read_snapshot
from edge_spec.text.vocabulary import Vocabulary
from fixtures.corpora import documents_of

pytestmark = pytest.mark.slow

TIMES = 15
# Arguments: the process's number, a model. Begins when a line comes in, tells what it converted.
WRITER = """
import os, sys
from pathlib import Path
import numpy as np
from edge_spec.drafters.lookup.answers import KeptAnswers
from edge_spec.models.options import LoadOptions
from edge_spec.models.model_plan import prepare_model
from edge_spec.engine.snapshot_file import Description, Snapshot, write_snapshot
from edge_spec.models.source import Source
from edge_spec.text.vocabulary import Vocabulary

number, model, times = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder = Path(os.environ["EDGE_SPEC_CACHE"])
vocabulary = Vocabulary.of({f"t{i}": i for i in range(300)})
described = Description(model="tiny", fingerprint="", computing="", drafts=(), exact=False,
                        noise=0.0, plain_s=(), learnt={}, note=None)
answers = KeptAnswers(folder / "answers.json", vocabulary)
told = []

print("ready", flush=True)
sys.stdin.readline()
prepare_model(Source(model, lambda what, fraction: told.append(what)), "ort",
        lambda what, fraction: told.append(what))
for time in range(times):
    answers.add([299, number, time], 0)
    tokens = np.full(5000, 10 * number + 1, np.int32)
    write_snapshot(folder / "chat.snapshot", Snapshot(described, tokens, {}, {}))
print(any("Converting" in what for what in told))
"""


@pytest.fixture
def written(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The cache of two processes that have written at once, and what each has told."""
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    model = tiny.write_hf(tiny.build(), tmp_path / "tiny")
    command = [sys.executable, "-c", WRITER]
    processes = []
    with ExitStack() as opened:
        for number in range(2):
            process = subprocess.Popen(
                [*command, str(number), str(model), str(TIMES)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            processes.append(opened.enter_context(process))
            opened.callback(process.kill)
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        told = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    return tmp_path / "cache", told


def test_nothing_is_lost_or_damaged(written: tuple[Path, list[tuple[str, str]]]) -> None:
    cache, told = written
    for _, errors in told:
        assert "damaged" not in errors and "Error" not in errors, errors
    assert sorted(out.strip() for out, _ in told) == ["False", "True"]  # one has converted
    vocabulary = Vocabulary.of({f"t{i}": i for i in range(300)})
    [kept] = KeptAnswers(cache / "answers.json", vocabulary).indexes
    expected = [[299, number, time] for number in range(2) for time in range(TIMES)]
    assert sorted(documents_of(kept)) == expected
    assert len(np.unique(read_snapshot(cache / "chat.snapshot").tokens)) == 1
    hidden = [path for path in cache.rglob(".*") if path.is_file() or path.is_dir()]
    assert not hidden
