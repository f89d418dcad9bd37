"""Pair bundles of tiny models, opened by the real runtimes with the draft that they carry."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from edge_spec import Grammar, SamplingParams, load
from edge_spec.core.model import RuntimeOptions
from edge_spec.engine.results import FinishReason
from edge_spec.errors import BundleError, UsageError
from edge_spec.models.asked_options import AskedOptions
from edge_spec.models.draft_choice import chosen_drafts
from edge_spec.models.model_plan import prepare_model
from edge_spec.models.source import Source
from fixtures.silence import quiet

FORMATS = {"ort": "onnx", "llamacpp": "gguf", "reference": "gguf"}


@pytest.mark.parametrize("runtime", FORMATS)
def test_each_runtime_opens_the_variant_that_it_reads(pair: Path, runtime: str) -> None:
    if runtime == "llamacpp":
        pytest.importorskip("llama_cpp")
    for source, num_layers in ((pair, 2), (pair / "draft", 1)):
        how = RuntimeOptions(threads=None if runtime == "reference" else 1)
        prepared = prepare_model(Source(str(source), quiet), runtime, quiet, how)
        variant = prepared.source.path.relative_to(pair.resolve()).parts
        assert variant[1] == FORMATS[runtime]
        model = prepared.open()
        assert model.config.num_layers == num_layers
        model.close()


def test_auto_takes_the_runtime_whose_format_is_there(pair: Path) -> None:
    pytest.importorskip("llama_cpp")
    manifest = json.loads((pair / "pair.json").read_text())
    del manifest["target"]["variants"][1]
    (pair / "pair.json").write_text(json.dumps(manifest))
    source = Source(str(pair), quiet)
    assert prepare_model(source, "auto", quiet).runtime.reads == "onnx"
    with pytest.raises(UsageError, match="its target as onnx, not as gguf"):
        prepare_model(source, "llamacpp", quiet)
    assert prepare_model(Source(str(pair / "draft"), quiet), "auto", quiet).runtime.reads == "gguf"


def test_the_bundled_draft_draft_tokens_and_the_text_stays_the_same(pair: Path) -> None:
    answers = []
    for draft in (None, "none"):
        drafter = "draft-model" if draft is None else "none"
        with load(
            str(pair), runtime="ort", draft=draft, drafter=drafter, exact=True, threads=1
        ) as llm:
            answers.append([token.id for token in llm.generate("the", max_tokens=24).tokens])
            assert [each.model.config.num_layers for each in llm.parts.drafts] == (
                [1] if draft is None else []
            )
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("fixed_policy")
def test_the_draft_keeps_to_the_form_of_the_answer(pair: Path) -> None:
    """Draft and target choose among the same tokens; greedy and seeded text is the plain one, and
    what a draft sampled on its own fits the form too."""
    grammar = Grammar.json_schema({"type": "array", "items": {"enum": ["a", "b", 1, 2, None]}})
    seeded = SamplingParams(temperature=1.0, seed=4)
    answers = []
    for drafter in ("draft-model", "none"):
        with load(str(pair), runtime="ort", drafter=drafter, exact=True, threads=1) as llm:
            answers.append(
                [
                    llm.generate("the", max_tokens=40, grammar=grammar, sampling=sampling).text
                    for sampling in (SamplingParams(), seeded)
                ]
            )
    assert answers[0] == answers[1]
    with load(str(pair), runtime="ort", drafter="draft-model", threads=1) as llm:
        accepted = 0
        for seed in range(20):
            sampling = SamplingParams(temperature=1.0, seed=seed)
            result = llm.generate("the", max_tokens=60, grammar=grammar, sampling=sampling)
            accepted += result.stats.drafters["draft-model"].draft_n_accepted
            if result.finish_reason == FinishReason.STOP:
                assert set(json.loads(result.text)) <= {"a", "b", 1, 2, None}
            else:
                assert re.fullmatch(r'\[(("[ab]"|1|2|null)(, )?)*("?[ab]?"?|n|nu|nul)', result.text)
        assert accepted > 0


def test_who_asks_for_other_drafters_or_no_draft_gets_none(pair: Path, hf: Any) -> None:
    source = Source(str(pair), quiet)
    bundled = (str(pair / "draft"),)
    for named, drafter, expected in (
        (None, "auto", bundled),
        (None, "suffix,draft-model", bundled),
        (None, "suffix", ()),
        (None, "none", ()),
        ("none", "auto", ()),
        (["other.gguf"], "auto", ("other.gguf",)),
    ):
        asked = AskedOptions(draft=named, drafter=drafter)
        assert chosen_drafts(source, asked) == expected
    assert chosen_drafts(Source(str(hf()), quiet), AskedOptions()) == ()


def test_a_variant_that_was_changed_is_not_opened(pair: Path) -> None:
    graph = pair / "target/onnx/model.onnx"
    graph.write_bytes(graph.read_bytes() + b"x")
    with pytest.raises(BundleError, match=r"model\.onnx has"):
        load(str(pair), runtime="ort", draft="none")
