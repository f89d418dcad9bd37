"""Files of random weights, on which kernels are measured, are files of models that could work."""

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def random_gguf(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("random_gguf")
    sys.modules.pop("random_gguf", None)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_weights_keep_the_size_of_what_they_multiply(random_gguf, tmp_path, type_name):
    """With another scale a deep model overflows, or rounds everything to zero, and then measures
    the speed of nothing."""
    shape = random_gguf.Shape(512, 1024, 8, 2, 600, 2)
    random_gguf.write_random(tmp_path / "model.gguf", shape, type_name)

    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    found = tensors["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == type_name
    weights = gguf.quants.dequantize(found.data, found.tensor_type)
    assert weights.shape == (512, 1024)
    # Of 524,288 weights: a factor of 1.1 is far outside what chance does, and harmless.
    assert weights.std() * np.sqrt(1024) == pytest.approx(1, rel=0.1)
    assert abs(weights.mean()) < 0.2 * weights.std()  # four bits have one value more below zero
