"""The conformance suite itself: a broken session fails at the promise that it breaks."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.model import Forward, RuntimeOptions
from edge_spec.models import runtimes
from edge_spec.testing import ScriptedModel, ScriptedSession, check_session, random_logits

DOCUMENT = Path(__file__).parents[2] / "docs" / "extend.md"


class KeepsAllAfterRollback(ScriptedSession):
    def rollback(self, length):
        pass


class ForgetsTheWrongEnd(ScriptedSession):
    def rollback(self, length):
        self.committed = self.committed[self.length - length :]


class TakesRowsForAChain(ScriptedSession):
    def forward(self, tree):
        self._tree = tree
        seen = [tuple(self.committed) + tuple(tree.tokens[: row + 1]) for row in range(len(tree))]
        return Forward(np.stack([self._model.next_logits(tokens) for tokens in seen]))


class CommitsTheFirstRows(ScriptedSession):
    def commit(self, rows):
        self.committed += self._tree.tokens[: len(rows)].tolist()


class CommitsInForward(ScriptedSession):
    def forward(self, tree):
        out = super().forward(tree)
        self.committed.append(int(tree.tokens[0]))
        return out


class DropsTheEndOfAPrefill(ScriptedSession):
    def prefill(self, tokens):
        super().prefill(tokens[:4])


class KnowsNoEnd(ScriptedSession):
    def __init__(self, model):
        super().__init__(model)
        self._model = ScriptedModel(model.next_logits, model.config.vocab_size, 1 << 20)


class SharesItsCache(ScriptedSession):
    shared: list[int]

    def __init__(self, model):
        super().__init__(model)
        self.committed = self.shared


class AddsToWhatItHolds(ScriptedSession):
    def restore(self, state, length):
        before = list(self.committed)
        super().restore(state, length)
        self.committed[:] = before + self.committed


class TellsAnotherText(ScriptedSession):
    def state(self):
        return {"committed": np.array(self.committed[::-1], np.int32)}


class TakesAnyState(ScriptedSession):
    def restore(self, state, length):
        self.committed[:] = state.get("committed", np.empty(0)).tolist()


class ForgetsWhereItRefuses(ScriptedSession):
    def restore(self, state, length):
        self.committed.clear()
        super().restore(state, length)


def model_of(session_type: type[ScriptedSession]) -> ScriptedModel:
    # All tokens of the text matter to the next one, or a wrong cache might not show.
    model = ScriptedModel(random_logits(40, order=64), 40, context_length=40)
    model.open_session = lambda: session_type(model)
    return model


def test_a_right_session_passes_without_any_difference():
    assert check_session(model_of(ScriptedSession), tolerance=0).max_difference == 0


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (KeepsAllAfterRollback, "rollback sets the length"),
        (ForgetsTheWrongEnd, "after a rollback to"),
        (TakesRowsForAChain, "of a tree"),
        (CommitsTheFirstRows, "after a branch"),
        (CommitsInForward, "forward commits nothing"),
        (DropsTheEndOfAPrefill, "prefill commits its tokens"),
        (KnowsNoEnd, "beyond the context raises ContextFullError"),
        (SharesItsCache, "a new session is empty"),
        (AddsToWhatItHolds, "restore sets the length"),
        (TellsAnotherText, "in a restored session"),
        (TakesAnyState, "restore raises ValueError for no array"),
        (ForgetsWhereItRefuses, "in a session that refused a state"),
    ],
)
def test_a_broken_session_fails_by_its_promise(broken, promise):
    SharesItsCache.shared = []
    with pytest.raises(AssertionError, match=promise):
        check_session(model_of(broken), tolerance=0)


@pytest.mark.model
def test_the_documented_runtime_passes(demo_gguf, tmp_path):
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)[1]
    path = tmp_path / "bigram_runtime.py"
    path.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    checkpoint = runtimes.open_checkpoint(demo_gguf)
    model = module.BigramRuntime().open(checkpoint, RuntimeOptions(context_length=40))
    assert check_session(model, tolerance=0).max_difference == 0
