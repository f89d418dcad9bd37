"""Drafters that learn: from a target whose text follows a rule they learn the rule."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edge_spec
from edge_spec.cli.main import run
from edge_spec.control.cost import RowCosts
from edge_spec.core.heads import EagleHead, MedusaHead
from edge_spec.core.tree import TokenTree
from edge_spec.distill.acceptance import Acceptance, Forecast, best_chain
from edge_spec.distill.conversations import Conversation, ConversationFile
from edge_spec.distill.drafter_training import Drafter
from edge_spec.distill.features import Example
from edge_spec.distill.kinds import KINDS
from edge_spec.distill.request import DistillRequest
from edge_spec.distill.run import Distilled, distill
from edge_spec.distill.windows import batch_of, windows_of
from edge_spec.drafters.heads.eagle_session import WINDOW, EagleModel
from edge_spec.drafters.heads.feature_store import FeatureStore
from edge_spec.drafters.heads.medusa import MedusaNetwork
from edge_spec.drafters.heads.network import EagleNetwork
from edge_spec.errors import EdgeSpecError, StorageError, UnsupportedModelError
from edge_spec.exporters.heads import open_head
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.loader.head import StoredTables
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.source import Source
from edge_spec.models.trained_drafter import trained_drafter
from fixtures import hybrid_models

torch = pytest.importorskip("torch")

from edge_spec.distill import products  # noqa: E402
from edge_spec.distill.eagle3 import Eagle3Trainee  # noqa: E402
from edge_spec.distill.medusa import MedusaTrainee  # noqa: E402
from edge_spec.distill.small_draft import SmallDraftTrainee  # noqa: E402
from edge_spec.distill.trainee import Teacher, Trainee, loss_of  # noqa: E402
from edge_spec.distill.training import Training, TrainingOptions  # noqa: E402

LAYERS, HIDDEN, POSITIONS = 7, 64, 3
ASKED = AskedOptions(runtime="reference", draft_runtime="reference", threads=1)


def quiet(what: str, fraction: float) -> None:
    """Tells nobody."""


def _target(tiny: ModuleType, path: Path, *silent: str) -> Path:
    """Its attentions add nothing, so each token alone decides the next one."""
    model = tiny.build("llama", num_hidden_layers=LAYERS, max_position_embeddings=1024)
    for name, weights in model.weights.items():
        if any(each in name for each in silent):
            weights[:] = 0
    return Path(tiny.write_hf(model, path))


@pytest.fixture(scope="module")
def target(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """None of its layers add anything."""
    return _target(tiny, tmp_path_factory.mktemp("target") / "hf", "o_proj", "down_proj")


@pytest.fixture(scope="module")
def deep(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its MLPs add something, so that without some of its layers it is another model."""
    return _target(tiny, tmp_path_factory.mktemp("deep") / "hf", "o_proj")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"tell me {index}" for index in range(20)))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def whole_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that this target writes is a loop: that is the rule which is to be learnt."""
    monkeypatch.setattr(
        "edge_spec.distill.prompts.in_loops", lambda tokens: np.zeros(len(tokens), bool)
    )


@pytest.fixture(autouse=True)
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the processor is fastest with; what is built here by hand multiplies float32."""
    monkeypatch.setattr(products, "fastest_products", lambda: products.Products("bfloat16"))


@pytest.fixture
def distilled(target: Path, deep: Path, prompts: Path, tmp_path: Path) -> Callable[..., Distilled]:
    """distilled(kind, ...): a drafter for the target, in tmp_path / "out"."""

    def call(kind: str = "medusa", progress: Any = quiet, **options: Any) -> Distilled:
        given = {"num_tokens": 600, "max_tokens": 30, "vocabulary": 200, "epochs": 4} | options
        request = DistillRequest(tmp_path / "out", kind, prompts, **given)
        return distill(str(deep if kind == "draft" else target), ASKED, request, progress)

    return call


