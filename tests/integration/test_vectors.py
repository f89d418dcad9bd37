"""docs/vectors holds what this implementation computes, and says all that it takes to compute it.

Everything is read back from the JSON; only the tiny model of generation.json comes from its
generator, as it does for the author of a port.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_spec.core.config import ModelConfig
from edge_spec.core.export import ExportOptions
from edge_spec.core.model import Model, RuntimeOptions
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.models import runtimes
from edge_spec.models.bundle import open_bundle
from edge_spec.runtimes.reference import ReferenceModel
from fixtures import make_vectors, tolerance
from fixtures import tiny_generation as generation
from fixtures import vector_values as values

VECTORS = Path(__file__).parents[2] / "docs" / "vectors"
MOST_BYTES = 300_000  # a port copies the files into its own repository
FLOAT64 = 1e-12  # relative; logarithms and powers of two libraries differ by 1e-15


def cases(name: str) -> list[Any]:
    found: list[Any] = json.loads((VECTORS / f"{name}.json").read_text("utf-8"))["cases"]
    return found


def named(name: str) -> Any:
    return pytest.mark.parametrize("case", cases(name), ids=lambda case: case["name"])


def test_the_files_are_what_the_generator_writes(tiny_model: Path, tmp_path: Path) -> None:
    """Twice the same bytes. On another processor float32 sums are made in another order, and the
    last digits of float64 logarithms differ, too."""
    scores = near_scores(open_checkpoint(tiny_model).config)
    for directory in (tmp_path / "first", tmp_path / "second"):
        make_vectors.write(directory)
    written = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert written == sorted(path.name for path in VECTORS.iterdir())
    for name in written:
        made = (tmp_path / "first" / name).read_bytes()
        assert made == (tmp_path / "second" / name).read_bytes()
        described = json.loads((VECTORS / name).read_bytes())
        near = {"abs": scores} if name == "generation.json" else {"rel": FLOAT64}
        require_same(json.loads(made), described, near, name)
    assert sum((VECTORS / name).stat().st_size for name in written) < MOST_BYTES


def near_scores(config: ModelConfig) -> float:
    """How far float32 logits may be from those of generation.json, which has six digits of them."""
    rounds = [each for case in cases("generation") for each in case["rounds"]]
    largest = max(abs(logit) for each in rounds for row in each["logits"] for logit in row)
    positions = max(each["length"] + len(each["tree"]["tokens"]) for each in rounds)
    bound: float = tolerance.float32_tolerance(config, positions, largest)
    return bound + float(tolerance.WRITTEN) * largest


def require_same(found: Any, expected: Any, near: dict[str, float], where: str) -> None:
    if isinstance(expected, float):
        assert found == pytest.approx(expected, **near), where
        return
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            require_same(found[key], value, near, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            require_same(found[i], value, near, f"{where} {i}")
    else:
        assert found == expected, where


@named("trees")
def test_trees_are_replayed(case: Any) -> None:
    tree = values.tree_of(case)
    assert tree.depths.tolist() == case["depths"]
    assert tree.ancestors.astype(int).tolist() == case["ancestors"]
    assert [tree.path(row) for row in range(len(tree))] == case["paths"]


@named("sampling")
def test_probabilities_are_replayed(case: Any) -> None:
    assert make_vectors.target_probs(case) == pytest.approx(case["target_probs"], rel=FLOAT64)


@pytest.mark.parametrize("case", cases("races"), ids=lambda case: case["key"])
def test_races_are_replayed(case: Any) -> None:
    given = {name: case[name] for name in ("key", "sampling", "logits")}
    require_same(make_vectors.race(given), case, {"rel": FLOAT64}, case["key"])


@named("verification")
def test_verdicts_are_replayed_with_the_draws_that_are_given(case: Any) -> None:
    """And take all of them: a draw too many or too few would shift every later one."""
    sampler = values.sampler_of(case["sampling"], case["draws"])
    verdict = values.verified(values.tree_of(case["tree"]), case["logits"], sampler)
    assert verdict == case["verdict"]
    assert sampler.consumed() == case["draws"]


@named("suffix")
def test_suffix_chains_are_replayed(case: Any) -> None:
    assert make_vectors.proposed(case["text"], case["most"]) == case["chain"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(generation.write_model(tmp_path_factory.mktemp("vectors") / "tiny"))


# How far half precision may be from float32: less than half of the smallest margin of these texts,
# or a decision might turn. 0.042 to 0.044 was seen with kernels for SSE3, AVX2 and AVX-512: what is
# rounded (epsilon is 1e-3) is the same on all, and few sums fall on the other side of a rounding.
HALF = 0.1
OPENED = {  # export options
    "reference": None,
    "ort": ExportOptions("fp32", check=False),
    "coreml-gpu": ExportOptions("fp16", check=False, compute="gpu"),
    "coreml-ane": ExportOptions("fp16", check=False, compute="ane"),
}


@pytest.fixture(scope="module", params=sorted(OPENED))
def opened(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Model, float]:
    """The tiny model in each format that this suite can run, and how far its logits may be."""
    options = OPENED[request.param]
    if request.param.startswith("coreml"):
        pytest.importorskip("coremltools")
    checkpoint = open_checkpoint(tiny_model)
    if options is None:
        return ReferenceModel(checkpoint), near_scores(checkpoint.config)
    runtime = runtimes.load_runtime(request.param.partition("-")[0])
    out = tmp_path_factory.mktemp("bundle") / "tiny"
    exporter = runtimes.load_exporter(runtime.reads)
    exporter.export(checkpoint, out, options, lambda what, fraction: None)
    near = near_scores(checkpoint.config) if options.quantization == "fp32" else HALF
    if runtime.name == "coreml":  # in numpy: Core ML itself runs on macOS only
        from fixtures.coreml_in_numpy import open_in_numpy

        return open_in_numpy(open_bundle(out)), near
    return runtime.open(open_bundle(out), RuntimeOptions()), near


@pytest.mark.filterwarnings("ignore:Implicitly cleaning up:ResourceWarning")  # coremltools'
@named("generation")
def test_generations_are_replayed(case: Any, opened: tuple[Model, float]) -> None:
    model, near = opened
    session = model.open_session()
    session.prefill(case["prompt"][:-1])
    text: list[int] = []
    for described in case["rounds"]:
        tree = values.tree_of(described["tree"])
        assert session.length == described["length"]
        assert tree.tokens[0] == [*case["prompt"], *text][-1]
        logits = session.forward(tree).logits
        np.testing.assert_allclose(logits, described["logits"], rtol=0, atol=near)
        verdict = values.verified(tree, logits, Sampler(SamplingParams(), []))
        tokens = cut(verdict["tokens"], case["stop_ids"], case["max_tokens"] - len(text))
        kept = verdict["kept"][: len(tokens)]
        assert kept == described["kept"]
        session.commit(kept)
        text += tokens
    assert text == case["text"]
    assert len(text) == case["max_tokens"] or text[-1] in case["stop_ids"]


def cut(tokens: list[int], stop_ids: list[int], most: int) -> list[int]:
    stops = [i for i, token in enumerate(tokens) if token in stop_ids]
    return tokens[: min([most, *(i + 1 for i in stops)])]
