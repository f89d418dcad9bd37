"""The drafter of docs/extend.md works as it says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from edge_spec.drafters.composite import GuardedDrafter
from edge_spec.drafters.factory import DrafterContext
from edge_spec.testing import ScriptedModel, random_logits

DOCUMENT = Path(__file__).parents[3] / "docs" / "extend.md"


def test_the_documented_drafter_drafts(decode: Any, scripted: Any, tmp_path: Path) -> None:
    page = DOCUMENT.read_text(encoding="utf-8").partition("## Write a drafter\n")[2]
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    path = tmp_path / "alternating.py"
    path.write_text(code[1], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drafter = GuardedDrafter(module.make(DrafterContext(9)), 9)
    run = decode(scripted(2, [1, 2] * 6, vocab_size=9), [1, 2], [drafter], max_tokens=10)
    assert run.tokens == [1, 2] * 5 and drafter.fault is None
    assert sum(stats.num_accepted for stats in run.rounds) == 5  # a draft token of 0.5 a round
    model = ScriptedModel(random_logits(9), 9)
    wrong = decode(model, [1], [drafter], max_tokens=20)
    assert wrong.tokens == decode(model, [1], max_tokens=20).tokens and drafter.fault is None