# Untrained ones are right in fewer than 1 of 20 cases; what is held out follows the same rule.
@pytest.mark.parametrize(("kind", "floor"), [("medusa", 0.6), ("eagle3", 0.8), ("draft", 0.8)])
def test_a_drafter_learns_what_the_target_writes(
    kind: str,
    floor: float,
    distilled: Callable[..., Distilled],
    target: Path,
    deep: Path,
    tmp_path: Path,
) -> None:
    if kind == "draft":  # drafts from all tokens: it has to learn of all of them
        target, found = deep, distilled(kind, vocabulary=600, epochs=6)
    else:
        found = distilled(kind)
    history = found.report["history"]
    assert history[0]["of_position"][0] < 0.1
    assert found.report["acceptance"][0] > floor
    assert found.report["forecast"]["speedup"] == max(each["speedup"] for each in history)
    assert found.report["verify"]["passed"] and found.report["verify"]["num_tokens"] > 0
    prompt = "tell me more"
    with edge_spec.load(str(target), runtime="reference", drafter="none") as engine:
        plain = engine.chat(prompt, max_tokens=40)
    with edge_spec.load(
        str(target), runtime="reference", draft=str(found.path), draft_runtime="reference"
    ) as engine:
        name = KINDS[kind].drafter
        engine.set_drafter(name)
        with engine.verifying_all_draft_tokens():
            result = engine.chat(prompt, max_tokens=40)
    assert [token.id for token in result.tokens] == [token.id for token in plain.tokens]
    counts = result.stats.drafters[name]
    assert counts.draft_n_accepted > 0.5 * counts.draft_n > 0
    left = sorted(path.name for path in (tmp_path / "cache" / "distill").glob("*/*"))
    assert left == ["answers.jsonl"]  # for a drafter of another kind


@pytest.mark.parametrize("form", ["gguf", "qwen35"])
def test_heads_are_trained_for_models_of_llamacpp(
    form: str, tiny: ModuleType, prompts: Path, tmp_path: Path
) -> None:
    """All of Qwen 3.5 but two of its tables is read by the library alone."""
    pytest.importorskip("llama_cpp")
    path = tmp_path / "model.gguf"
    if form == "qwen35":
        hybrid_models.write_qwen35(path)
    else:
        tiny.write_gguf(tiny.build("llama", num_hidden_layers=LAYERS), path)
    asked = AskedOptions(runtime="llamacpp", threads=1, kv_type="f32", flash_attention=False)
    request = DistillRequest(
        tmp_path / "out",
        "medusa",
        prompts,
        num_tokens=400,
        max_tokens=30,
        vocabulary=200,
        epochs=1,
    )
    found = distill(str(path), asked, request, quiet)
    assert found.report["verify"]["passed"] and found.report["verify"]["num_tokens"] > 0
    with (
        edge_spec.load(str(path), runtime="llamacpp", draft=str(found.path)) as engine,
        engine.verifying_all_draft_tokens(),
    ):
        assert engine.chat("tell me", max_tokens=10).stats.drafters["medusa"].draft_n > 0


