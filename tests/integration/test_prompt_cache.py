"""Long prompts that are kept on disk: what goes on with them is what reading them would have led
to, bit for bit, on the real runtimes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from edge_spec.core.model import Restorable
from edge_spec.engine.engine import Engine
from edge_spec.engine.prompt_cache import PREFILL_TOKENS, SUFFIX
from edge_spec.engine.results import GenerationResult
from edge_spec.engine.snapshot_file import read_snapshot
from edge_spec.errors import UsageError
from edge_spec.loader import load_engine
from edge_spec.models.options import LoadOptions
from edge_spec.storage.atomic import CACHE_VARIABLE
from fixtures.long_prompts import DOCUMENT, MODULES, QUESTIONS, RUNTIMES, answer, bits, tokens

Open = Callable[..., Engine]
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "model"
    tiny.write_hf(tiny.build("llama", max_position_embeddings=2048), path)
    return path


@pytest.fixture(scope="module")
def small(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small") / "model"
    tiny.write_hf(tiny.build("llama", max_position_embeddings=2048, **SMALL), path)
    return path


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        path = tmp_path_factory.mktemp("cache")
        patch.setenv(CACHE_VARIABLE, str(path))
        yield path


@pytest.fixture(params=RUNTIMES)
def runtime(request: pytest.FixtureRequest) -> str:
    if request.param in MODULES:
        pytest.importorskip(MODULES[request.param])
    return str(request.param)


@pytest.fixture
def opened(model: Path, conversions: Path, runtime: str) -> Open:
    def load(directory: Path | None, **options: Any) -> Engine:
        asked: dict[str, Any] = {"drafter": "none", "threads": 1} | RUNTIMES[runtime] | options
        return load_engine(
            str(model),
            LoadOptions(runtime=runtime, prompt_cache=directory, **asked),
            lambda what, fraction: None,
        )

    return load


@pytest.fixture
def reference(small: Path, conversions: Path) -> Open:
    """Of one layer, for what does not depend on how states are computed."""

    def load(directory: Path | None, **options: Any) -> Engine:
        asked = LoadOptions(runtime="reference", drafter="none", prompt_cache=directory, **options)
        return load_engine(str(small), asked, lambda what, fraction: None)

    return load


def once(open: Open, directory: Path | None, prompt: list[int], **options: Any) -> GenerationResult:
    """The answer of an engine of its own."""
    with open(directory, **options) as engine:
        return answer(engine, prompt)


def kept(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


@pytest.mark.parametrize("drafter", ["none", pytest.param("suffix", marks=pytest.mark.slow)])
def test_a_prompt_that_begins_alike_is_read_from_where_they_part(
    opened: Open, tmp_path: Path, drafter: str
) -> None:
    first, second = (DOCUMENT + question for question in QUESTIONS)
    plain = [once(opened, None, prompt) for prompt in (first, second)]
    told = once(opened, tmp_path, first, drafter=drafter)
    assert told.stats.cached_n == 0 and len(kept(tmp_path)) == 1
    assert [token.id for token in told.tokens] == [token.id for token in plain[0].tokens]
    for prompt, expected in zip((first, second), plain, strict=True):
        found = once(opened, tmp_path, prompt, drafter=drafter)
        assert found.stats.cached_n == 2 * PREFILL_TOKENS
        assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
        if drafter == "none":
            assert bits(found) == bits(expected)


def test_every_kept_state_is_that_of_reading_its_tokens(opened: Open, tmp_path: Path) -> None:
    """Also where a conversation went on, was rolled back, or an answer's own tokens were there."""
    with opened(tmp_path) as engine:

        def asked(prompt: list[int]) -> list[int]:
            return [token.id for token in answer(engine, prompt).tokens]

        text = DOCUMENT[:530]
        for seed in range(3):
            text = text + asked(text) + tokens(seed, 210)
        for prompt in (text, text[:600] + tokens(4, 500), tokens(8, 900), tokens(9, 700)):
            asked(prompt)
    found = kept(tmp_path)
    assert len(found) >= 3
    with opened(None) as engine:
        target = engine._conversation.decoder.target
        assert isinstance(target, Restorable)
        for path in found:
            snapshot = read_snapshot(path)
            length = len(snapshot.tokens)
            assert length % PREFILL_TOKENS == 0
            target.rollback(0)
            for start in range(0, length, PREFILL_TOKENS):
                target.prefill(snapshot.tokens[start : start + PREFILL_TOKENS].tolist())
            state = target.state()
            assert all(np.array_equal(state[name], snapshot.cache[name]) for name in state), length


