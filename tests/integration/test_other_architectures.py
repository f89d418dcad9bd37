"""Architectures that only the libraries know: sliding windows run, recurrent states are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf
import numpy as np
import pytest

from edge_spec.core.model import RuntimeOptions
from edge_spec.core.tree import TokenTree
from edge_spec.errors import SessionError, UnsupportedModelError
from edge_spec.models import runtimes
from edge_spec.runtimes.llamacpp import LlamaCppModel
from edge_spec.testing import check_session

OpenLlama = Callable[..., LlamaCppModel]
Tokens = Callable[..., list[int]]

WINDOW = 8
FLOAT32 = {"kv_type": "f32", "flash_attention": False}
RECURRENT = ["mamba", "mamba2", "rwkv6", "rwkv7"]
HYBRID = ["jamba", "falcon-h1", "granitehybrid", "nemotron_h", "qwen3next", "plamo2"]


@pytest.fixture(scope="module")
def gemma3(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """gemma3(window): five layers that see a window of tokens and one that sees all."""

    def write(window: int = WINDOW) -> Path:
        return Path(tiny.write_gemma3(tmp_path_factory.mktemp("gemma3") / "model.gguf", window))

    return write


def metadata_only(path: Path, architecture: str, tokens: list[str]) -> Path:
    """A file that says what it is and has no weights."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_layer_norm_eps(1e-5)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(128)
    writer.add_ssm_state_size(16)
    writer.add_ssm_time_step_rank(4)
    writer.add_ssm_group_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["t h"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def last_logits(one: Any, text: list[int]) -> np.ndarray:
    one.prefill(text[:-1])
    logits: np.ndarray = one.forward(TokenTree.chain(text[-1])).logits[0].copy()
    return logits


@pytest.mark.parametrize(
    ("runtime", "options", "tolerance"),
    # In half precision sums fall on other sides of a rounding, six layers deep: 0.01 was seen.
    [("llamacpp", FLOAT32, 1e-3), ("llamacpp", {}, 0.1)],
    ids=["llamacpp", "llamacpp-flash"],
)
def test_a_sliding_window_keeps_the_promises_of_a_session(
    runtime: str,
    options: dict[str, Any],
    tolerance: float,
    gemma3: Callable[..., Path],
    open_llama: OpenLlama,
) -> None:
    """Trees, branches and rollbacks to before the window, in a context of six windows."""
    pytest.importorskip("llama_cpp")
    model = open_llama(runtime, gemma3(), context_length=6 * WINDOW, **options)
    assert model.config.architecture == "gemma3"
    check_session(model, tolerance)


def test_a_cache_that_has_forgotten_its_beginning_refuses_to_go_back(
    gemma3: Callable[..., Path], open_llama: OpenLlama, tokens: Tokens
) -> None:
    one = open_llama("llamacpp", gemma3()).open_session()
    one.prefill(tokens(20))
    library = one._weights.library
    one._weights.library = library.replacing(llama_memory_seq_pos_min=lambda memory, sequence: 12)
    for length in (1, 5, 19):
        with pytest.raises(SessionError, match="from token 12 on only") as caught:
            one.rollback(length)
        assert f"go back to token {length}" in str(caught.value)
        assert one.length == 20
    one.rollback(20)  # nothing is forgotten by it
    one.prefill(tokens(3))
    assert one.length == 23
    one.rollback(0)  # and nothing needed
    found, fresh = one, open_llama("llamacpp", gemma3()).open_session()
    text = tokens(9, seed=1)
    assert np.array_equal(last_logits(found, text), last_logits(fresh, text))


@pytest.mark.parametrize("architecture", RECURRENT + HYBRID)
def test_a_recurrent_state_is_refused_before_the_weights_are_read(
    architecture: str, llama: str, tiny: ModuleType, tmp_path: Path, monkeypatch: Any
) -> None:
    """The file has no weights, so reading them would fail in another way."""
    path = metadata_only(tmp_path / "model.gguf", architecture, tiny.TOKENS)
    runtime = runtimes.load_runtime(llama)
    library = runtime._library()  # type: ignore[attr-defined]
    asked: list[bool] = []

    def load_model(name: bytes, choices: Any) -> Any:
        asked.append(choices.vocabulary_only)
        return library.load_model(name, choices)

    spied = library.replacing(load_model=load_model)
    monkeypatch.setattr(type(runtime), "_library", staticmethod(lambda: spied))
    with pytest.raises(UnsupportedModelError) as caught:
        runtime.open(runtimes.open_model_info(path), RuntimeOptions())
    text = str(caught.value)
    assert "\n" not in text
    assert "recurrent state" in text
    assert asked == [True]
