"""Which tokens of a large vocabulary are scored, where nothing is known of a text."""

from __future__ import annotations

import numpy as np
import pytest

from edge_spec.text import vocabulary as module
from edge_spec.text.token_pieces import BYTES
from edge_spec.text.vocabulary import frequent_tokens

_SPELLED = {byte: spelled for spelled, byte in BYTES.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST", 8)
    monkeypatch.setattr(module, "_OF_SCRIPT", 3)


def _as_bytes(text: str) -> str:
    return "".join(_SPELLED[byte] for byte in text.encode())


CHINESE = ["中", "国", "人", "大", "小"]
ENGLISH = [f" word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]


@pytest.mark.parametrize("spells_bytes", [True, False])
def test_each_writing_has_its_first_tokens(spells_bytes: bool) -> None:
    texts = [" ", *ENGLISH, "Ж", *CHINESE, "<|end|>", *ENGLISH]
    spelled = [_as_bytes(text) if spells_bytes else text.replace(" ", "▁") for text in texts]
    vocabulary = {f"{each}{'x' * (at > 33)}": at for at, each in enumerate(spelled)}
    found = frequent_tokens(vocabulary, len(texts))
    assert found is not None and found.dtype == np.int64
    later = [texts[token] for token in found if token >= 8]
    assert later == ["Ж", *CHINESE[:3]]  # of English, more than enough stand among the first
    assert found[:8].tolist() == list(range(8))


def test_tokens_without_letters_are_a_writing_of_their_own() -> None:
    vocabulary = {f"{'a' * (at + 1)}": at for at in range(20)}
    vocabulary |= {"<<>>": 20, "  ": 21, "\n": 22, "0": 23}
    found = frequent_tokens(vocabulary, 24)
    assert found is not None and found[8:].tolist() == [20, 21, 22]


@pytest.mark.parametrize("size", [8, 10])
def test_a_small_vocabulary_is_scored_whole(size: int) -> None:
    assert frequent_tokens({f"a{at}": at for at in range(size)}, size) is None


def test_ids_beyond_the_matrix_are_none() -> None:
    vocabulary = {f"a{at}": at for at in range(20)} | {"中": 20, "国": 99}
    found = frequent_tokens(vocabulary, 24)
    assert found is not None and found.tolist() == [*range(8), 20]
