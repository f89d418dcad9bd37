"""First answers are no laboratory time: every pass from the opening of a model on is an answer's
own, but for those that say how passes may be verified where kernels do not promise it. Passes are
counted here, not seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_spec.core.model import Model
from edge_spec.loader import load_engine, open_engine
from edge_spec.models.model_plan import PreparedModel
from edge_spec.models.options import LoadOptions
from edge_spec.models.source import Source
from edge_spec.scheduler.batch_invariance import measure_batch_invariance, widths_for
from edge_spec.scheduler.engine_plan import plan_engine
from edge_spec.scheduler.profile import SECONDS
from fixtures.silence import quiet

PROMPTS = ("the night and the night and", "a long story of a long")
pytestmark = pytest.mark.usefixtures("cache")


def count_passes(model: Model, passes: list[int]) -> None:
    """Notes the rows of each pass of all sessions that the model opens from now on."""
    open_session = model.open_session

    def opened() -> Any:
        session: Any = open_session()
        forward = session.forward

        def counted(tree: Any) -> Any:
            passes.append(len(tree))
            return forward(tree)

        session.forward = counted
        return session

    model.open_session = opened  # type: ignore[method-assign]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """By model's name, of all models that are opened."""
    found: dict[str, list[int]] = {}
    open_model = PreparedModel.open

    def opened(resolved: PreparedModel) -> Model:
        model = open_model(resolved)
        count_passes(model, found.setdefault(resolved.name, []))
        return model

    monkeypatch.setattr(PreparedModel, "open", opened)
    return found


@pytest.mark.parametrize("runtime", ["llamacpp", "ort", "reference"])
def test_all_passes_of_answers_are_their_own(
    runtime: str,
    gguf: Callable[..., Path],
    hf: Callable[..., Path],
    exported: Callable[..., Any],
    passes: dict[str, list[int]],
) -> None:
    pytest.importorskip({"llamacpp": "llama_cpp", "ort": "onnxruntime"}.get(runtime, "numpy"))
    model = {"llamacpp": lambda: gguf("llama", "Q8_0"), "ort": lambda: exported().path}.get(
        runtime, hf
    )()
    options = LoadOptions(runtime=runtime, threads=1, drafter="suffix")
    with open_engine(plan_engine(Source(str(model), quiet), options)) as engine:
        (counted,) = passes.values()
        invariant = engine.parts.model.capabilities.invariant_rows
        assert bool(counted) != invariant  # where rows agree by construction there is none
        if not invariant:
            again: list[int] = []
            count_passes(engine.parts.model, again)
            measure_batch_invariance(engine.parts.model, widths_for(options.most_rows))
            found = engine.parts.speculation_factory.lossless
            is_padded = found.plain_width > 1  # what that costs decides whether it is done
            # Sessions that were opened after the second call count twice.
            assert is_padded or len(counted) == 2 * len(again)
        for prompt in PROMPTS:
            before = len(counted)
            result = engine.generate(prompt, max_tokens=40)
            own = len(counted) - before
            assert own == result.stats.rounds > 0
    kept = [each.value for each in SECONDS.find()]
    assert len(kept) == 1 and min(kept[0].values()) > 0  # learnt of these answers


def test_a_draft_is_not_tried_before_the_first_answer(
    gguf: Callable[..., Path], passes: dict[str, list[int]]
) -> None:
    pytest.importorskip("llama_cpp")
    options = LoadOptions(
        runtime="llamacpp",
        draft=(str(gguf("llama", "F32")),),
        draft_runtime="llamacpp",
        drafter="draft-model",
        threads=1,
    )
    with load_engine(str(gguf("llama", "Q8_0")), options, quiet) as engine:
        draft = engine.parts.drafts[0]
        assert draft.step_s == 0  # not known: its first draft tokens tell
        result = engine.generate(PROMPTS[0], max_tokens=60)
        # It is asked; whether its draft tokens are worth their rows depends on the machine.
        assert "draft-model" in result.stats.policy and all(passes.values())