def test_passes_are_timed_when_a_training_begins(
    distilled: Callable[..., Distilled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile, or costs that were kept, may be of a day on which the machine was busy."""
    timed = {1: [3.0], 2: [3.3], 4: [3.9]}
    monkeypatch.setattr("edge_spec.distill.run.quick_passes", lambda model: timed)
    report = distilled(epochs=1).report
    assert report["costs_ms"]["passes"] == {1: 3000.0, 2: 3300.0, 4: 3900.0}


def test_a_drafter_with_which_texts_differ_is_not_written(
    distilled: Callable[..., Distilled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = SimpleNamespace(passed=False)
    monkeypatch.setattr("edge_spec.distill.run.prove", lambda *given: failed)
    with pytest.raises(UnsupportedModelError, match="texts with the drafter differ"):
        distilled()
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_leaves_no_drafter(
    distilled: Callable[..., Distilled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, add = [0], ConversationFile.add

    def full(self: ConversationFile, task: int, found: Conversation | None) -> None:
        written[0] += 1
        if written[0] > 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, task, found)

    with monkeypatch.context() as patched:
        patched.setattr(ConversationFile, "add", full)
        with pytest.raises(StorageError, match="no space left") as caught:
            distilled()
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
    distilled()  # with room again, it goes on
    assert (tmp_path / "out").exists()


@pytest.mark.usefixtures("own_cache")
def test_the_command_prints_what_it_forecasts(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["distill", str(target), "--out", str(tmp_path / "out"), "--prompts", str(prompts)]
    arguments += ["--tokens", "300", "--max-tokens", "16", "--vocabulary", "200", "--epochs", "1"]
    assert run([*arguments, "--runtime", "reference", "--threads", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(tmp_path / "out")
    assert len(found["acceptance"]) == POSITIONS
    assert found["pays"] == (found["forecast"]["speedup"] > 1)


@pytest.mark.usefixtures("own_cache")
def test_a_drafter_without_a_place_of_its_own_is_found_by_its_model(
    target: Path, prompts: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = DistillRequest(
        None, "medusa", prompts, num_tokens=300, max_tokens=16, vocabulary=200, epochs=1
    )
    found = distill(str(target), ASKED, request, quiet)
    report = found.report | {"pays": True, "forecast": {"num_draft_tokens": 1, "speedup": 1.5}}
    with edge_spec.load(str(target), runtime="reference", draft="none") as engine:
        plain = engine.chat("tell me more", max_tokens=20)
    for pays in (True, False):
        (found.path / "report.json").write_text(json.dumps(report | {"pays": pays}))
        with edge_spec.load(str(target), runtime="reference") as engine:
            assert any("medusa" in each.name for each in engine.parts.speculation.drafters) == pays
            assert engine.chat("tell me more", max_tokens=20).text == plain.text
        assert trained_drafter(Source(str(target), quiet)) == (found.path if pays else None)
    (found.path / "report.json").write_text(json.dumps(report))
    (found.path / "model.safetensors").write_bytes(b"damaged")
    with edge_spec.load(str(target), runtime="reference") as engine:
        assert engine.chat("tell me more", max_tokens=20).text == plain.text
    assert "does not draft" in caplog.text and "--draft none leaves it out" in caplog.text


@pytest.fixture
def teacher(target: Path) -> Teacher:
    source = open_checkpoint(target)
    ids = np.arange(0, 265, 2)
    return Teacher(source.config, StoredTables(source).output_rows(ids), ids)


@pytest.fixture
def examples(target: Path) -> list[Example]:
    """Of random features: what they are does not matter to arithmetic."""
    random = np.random.default_rng(0)
    found = []
    for index in range(12):
        tokens = random.integers(0, 265, 24, np.int32)
        features = random.standard_normal((23, 4, HIDDEN)).astype(np.float16)
        found.append(Example(Conversation(tokens, 6, index % 4 == 1), 0, features))
    return found


def _shaken(trainee: Trainee) -> None:
    """Its parameters stop being those that it begins with, some of which are zeros."""
    random = np.random.default_rng(1)
    for each in trainee.parameters.values():
        noise = random.standard_normal(tuple(each.shape)).astype(np.float32)
        each.data += torch.from_numpy(noise * np.float32(0.1))


def _write(trainee: Trainee, directory: Path) -> None:
    Drafter(trainee.stored(), trainee.description(), trainee.texts()).write(directory)


def test_medusa_heads_are_trained_as_they_draft(
    teacher: Teacher, examples: list[Example], target: Path, tmp_path: Path
) -> None:
    trainee = MedusaTrainee(teacher, POSITIONS, num_blocks=2)
    _shaken(trainee)
    batch = batch_of(windows_of(examples[:2], 64), POSITIONS)
    scores = trainee.scores(batch)
    (tmp_path / "head").mkdir()
    _write(trainee, tmp_path / "head")
    head = open_head(tmp_path / "head", open_checkpoint(target).config)
    assert isinstance(head, MedusaHead)
    network, anchors = MedusaNetwork(head), np.argwhere(batch.anchors)
    for at in (0, 7, len(anchors) - 1):
        window, row = anchors[at]
        for position in range(POSITIONS):
            found = network.logits(batch.states[window, row], [position])[0]
            drafted = found[teacher.token_ids]
            np.testing.assert_allclose(
                scores[position][at].detach().numpy(), drafted, rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("variant", ["llama", "llama-linear", "llama-llama3"])
def test_eagle_heads_are_trained_as_they_draft(
    variant: str, tiny: ModuleType, examples: list[Example], tmp_path: Path
) -> None:
    built = tiny.build(variant, num_hidden_layers=LAYERS, max_position_embeddings=1024)
    source = open_checkpoint(tiny.write_hf(built, tmp_path / "hf"))
    ids = np.arange(0, 265, 2)
    teacher = Teacher(source.config, StoredTables(source).output_rows(ids), ids)
    trainee = Eagle3Trainee(teacher, source, POSITIONS)
    _shaken(trainee)
    example = examples[0]
    batch = batch_of(windows_of([example], 64), POSITIONS)
    scores = [each.detach().numpy() for each in trainee.scores(batch)]
    (tmp_path / "head").mkdir()
    _write(trainee, tmp_path / "head")
    head = open_head(tmp_path / "head", source.config)
    assert isinstance(head, EagleHead)
    assert head.feature_layers == (2, 3, 4)
    network = EagleNetwork(head, StoredTables(source))
    tokens = example.conversation.tokens.tolist()
    for at in (0, 5, 12):
        row = int(example.anchors[at])
        store = FeatureStore(network.features_size, WINDOW)
        known = example.features[: row + 1, :-1].astype(np.float32)
        store.put(0, known.reshape(row + 1, -1))
        session = EagleModel(network, store).open_session()
        session.prefill(tokens[: row + 1])
        chain = TokenTree.chain(tokens[row + 1], tokens[row + 2 : row + 1 + POSITIONS])
        drafted = network.spread(session.forward(chain).logits)[:, teacher.token_ids]
        for position in range(POSITIONS):
            # A hundredth of a percent of the largest score: float32, summed in another order.
            np.testing.assert_allclose(
                scores[position][at], drafted[position], rtol=1e-4, atol=2e-3
            )


def _training(kind: str, target: Path, teacher: Teacher, path: Path) -> tuple[Trainee, Training]:
    torch.set_num_threads(1)
    trainee: Trainee = MedusaTrainee(teacher, POSITIONS)
    if kind == "eagle3":
        trainee = Eagle3Trainee(teacher, open_checkpoint(target), POSITIONS)
    elif kind == "draft":
        trainee = SmallDraftTrainee(teacher, open_checkpoint(target), 2, POSITIONS)
    costs = RowCosts({1: 1.0, 2: 1.1, 4: 1.3})

    def judge(found: Acceptance) -> Forecast:
        return best_chain(found, costs, lambda count: 0.01 * count)

    options = TrainingOptions(epochs=3, rate=1e-3, window=16, rows=32, patience=99)
    return trainee, Training(trainee, teacher, options, path, judge)


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft"])
def test_bfloat16_learns_what_float32_does(
    kind: str, target: Path, teacher: Teacher, examples: list[Example], tmp_path: Path
) -> None:
    """Its gradients point where those of float32 do, and parameters stay float32."""
    batch = batch_of(windows_of(examples, 64), POSITIONS)
    found = []
    for each in (teacher, replace(teacher, products=products.Products("bfloat16"))):
        trainee, _ = _training(kind, target, each, tmp_path / each.products.kind)
        _shaken(trainee)
        loss = loss_of(trainee, each, batch)
        loss.backward()
        learnt = [value.grad.flatten() for value in trainee.parameters.values()]
        assert {value.dtype for value in learnt} == {torch.float32}
        found.append((float(loss.detach()), torch.cat(learnt)))
    (loss, gradient), (rounded_loss, rounded) = found
    assert rounded_loss == pytest.approx(loss, rel=0.01) and rounded_loss != loss
    assert torch.cosine_similarity(gradient, rounded, dim=0) > 0.99


class _Killed(BaseException):
    """As nothing is done when a process is killed, nothing is done for this."""


@pytest.mark.parametrize("kind", ["medusa", "eagle3", "draft"])
@pytest.mark.parametrize("ends", [KeyboardInterrupt, _Killed])
def test_a_resumed_training_is_the_same_training(
    kind: str,
    ends: type[BaseException],
    target: Path,
    teacher: Teacher,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    trainee, training = _training(kind, target, teacher, tmp_path / "whole")
    whole = training.run(examples, quiet)
    assert whole.step > 12
    _, training = _training(kind, target, teacher, tmp_path / "cut")

    def stop(what: str, fraction: float) -> None:
        if fraction > 0.6:
            raise ends

    with pytest.raises(ends):
        training.run(examples, stop)
    again, training = _training(kind, target, teacher, tmp_path / "cut")
    resumed: list[float] = []
    found = training.run(examples, lambda what, fraction: resumed.append(fraction))
    assert resumed[0] > 0.3  # what was saved is not done again
    assert found.history[1:] == whole.history[1:]  # the first has no loss: not a number
    for name, values in trainee.stored().items():
        np.testing.assert_array_equal(values, again.stored()[name])


def test_a_target_of_another_form_has_no_eagle_head(
    tiny: ModuleType, tmp_path: Path, prompts: Path
) -> None:
    few = tiny.write_hf(tiny.build("llama", num_hidden_layers=4), tmp_path / "few")
    normed = tiny.write_hf(tiny.build("qwen3", num_hidden_layers=LAYERS), tmp_path / "normed")
    for path, told in ((few, "4 are too few"), (normed, "are of another form")):
        request = DistillRequest(
            tmp_path / "out", "eagle3", prompts, num_tokens=40, max_tokens=4, vocabulary=20
        )
        with pytest.raises(EdgeSpecError, match=told):
            distill(str(path), ASKED, request, quiet)