def test_another_model_or_way_of_computing_does_not_take_it(
    reference: Open, tiny: Any, tmp_path: Path
) -> None:
    prompt, directory = DOCUMENT, tmp_path / "prompts"
    once(reference, directory, prompt)
    assert once(reference, directory, prompt).stats.cached_n == 2 * PREFILL_TOKENS
    assert once(reference, directory, prompt, threads=2).stats.cached_n == 0
    other = tmp_path / "other"
    changed = tiny.build("llama", max_position_embeddings=2048, rope_theta=9e4, **SMALL)
    tiny.write_hf(changed, other)
    options = LoadOptions(runtime="reference", drafter="none", prompt_cache=directory)
    with load_engine(str(other), options, lambda what, fraction: None) as engine:
        assert answer(engine, prompt).stats.cached_n == 0


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, flipped, emptied])
def test_a_damaged_one_is_read_again_and_replaced(
    reference: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    plain = once(reference, tmp_path, DOCUMENT)
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    damage(file)
    found = once(reference, tmp_path, DOCUMENT)
    assert found.stats.cached_n == 0 and bits(found) == bits(plain)
    (line,) = [each for each in caplog.messages if "kept prompt" in each]
    assert "\n" not in line
    assert kept(tmp_path) == [file] and file.read_bytes() == whole


def test_only_the_owner_can_read_it_and_short_prompts_are_not_kept(
    reference: Open, tmp_path: Path
) -> None:
    once(reference, tmp_path, DOCUMENT[: PREFILL_TOKENS + 60])
    assert not kept(tmp_path)
    once(reference, tmp_path, DOCUMENT)
    (file,) = kept(tmp_path)
    assert os.name == "nt" or file.stat().st_mode & 0o777 == 0o600
    assert once(reference, None, DOCUMENT).stats.cached_n == 0


def test_what_comes_while_a_slow_disk_writes_is_not_kept(reference: Open, tmp_path: Path) -> None:
    disk = Event()
    with reference(tmp_path) as engine:
        cache = engine.parts.prompts.files
        assert cache is not None
        cache._writer.submit(disk.wait)
        for seed in range(2):
            answer(engine, tokens(seed, 400))
        assert not kept(tmp_path)
        disk.set()
        cache.flush()
        assert len(kept(tmp_path)) == 1
        answer(engine, tokens(2, 400))  # nothing waits any more
        cache.flush()
        assert len(kept(tmp_path)) == 2


def test_those_that_were_not_used_for_longest_go_first(reference: Open, tmp_path: Path) -> None:
    prompts = [tokens(seed, 400) for seed in range(4)]
    with reference(tmp_path) as engine:
        cache = engine.parts.prompts.files
        assert cache is not None

        def read(number: int) -> int:
            """Returns how many tokens were kept on disk."""
            engine.parts.prompts.clear()
            found = answer(engine, prompts[number]).stats.cached_n
            assert cache is not None
            cache.flush()
            oldest_first = sorted(kept(tmp_path), key=lambda each: each.stat().st_mtime_ns)
            for age, path in enumerate(oldest_first):
                os.utime(path, ns=(age, age))  # apart, however coarse the clock is
            return found

        read(0)
        cache._max_bytes = 3 * kept(tmp_path)[0].stat().st_size
        read(1)
        read(2)
        assert read(0) == PREFILL_TOKENS  # used again: now 1 goes first
        read(3)
        assert len(kept(tmp_path)) == 3
        assert [read(number) for number in (0, 2, 3)] == [PREFILL_TOKENS] * 3
        assert read(1) == 0
        of_others = tmp_path / "model.gguf"
        of_others.write_bytes(bytes(2000))
        os.utime(of_others, ns=(0, 0))
        cache._max_bytes = 1000  # less than one
        before = kept(tmp_path)
        answer(engine, tokens(9, 400))
        cache.flush()
        assert set(kept(tmp_path)) <= set(before)
        assert of_others.exists()


def test_a_place_that_cannot_be_written_costs_only_time(
    reference: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the place of the directory")
    found = once(reference, tmp_path / "file" / "prompts", DOCUMENT)
    assert bits(found) == bits(once(reference, None, DOCUMENT))
    assert any("cannot be saved" in line for line in caplog.messages)
    with pytest.raises(UsageError, match="is no directory"):
        reference(tmp_path / "file")
