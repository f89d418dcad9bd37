"""The gradient is that of the loss, and heads learn a rule."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.learning.head_training import HeadTraining, load_training, save_training
from edge_spec.learning.texts import LearntText, as_kept
from edge_spec.learning.training import Examples, Heads, Teacher, bias_name, weight_name
from edge_spec.testing.scripted import smallest_config

HIDDEN, VOCAB = 24, 40


def config(**changes: object) -> ModelConfig:
    values = smallest_config("scripted", VOCAB, 100).to_dict()
    return ModelConfig.from_dict({**values, "hidden_size": HIDDEN, **changes})


def teacher_of(cap: float | None = None, scored: int = VOCAB) -> Teacher:
    random = np.random.default_rng(0)
    ids = np.sort(random.permutation(VOCAB)[:scored])
    output = random.normal(size=(VOCAB, HIDDEN)).astype(np.float32)[ids]
    return Teacher(config(logit_softcap=cap), output, ids)


def text(tokens: np.ndarray, seed: int = 1) -> LearntText:
    """In states that score these tokens highest, by the output matrix of all tokens."""
    random = np.random.default_rng(seed)
    output = teacher_of().output
    states = 0.5 * output[tokens] + 0.1 * random.normal(size=(len(tokens), HIDDEN))
    return LearntText((0,), tokens, as_kept(states))


def cycle(start: int, count: int) -> LearntText:
    """Each token has one that follows it."""
    order = np.random.default_rng(7).permutation(VOCAB)
    return text(order[(start + np.arange(count)) % VOCAB], start)


@pytest.mark.parametrize("cap", [None, 5.0])
def test_the_gradient_is_that_of_the_loss(cap: float | None) -> None:
    teacher = teacher_of(cap, scored=30)
    examples = teacher.examples([cycle(0, 12), cycle(5, 9)])
    rows = np.arange(len(examples))
    heads = Heads.untrained(HIDDEN)
    random = np.random.default_rng(3)
    for values in heads.parameters.values():
        values += 0.1 * random.normal(size=values.shape).astype(np.float32)
    _, gradients = heads._gradients(teacher, examples, rows)
    for name in (weight_name(0), weight_name(2), bias_name(1)):
        direction = random.normal(size=gradients[name].shape).astype(np.float32)
        direction /= np.linalg.norm(direction)
        before = heads.parameters[name].copy()
        losses = []
        for sign in (1, -1):
            heads.parameters[name] = before + np.float32(sign * 1e-2) * direction
            losses.append(heads.loss(teacher, examples, rows))
        heads.parameters[name] = before
        # float32 sums of a loss of about 10 are exact to some 1e-6, which the step divides by 0.02;
        # what the step's square leaves out is of its order, 1e-4 of the curvature.
        assert np.vdot(gradients[name], direction) == pytest.approx(
            (losses[0] - losses[1]) / 2e-2, rel=2e-2, abs=1e-3
        )


def test_it_is_the_loss_that_distill_has() -> None:
    torch = pytest.importorskip("torch")
    from edge_spec.distill.conversations import Conversation
    from edge_spec.distill.features import Example
    from edge_spec.distill.medusa import MedusaTrainee
    from edge_spec.distill.trainee import Teacher as TorchTeacher
    from edge_spec.distill.trainee import loss_of
    from edge_spec.distill.windows import batch_of, windows_of

    ours = teacher_of(scored=30)
    theirs = TorchTeacher(ours.config, ours.output, ours.token_ids)
    found = cycle(3, 20)
    tokens = np.concatenate([[0], found.tokens]).astype(np.int32)
    example = Example(Conversation(tokens, 1, False), 0, found.states[:, None])
    trainee = MedusaTrainee(theirs, 3)
    heads = Heads.untrained(HIDDEN)
    random = np.random.default_rng(3)
    for name, values in heads.parameters.items():
        values += 0.1 * random.normal(size=values.shape).astype(np.float32)
        trainee.parameters[name] = torch.tensor(values)
    expected = loss_of(trainee, theirs, batch_of(windows_of([example], 64), 3))
    examples = ours.examples([found])
    rows = np.arange(len(examples))
    assert heads.loss(ours, examples, rows) == pytest.approx(float(expected), rel=1e-4)


def learnt_and_held_out(teacher: Teacher) -> tuple[Examples, Examples]:
    learnt = teacher.examples([cycle(start, 60) for start in range(0, VOCAB, 3)])
    return learnt, teacher.examples([cycle(start, 60) for start in (1, 20)])


def yes() -> bool:
    return True


def test_heads_learn_what_follows() -> None:
    teacher = teacher_of()
    learnt, held_out = learnt_and_held_out(teacher)
    training = HeadTraining(Heads.untrained(HIDDEN), 1, is_first=True)
    rows = np.arange(len(held_out))
    before = training.heads.loss(teacher, held_out, rows)
    assert training.run(teacher, learnt, held_out, yes, lambda kept: None)
    after = Heads(training.result()).loss(teacher, held_out, rows)
    assert after < 0.75 * before  # 0.65 here; a step in another direction raises it


def test_a_training_that_was_interrupted_is_the_same_one(tmp_path: Path) -> None:
    teacher = teacher_of()
    learnt, held_out = learnt_and_held_out(teacher)
    whole = HeadTraining(Heads.untrained(HIDDEN), 1, is_first=True)
    whole.run(teacher, learnt, held_out, yes, lambda kept: None)
    asked = iter([True] * 17 + [False])
    part = HeadTraining(Heads.untrained(HIDDEN), 1, is_first=True)

    def keep(training: HeadTraining) -> None:
        save_training(tmp_path / "training", training)

    assert not part.run(teacher, learnt, held_out, lambda: next(asked), keep)
    again = load_training(tmp_path / "training", HIDDEN)
    assert again is not None and again.step == 17
    again.run(teacher, learnt, held_out, yes, keep)
    assert again.step == whole.step
    for name, values in whole.result().items():
        np.testing.assert_array_equal(again.result()[name], values)


@pytest.mark.parametrize("count", [0, 9, 400, -1])
def test_a_damaged_training_begins_again(
    count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "training"
    save_training(path, HeadTraining(Heads.untrained(HIDDEN), 1, is_first=True))
    path.write_bytes(path.read_bytes()[:count])
    assert load_training(path, HIDDEN) is None
    assert "begins again" in caplog.text


def test_a_training_of_another_width_begins_again(tmp_path: Path) -> None:
    save_training(
        tmp_path / "training", HeadTraining(Heads.untrained(HIDDEN + 1), 1, is_first=True)
    )
    assert load_training(tmp_path / "training", HIDDEN) is None
    assert load_training(tmp_path / "missing", HIDDEN) is None


def test_training_ends_where_what_is_held_out_gets_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = teacher_of()
    learnt, held_out = learnt_and_held_out(teacher)
    losses = iter([2.0, 1.0, 3.0, 4.0, 0.5])
    monkeypatch.setattr(Heads, "loss", lambda *given: next(losses))
    training = HeadTraining(Heads.untrained(HIDDEN), 1, is_first=True)
    assert training.run(teacher, learnt, held_out, yes, lambda kept: None)
    assert next(losses) == 0.5  # four epochs were enough
    assert training.best_loss == 1.0
    assert not np.array_equal(
        training.result()[weight_name(0)], training.heads.parameters[weight_name(0)]
    )
