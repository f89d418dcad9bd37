"""Encoder-decoders: a source is read once, and all that drafts for a decoder drafts for them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest

from edge_spec import Engine, load
from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.core import sampling
from edge_spec.core.model_parts import Encoder
from edge_spec.core.sampling import SamplingParams
from edge_spec.core.source_session import SourceSession
from edge_spec.core.tree import TokenTree
from edge_spec.errors import UnknownArchitectureError, UnsupportedModelError, UsageError
from edge_spec.exporters.reader import open_checkpoint
from edge_spec.runtimes.reference import ReferenceModel, ReferenceSession
from fixtures import t5_models
from fixtures import text_distribution as text
from fixtures.axes import each

SOURCE = "translating the cat"
LENGTH = 24  # tokens of an answer
BART: dict[str, Any] = {"decoder_start_token_id": t5_models.END, "forced_bos_token_id": 5}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return t5_models.write(tmp_path_factory.mktemp("t5") / "target")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one of the same vocabulary."""
    return t5_models.write(tmp_path_factory.mktemp("t5") / "draft", "t5")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def engine(target: Path, cached: None) -> Iterator[Engine]:
    with load(str(target), runtime="reference", drafter="none") as opened:
        yield opened


class Watched(ReferenceSession):
    """Keeps the sources that it was given."""

    def attend_to(self, source: Sequence[int]) -> None:
        self.sources = [*getattr(self, "sources", ()), list(source)]
        super().attend_to(source)


@pytest.fixture
def session(target: Path) -> Callable[[], tuple[SourceSession, Watched]]:
    model = ReferenceModel(open_checkpoint(target))

    def opened() -> tuple[SourceSession, Watched]:
        decoder = Watched(model)
        return SourceSession(decoder, Encoder(3, t5_models.PAD), 64), decoder

    return opened


def test_a_source_is_encoded_once_for_all_its_answers(session: Callable[..., tuple]) -> None:
    """Until it changes, also where its tokens come one by one and answers are rolled back."""
    source, decoder = session()
    for token in (5, 6, 7, t5_models.END):
        source.prefill([token])
    for answer in (11, 12):
        source.forward(TokenTree.chain(t5_models.PAD, [answer]))
        source.commit([0, 1])
        source.prefill([answer])
        assert source.length == 7
        source.rollback(4)
    assert decoder.sources == [[5, 6, 7, t5_models.END]]
    source.rollback(2)
    source.prefill([8, t5_models.PAD, 9])
    assert source.length == 5 and decoder.sources[1:] == [[5, 6, 8]]


def test_the_next_source_is_encoded_before_an_answer_also_after_a_restore(
    session: Callable[..., tuple],
) -> None:
    """It ends as the one before did."""
    first, _ = session()
    first.prefill([5, 6, t5_models.END, t5_models.PAD, 11])
    restored, decoder = session()
    restored.restore(first.state(), first.length)
    restored.rollback(0)
    restored.prefill([7, t5_models.END])
    assert decoder.sources == [[7, t5_models.END]]


def test_a_source_that_changes_at_its_end_changes_all_scores(
    session: Callable[..., tuple],
) -> None:
    """An encoder sees later tokens: nothing of the shorter source may be left."""
    found = []
    for before in ([], [5, 6, 9, t5_models.END]):
        source, _ = session()
        source.prefill(before)
        source.forward(TokenTree.chain(t5_models.PAD))
        source.rollback(len(before) // 2)
        source.prefill([5, 6, 7, 8, t5_models.END][source.length :])
        found.append(source.forward(TokenTree.chain(t5_models.PAD)).logits.copy())
    np.testing.assert_array_equal(*found)


# Of each kind, what the target and its draft have that the other has not.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "t5-gated": ({}, {"name": "t5"}),
    "bart": (BART, {**BART, "activation_function": "relu"}),
    "marian": ({}, {"scale_embedding": False}),
}


