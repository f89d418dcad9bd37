"""A part of the target drafts for it: chosen on the text, not used where it gains nothing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Capabilities
from edge_spec.drafters.draft.self_draft import SelfDrafter
from edge_spec.drafters.protocol import Budget
from edge_spec.errors import BundleError, UnsupportedModelError
from edge_spec.models import bundle as bundle_module
from edge_spec.models.bundle import Bundle, add_file, open_bundle, write_manifest
from edge_spec.placement.layer_selection import (
    PARTS_FILE,
    ChosenPart,
    Judge,
    save_parts,
    saved_parts,
)
from edge_spec.scheduler.cost import RowCosts
from edge_spec.storage.atomic import atomic_file
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits

VOCAB, LAYERS = 12, 6
USEFUL = frozenset({0, 1, 4, 5, 9})  # sublayers without which the model writes something else
COSTS = RowCosts({1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2})
PAYS = ChosenPart(3, (), 0.9, 0.2, 2.0)
GAINS_NOTHING = ChosenPart(3, (), 0.1, 0.9, 0.7)


class Layered(ScriptedModel):
    """Writes by its own rule as long as the useful sublayers are run."""

    def __init__(self) -> None:
        super().__init__(random_logits(VOCAB, order=2, scale=9.0), VOCAB)
        self.capabilities = Capabilities(64, trees=True, rollback=True, hidden_states=False)
        self.config = self.config.__class__(**{**vars(self.config), "num_layers": LAYERS})

    def open_session(self) -> LayeredSession:
        return LayeredSession(self)


class LayeredSession(ScriptedSession):
    def open_skipping(self, skipped: frozenset[int]) -> PartSession:
        return PartSession(self, skipped)

    def open_exit(self, num_layers: int) -> PartSession:
        return PartSession(self, frozenset(range(2 * num_layers, 2 * LAYERS)))


class PartSession(ScriptedSession):
    """Shares its target's tokens. Without n useful sublayers it is wrong after n in 5 tokens."""

    def __init__(self, target: LayeredSession, skipped: frozenset[int]) -> None:
        whole = target._model.next_logits
        self.skipped = skipped
        self._target = target

        def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
            lost = len(self.skipped & USEFUL)
            logits = whole(tokens)
            return -logits if sum(tokens[-2:]) % 5 < lost else logits

        super().__init__(ScriptedModel(next_logits, VOCAB))

    def rollback(self, length: int) -> None:
        if length <= self._target.length:
            self.committed[:] = self._target.committed[:length]
        super().rollback(length)

    def influence(self, tokens: Sequence[int]) -> np.ndarray:
        return np.array([float(i in USEFUL) for i in range(2 * LAYERS)])


def text(length: int = 150) -> list[int]:
    return np.random.default_rng(3).integers(0, VOCAB, length).tolist()


def attached(part: ChosenPart) -> Any:
    model = Layered()
    session = model.open_session()
    drafter = SelfDrafter("layer-skip", part)
    drafter.attach(model, session)
    return drafter, model, session


def test_a_runtime_without_parts_says_so() -> None:
    model = ScriptedModel(random_logits(VOCAB), VOCAB)
    with pytest.raises(UnsupportedModelError, match="cannot run a model in part"):
        Judge(model, [text()], COSTS)
    with pytest.raises(UnsupportedModelError, match="needs a runtime"):
        SelfDrafter("early-exit", PAYS).attach(model, model.open_session())


def test_the_text_is_the_targets_own(decode: Any, greedy: Any) -> None:
    drafter, model, session = attached(PAYS)
    prompt = text(60)
    model.open_session = lambda: session
    run = decode(model, prompt, [drafter], max_tokens=60)
    model.open_session = Layered().open_session
    assert run.tokens == greedy(model, prompt, 60)
    assert sum(round.num_accepted for round in run.rounds) > 10


def test_a_part_that_gains_nothing_draft_tokens_nothing_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        drafter, _, _ = attached(GAINS_NOTHING)
    drafter.begin(text())
    assert "agrees on 10% of tokens" in caplog.text and "gains nothing" in caplog.text
    assert len(drafter.propose(text()[-1], Budget(4, 5))) == 1


def test_a_part_that_failed_is_opened_again() -> None:
    drafter, _, session = attached(PAYS)
    session.prefill(text()[:-1])
    opened = drafter._view
    for fault in (None, "OSError: the device was removed"):
        drafter.fault = fault
        drafter.begin(text())
        assert len(drafter.propose(text()[-1], Budget(4, 5, branches=False))) > 1
        assert (drafter._view is opened) == (fault is None)


def test_a_part_that_a_new_session_refuses_is_opened_again_on_that_session() -> None:
    drafter, model, _ = attached(PAYS)
    session = model.open_session()
    session.prefill(text()[:-1])
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="busy"):
        patch.setattr(session, "open_exit", busy)
        drafter.attach(model, session)
    drafter.fault = "OSError: the device is busy"
    drafter.begin(text())
    assert len(drafter.propose(text()[-1], Budget(4, 5, branches=False))) > 1
    assert drafter._view._target is session


def busy(num_layers: int) -> PartSession:
    raise OSError("the device is busy")


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    (tmp_path / "tokenizer.json").write_text("{}")
    config = Layered().config
    write_manifest(
        tmp_path,
        format="onnx",
        name="tiny",
        architecture=config.to_dict(),
        chat_template=None,
        eos_ids=(),
        bos_id=None,
        adds_bos=False,
        quantization="fp32",
        source_sha256=None,
        parity={},
    )
    return open_bundle(tmp_path)


def test_parts_are_kept_in_the_bundle(bundle: Bundle) -> None:
    assert saved_parts(bundle) == {}
    parts = {"early-exit": PAYS, "layer-skip": ChosenPart(None, (3, 8), 0.5, 0.8, 1.1)}
    save_parts(bundle, parts)
    save_parts(open_bundle(bundle.path), parts)  # again: the file is replaced
    assert saved_parts(open_bundle(bundle.path)) == parts
    assert "tokenizer.json" in open_bundle(bundle.path).manifest.files


@pytest.mark.parametrize("content", [b"", b"[]", b'{"early-exit": {"exit": "3"}}', b"\xff"])
def test_a_damaged_file_of_parts_is_one_line(content: bytes, bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="is not valid") as caught:
        saved_parts(add_file(bundle, PARTS_FILE, content))
    assert "tune-skip" in str(caught.value) and "\n" not in str(caught.value)


def test_an_interrupt_while_a_file_is_added_leaves_a_valid_bundle(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken_at in range(3):
        calls = iter(range(9))

        def interrupted(path: Path, at: int = broken_at, calls: Any = calls) -> Any:
            if next(calls) == at:
                raise KeyboardInterrupt
            return atomic_file(path)

        monkeypatch.setattr(bundle_module, "atomic_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            add_file(open_bundle(bundle.path), PARTS_FILE, b"{}" * (1 + broken_at))
        open_bundle(bundle.path)
