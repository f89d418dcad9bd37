"""The README's example runs as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.model
def test_the_sdk_example_prints_an_answer_and_a_speedup(edge_spec):
    code = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    # The example sets no limit, and a small model may go on to the end of its context.
    limited = code.replace("stream=True", "stream=True, max_tokens=64")
    assert limited != code
    done = subprocess.run(
        [sys.executable, "-c", limited], capture_output=True, text=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"\w.*\n?\d\.\d+\n$", done.stdout, re.DOTALL)
