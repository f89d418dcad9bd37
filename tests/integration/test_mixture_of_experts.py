"""A mixture of experts as a target: its counts are read, and it is scored as others are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from edge_spec.core.tree import TokenTree
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.testing import check_session
from fixtures.rows import stock_weights

pytest.importorskip("llama_cpp")

EXPERTS, USED, HIDDEN, WIDTH = 8, 2, 64, 32


@pytest.fixture(scope="module")
def mixture(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """qwen3moe with random weights, two layers."""
    return write(tiny, "qwen3", "qwen3moe", tmp_path_factory.mktemp("mixture") / "model.gguf")


def write(
    tiny: ModuleType,
    variant: str,
    architecture: str,
    path: Path,
    width: int = WIDTH,
    kind: str = "F32",
) -> Path:
    """width: of an expert; kind: of its matrices."""
    model = tiny.build(variant, num_hidden_layers=2)
    writer = gguf.GGUFWriter(path, architecture)
    tiny._add_metadata(writer, model)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_feed_forward_length(width)
    for name, values in model.weights.items():
        if ".mlp." not in name:
            writer.add_tensor(tiny.gguf_name(name), values)
    random = np.random.default_rng(0)
    for layer in range(2):
        for name, shape in (
            ("ffn_gate_inp", (EXPERTS, HIDDEN)),
            ("ffn_gate_exps", (EXPERTS, width, HIDDEN)),
            ("ffn_up_exps", (EXPERTS, width, HIDDEN)),
            ("ffn_down_exps", (EXPERTS, HIDDEN, width)),
        ):
            values = random.normal(0, 0.2, shape).astype(np.float32)
            is_expert = name.endswith("_exps") and kind != "F32"
            data = tiny.encode(values, kind) if is_expert else values
            raw = gguf.GGMLQuantizationType[kind] if is_expert else None
            writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_its_counts_are_read_and_it_scores_as_sessions_promise(
    mixture: Path, open_llama: Callable[..., LlamaCppModel]
) -> None:
    model = open_llama("llamacpp", mixture, kv_type="f32", flash_attention=False)
    assert (model.config.num_experts, model.config.experts_used) == (EXPERTS, USED)
    check_session(model, 1e-3)


def test_drafting_leaves_its_text_as_it_is(mixture: Path) -> None:
    texts: list[Any] = []
    for drafter, drafts in (("none", ()), ("draft-model", (str(mixture),))):
        options = LoadOptions(
            runtime="llamacpp",
            drafter=drafter,
            draft=drafts,
            draft_runtime="llamacpp",
            threads=1,
            exact=True,
        )
        with load_engine(str(mixture), options, lambda what, fraction: None) as engine:
            result = engine.generate([5, 6, 7, 8, 5, 6, 7], max_tokens=40)
            texts.append([token.id for token in result.tokens])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_experts_in_tiles_compute_what_llama_cpps_own_kernels_do(
    kind: str, tiny: ModuleType, tmp_path: Path, open_llama: Callable[..., LlamaCppModel]
) -> None:
    """A prompt in which each expert has many tokens, and passes in which it has one or none."""
    path = write(tiny, "qwen3", "qwen3moe", tmp_path / "model.gguf", kind=kind)
    ours = open_llama("llamacpp", path, threads=2)
    with stock_weights():
        stock = open_llama("llamacpp", path, threads=2)
    if ours.capabilities.kernels == stock.capabilities.kernels:
        pytest.skip("there are no kernels to test")
    # All else is float32, too; of that the routers alone are taken.
    assert ours.capabilities.kernels is not None
    assert "8 matrices, not" in ours.capabilities.kernels
    scored = []
    for model in (ours, stock):
        session = model.open_session()
        session.prefill(list(range(1, 70)))
        rows = [session.forward(TokenTree.chain(5, [6, 7, 8])).logits.copy()]
        session.commit(range(4))
        rows.append(session.forward(TokenTree.chain(9, [])).logits.copy())
        scored.append(np.concatenate(rows))
        model.close()
    # An expert too many or too few, where two are about as likely, would differ by more.
    assert 0 < np.abs(scored[0] - scored[1]).max() < 0.25 * scored[1].std()
