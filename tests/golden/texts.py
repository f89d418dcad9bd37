"""Token ids that models write with every drafter, and what was drafted for them.

All draft tokens are verified, so that no clock decides what is drafted. Models of random weights
compute in float32, where rows differ by the order of sums alone, by far less than what is between
two tokens here: their texts are the same on every processor.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import edge_spec
from edge_spec import SamplingParams
from edge_spec.core.tree import TokenTree
from edge_spec.core.verify import verify
from edge_spec.engine import decoder
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from fixtures import families, heads, tiny_models

RUNTIMES: Mapping[str, Mapping[str, Any]] = {
    "reference": {},
    "ort": {"quantization": "fp32"},
    "llamacpp": {"quantization": "F32", "kv_type": "f32", "flash_attention": False},
}
LOOKUPS = ("suffix", "recycling", "lookahead", "jacobi", "corpus", "suffix,recycling,lookahead")
NUM_PROMPTS, NUM_TOKENS, LAYERS = 6, 32, 7
GREEDY = SamplingParams(temperature=0)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
TEXTS = ("the cat in the hat", "1 2 3 a b")


def prompts(vocab_size: int, count: int = NUM_PROMPTS) -> list[list[int]]:
    """Return random tokens, most of them repeated so that there is something to copy."""
    rng = np.random.default_rng(7)
    parts = [rng.integers(3, vocab_size, rng.integers(2, 12)).tolist() for _ in range(count)]
    return [part * (1 + index % 3) for index, part in enumerate(parts)]


def record() -> dict[str, Any]:
    return {
        "drafters": {name: of_runtime(name) for name in RUNTIMES},
        "pairs": {name: of_pair(name) for name in RUNTIMES},
        "heads": of_heads(),
        "families": of_families(families.NAMES),
    }


def of_runtime(runtime: str) -> dict[str, Any]:
    """Return texts of one model, plain, with each drafter that needs no weights, and sampled."""
    with tempfile.TemporaryDirectory() as folder, _own_cache(folder):
        model = tiny_models.write_hf(tiny_models.build(), Path(folder) / "hf")
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("the cat sat on the mat " * 20, encoding="utf-8")
        options = {"runtime": runtime, "corpora": (corpus,), **RUNTIMES[runtime]}
        with opened(model, **options) as llm:
            asked = prompts(len(tiny_models.TOKENS))
            found: dict[str, Any] = {"plain": [_ids(llm, each) for each in asked]}
            found["sampled"] = [_ids(llm, each, sampling=SAMPLED) for each in asked]
            for count in (2, 8):
                texts = _together(llm, [asked[i % len(asked)] for i in range(count)])
                assert texts == [found["plain"][i % len(asked)] for i in range(count)], count
            for name in LOOKUPS:
                found[name] = _drafted(llm, name, asked, found["plain"])
    return found


def of_pair(runtime: str) -> dict[str, Any]:
    """Return what a target's first layer drafts for it."""
    with tempfile.TemporaryDirectory() as folder, _own_cache(folder):
        whole = tiny_models.build()
        target = tiny_models.write_hf(whole, Path(folder) / "target")
        weights = {name: each for name, each in whole.weights.items() if ".layers.1." not in name}
        half = tiny_models.TinyModel(whole.config | {"num_hidden_layers": 1}, weights)
        draft = tiny_models.write_hf(half, Path(folder) / "draft")
        options = {"runtime": runtime, "draft_runtime": runtime, **RUNTIMES[runtime]}
        with opened(target, draft=str(draft), **options) as llm:
            asked = prompts(len(tiny_models.TOKENS), 3)
            llm.set_drafter("none")
            plain = [_ids(llm, each) for each in asked]
            return {"draft-model": _drafted(llm, "draft-model", asked, plain)}


def of_heads() -> dict[str, Any]:
    """Return what heads of the published formats draft, on the reference and onnxruntime."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, _own_cache(folder):
        root = Path(folder)
        model = tiny_models.build("llama", 2, num_hidden_layers=LAYERS)
        target = tiny_models.write_hf(model, root / "target")
        vocab_size = len(tiny_models.TOKENS)
        asked = prompts(vocab_size, 3)
        written = {
            form: heads.draw(LAYERS, vocab_size, form).write(root / form) for form in heads.FORMATS
        }
        for form, path in written.items():
            with edge_spec.load(str(target), draft=str(path), runtime="reference") as llm:
                llm.set_drafter("none")
                plain = [_ids(llm, each) for each in asked]
                found[form] = _drafted(llm, "eagle", asked, plain)
    return found


def of_families(names: Sequence[str]) -> dict[str, Any]:
    """Return greedy ids of every family of decoders and encoder-decoders."""
    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, _own_cache(folder):
            path = families.write_hf(name, Path(folder) / name)
            with opened(path, runtime="reference") as llm:
                found[name] = [_ids(llm, each, max_tokens=16) for each in TEXTS]
    return found


def _drafted(
    llm: Any, name: str, asked: Sequence[Sequence[int]], plain: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return what was drafted and kept for each text, and the sampled ids."""
    llm.set_drafter(name)
    with llm.verifying_all_draft_tokens():
        counts = [_counts(llm, *each) for each in zip(asked, plain, strict=True)]
        sampled = [_ids(llm, prompt, sampling=SAMPLED) for prompt in asked[:3]]
    return {"rounds, drafted, accepted, trees": counts, "sampled": sampled}


def _counts(llm: Any, prompt: Sequence[int], expected: Sequence[int]) -> list[Any]:
    """Return what was drafted, and a digest of all trees that were verified."""
    trees = hashlib.sha256()

    def verify_and_note(tree: TokenTree, *others: Any) -> Any:
        trees.update(np.stack([tree.tokens, tree.parents]).astype("<i4").tobytes())
        return verify(tree, *others)

    with patch.object(decoder, "verify", verify_and_note):
        assert _ids(llm, prompt) == expected, prompt
    stats = llm.last.stats
    return [stats.rounds, stats.draft_n, stats.draft_n_accepted, trees.hexdigest()[:16]]


def _together(llm: Any, asked: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return answers of as many conversations at the same time."""
    engines = [llm.fork() for _ in asked]
    try:
        with ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(_ids, engines, asked))
    finally:
        for engine in engines:
            engine.close()


def _ids(llm: Any, prompt: Sequence[int] | str, **options: Any) -> list[int]:
    result = llm.generate(prompt, **{"max_tokens": NUM_TOKENS, "sampling": GREEDY} | options)
    return [token.id for token in result.tokens]


def opened(path: Path, **options: Any) -> Any:
    return load_engine(str(path), LoadOptions(threads=1, **options), lambda what, done: None)


def _own_cache(folder: str) -> Any:
    """What earlier runs measured and converted changes nothing."""
    return patch.dict(os.environ, {"EDGE_SPEC_CACHE": str(Path(folder) / "cache")})
