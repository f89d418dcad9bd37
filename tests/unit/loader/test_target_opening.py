"""A target's weights are read beside the making of its text, where nothing speaks against it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from edge_spec.errors import DeviceError
from edge_spec.loader.open import TargetRefusedError, begin_opening

TIMEOUT_S = 60
LOST = DeviceError("lost", remedy="Start again.")


@dataclass
class OpenedModel:
    is_closed: bool = False

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Opener:
    """Opens one model when `released`, which a test sets before it waits for it."""

    opens_beside: bool = True
    error: Exception | None = None
    name: str = "opener"
    reads: str = "gguf"
    model: OpenedModel = field(default_factory=OpenedModel)
    released: Event = field(default_factory=Event)

    def open(self, source: Any, options: Any) -> OpenedModel:
        assert self.released.wait(TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return self.model


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EDGE_SPEC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    runtime = Opener()
    target: Any = SimpleNamespace(runtime=runtime, source=SimpleNamespace(path=path))
    target.open = lambda: runtime.open(target.source, None)
    source = SimpleNamespace(path=path, identity="same", name="model", model=str(path))
    return SimpleNamespace(target=target, source=source)


def test_what_is_refused_meanwhile_is_closed(placed: Any) -> None:
    runtime = placed.target.runtime
    with ExitStack() as opened:
        begin_opening(placed, opened)
        runtime.released.set()
    assert runtime.model.is_closed


@pytest.mark.parametrize("opens_beside", [True, False])
def test_what_is_taken_stays_open_until_the_rest_fails(placed: Any, opens_beside: bool) -> None:
    runtime = placed.target.runtime
    runtime.opens_beside = opens_beside
    runtime.released.set()
    with ExitStack() as opened:
        take = begin_opening(placed, opened)
        assert take() is runtime.model and not runtime.model.is_closed
    assert runtime.model.is_closed


def test_what_it_fails_with_is_told_to_whoever_takes_it(placed: Any) -> None:
    runtime = placed.target.runtime
    runtime.error = LOST
    with ExitStack() as opened:
        take = begin_opening(placed, opened)
        runtime.released.set()
        with pytest.raises(TargetRefusedError) as caught:
            take()
    assert caught.value.error is LOST
