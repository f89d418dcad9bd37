"""Two models that run in different libraries: the text is the target's own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.scheduler.lossless import ExactPolicy
from edge_spec.scheduler.policy import FixedPolicy, Policy
from fixtures.tiny_models import build, write_gguf

pytestmark = pytest.mark.model

PROMPTS = ["What is the capital of France?", "Count from one to ten."]
COUNT = 32


@pytest.fixture(scope="module")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with 265 tokens."""
    return write_gguf(build(), tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def always_draft(engine: Engine) -> None:
    """Whether or not it pays on this machine."""
    policy: Policy = FixedPolicy(branches=False)
    if widths := engine.parts.speculation_factory.lossless.widths:  # else any will do
        policy = ExactPolicy(policy, widths)
    engine._drafting.speculation = replace(engine._drafting.speculation, policy=policy)


def answers(model: str, **options) -> tuple[list[list[int]], int]:
    """The tokens of each answer, and how many of them were drafted."""
    # Exact mode: a near tie may not fall on another side in a wider pass.
    draft = options.pop("draft", None)
    # One thread waits for no other: another worker shares the cores.
    options |= {"context_length": 256, "threads": 1}
    loaded = LoadOptions(exact=True, draft=(draft,) if draft else (), **options)
    with load_engine(model, loaded, lambda what, fraction: None) as engine:
        if draft:
            always_draft(engine)
        results = [engine.chat(prompt, max_tokens=COUNT) for prompt in PROMPTS]
    tokens = [[token.id for token in result.tokens] for result in results]
    return tokens, sum(result.stats.draft_n_accepted for result in results)


@pytest.mark.slow  # by default a tiny model drafts in another library
@pytest.mark.parametrize("target", ["onnx", "gguf"])
def test_a_draft_in_another_library_leaves_the_text_as_it_is(target, demo_gguf):
    pytest.importorskip("llama_cpp")
    sides = {"gguf": (str(demo_gguf), "llamacpp"), "onnx": ("smollm2", "ort")}
    (model, runtime), (draft, draft_runtime) = sides.pop(target), *sides.values()
    plain, _ = answers(model, runtime=runtime, drafter="none")
    drafted, accepted = answers(model, runtime=runtime, draft=draft, draft_runtime=draft_runtime)
    assert drafted == plain
    # It is the same model in another quantization.
    assert accepted > sum(map(len, plain)) // 4


def test_a_draft_with_another_vocabulary_is_read_through_its_text(other_vocabulary):
    pytest.importorskip("llama_cpp")
    plain, _ = answers("smollm2", runtime="llamacpp", drafter="none")
    draft = str(other_vocabulary)
    options = LoadOptions(
        runtime="llamacpp", drafter="draft-model", draft=(draft,), draft_runtime="ort",
        exact=True, context_length=256,
    )  # fmt: skip
    with load_engine("smollm2", options, lambda what, fraction: None) as engine:
        always_draft(engine)
        drafted = [engine.chat(prompt, max_tokens=COUNT) for prompt in PROMPTS]
        (drafter,) = engine.parts.speculation.drafters
    assert [[token.id for token in result.tokens] for result in drafted] == plain
    assert drafter.fault is None


def test_a_gguf_file_runs_as_it_is(edge_spec, other_vocabulary, tmp_path):
    """A tiny one: how its rows differ is measured, as its cache is empty."""
    pytest.importorskip("llama_cpp")
    cache = tmp_path / "cache"
    done = edge_spec(
        "generate",
        str(other_vocabulary),
        PROMPTS[1],
        *("--runtime", "llamacpp", "--max-tokens", "12", "--json"),
        EDGE_SPEC_CACHE=str(cache),
    )
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["stats"]["predicted_n"] == len(document["tokens"]) > 1
    kept = {path.name for path in cache.iterdir()}
    assert "measurements" in kept and "bundles" not in kept  # measured; nothing was converted


@pytest.mark.slow  # by default tests/e2e/test_pair_bundle.py opens a draft
def test_the_command_line_tells_whose_draft_token_was_right(edge_spec, demo_gguf):
    pytest.importorskip("llama_cpp")
    done = edge_spec(
        "generate",
        PROMPTS[1],
        *("--draft", str(demo_gguf), "--draft-runtime", "llamacpp"),
        *("--max-tokens", "24", "--json"),
    )
    assert done.returncode == 0
    assert re.match(r"Loading target smollm2 on \w+ \d+ MB \+ draft .* MB = ", done.stderr)
    tokens = json.loads(done.stdout)["tokens"]
    accepted = [token for token in tokens if token["origin"] == "accepted"]
    assert {token["drafter"] for token in accepted} <= {"suffix", "cascade"}