@pytest.mark.parametrize(("kind", "runtime"), each(list(KINDS), ["ort", "reference"]))
def test_drafts_read_the_same_source_and_change_no_text(
    kind: str, runtime: str, tmp_path: Path, cached: None, fixed_policy: None
) -> None:
    """As its own draft, a model is right in every round: it has read the same source."""
    target, draft = (
        t5_models.write(tmp_path / role, **{"name": kind, **changes})
        for role, changes in zip(("target", "draft"), KINDS[kind], strict=True)
    )
    opened = partial(load, str(target), runtime=runtime)
    with opened(drafter="none") as plain:
        expected = plain.generate(SOURCE, max_tokens=LENGTH)
        other = plain.generate("the cat", max_tokens=LENGTH)
    if kind == "t5-gated":  # the others' likeliest tokens come round in circles, whatever is read
        assert expected.text != other.text
    for model, own in ((draft, False), (target, True)):
        with opened(
            drafter="draft-model,suffix", draft=str(model), draft_runtime=runtime
        ) as drafted:
            for prompt, answer in ((SOURCE, expected), ("the cat", other), (SOURCE, expected)):
                found = drafted.generate(prompt, max_tokens=LENGTH)
                assert found.text == answer.text
            counts = found.stats
            assert counts.draft_n > 0
            if own:
                assert counts.draft_n_accepted > counts.draft_n // 2


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_target(
    target: Path, tmp_path: Path, cached: None, fixed_policy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of texts without a seed, for which the draft, a model like the target, samples on its own."""
    draft = t5_models.write(tmp_path / "alike", layer_norm_epsilon=0.1)
    monkeypatch.setattr(sampling.secrets, "randbits", random.Random(0).getrandbits)
    params = SamplingParams(temperature=3.0, top_k=4)
    with load(str(target), runtime="reference", drafter="none") as plain:
        source = tuple(plain.encode(SOURCE))
        session = plain.parts.model.open_session()

        @cache
        def logits(tokens: tuple[int, ...]) -> np.ndarray:
            session.rollback(0)
            session.prefill(tokens[:-1])
            return session.forward(TokenTree.chain(tokens[-1])).logits[0].copy()

        expected: Counter[tuple[int, ...]] = Counter()
        for run, mass in text.joint(logits, source, params).items():
            ends_at = [*run, t5_models.END].index(t5_models.END) + 1
            expected[run[:ends_at]] += mass
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    with load(str(target), runtime="reference", drafter="draft-model", draft=str(draft)) as drafted:
        for _ in range(800):
            found = drafted.generate(SOURCE, max_tokens=text.LENGTH, sampling=params)
            counts[tuple(token.id for token in found.tokens)] += 1
            accepted += found.stats.draft_n_accepted
    assert accepted > 80  # otherwise nothing was tried
    assert text.p_value(counts, expected) > text.SMALLEST_P


def test_a_prompt_of_tokens_has_to_end_its_source(engine: Engine) -> None:
    tokens = engine.encode(SOURCE)
    assert tokens[-2:] == [t5_models.END, t5_models.PAD]
    expected = engine.generate(SOURCE, max_tokens=5)
    assert engine.generate(tokens, max_tokens=5).text == expected.text
    with pytest.raises(UsageError, match="a source that does not end"):
        engine.generate(tokens[:-1])


def test_a_snapshot_holds_the_source(engine: Engine, target: Path, tmp_path: Path) -> None:
    expected = engine.generate(SOURCE, max_tokens=5)
    engine.snapshot(tmp_path / "kept")
    with load(str(target), runtime="reference", drafter="none") as other:
        other.restore(tmp_path / "kept")
        found = other.generate(SOURCE, max_tokens=5)
    assert found.text == expected.text and found.stats.cached_n == len(engine.encode(SOURCE)) - 1


def test_the_server_completes_sources_and_refuses_chats(engine: Engine) -> None:
    expected = engine.generate(SOURCE, max_tokens=5).text
    with (
        RunningServer(engine, ServerOptions(port=0)) as running,
        httpx.Client(base_url=running.url, trust_env=False) as client,
    ):
        asked = {"model": "target", "prompt": SOURCE, "max_tokens": 5}
        assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == expected
        asked = {"model": "target", "messages": [{"role": "user", "content": SOURCE}]}
        refused = client.post("/v1/chat/completions", json=asked)
    assert refused.status_code == 400 and "chat template" in refused.json()["error"]["message"]


def test_a_draft_without_an_encoder_is_refused(target: Path, hf: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match=r"cannot read what .* reads"):
        load(str(target), runtime="reference", draft=str(hf("llama")), draft_runtime="reference")


def test_barts_answer_begins_with_the_tokens_that_it_forces(tmp_path: Path, cached: None) -> None:
    path = t5_models.write(tmp_path / "model", "bart", **BART)
    with load(str(path), runtime="reference", drafter="none") as opened:
        tokens = opened.encode(SOURCE)
        assert tokens[-3:] == [t5_models.END, t5_models.END, BART["forced_bos_token_id"]]
        assert opened.generate(SOURCE, max_tokens=5).text


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"normalize_before": True}, "norms before its sublayers"),
        ({"encoder_ffn_dim": 96}, "an encoder with other ffn_dim"),
        ({"encoder_attention_heads": 2}, "an encoder with other attention_heads"),
        ({"share_encoder_decoder_embeddings": False}, "an embedding of its encoder's own"),
        ({"activation_function": "tanh"}, "the activation 'tanh'"),
    ],
)
def test_what_a_bart_may_not_have_is_named_before_its_tensors_are(
    changes: dict[str, Any], feature: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=feature) as refused:
        open_checkpoint(t5_models.write(tmp_path / "model", "bart", **changes))
    assert refused.value.remedy == "Use a model without it."  # GGUF has no BART


@pytest.mark.parametrize("kind", ["mt5", "pegasus_x", "nllb-moe"])
def test_an_encoder_decoder_of_another_kind_is_refused_in_words(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=f"model_type is '{kind}'") as refused:
        open_checkpoint(t5_models.write(tmp_path / "model", model_type=kind))
    assert "without an encoder: edge-spec export" in str(refused.value.remedy)


def test_a_t5_as_gguf_is_refused_in_words(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "t5")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'t5' model") as refused:
        open_checkpoint(tmp_path / "model.gguf")
    assert "Hugging Face directory" in str(refused.value.remedy)
