"""Opens a drafter while it is trained: to time it, and to let an ordinary draft write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edge_spec.core.model import Model, Progress
from edge_spec.core.tree import TokenTree
from edge_spec.distill.answers import local_writers, write_conversations
from edge_spec.distill.conversations import Conversation
from edge_spec.distill.draft_cost import CONTEXT, median_s
from edge_spec.distill.own_texts import NUM_TOKENS, OwnTexts
from edge_spec.loader import load_asked
from edge_spec.models.asked_options import AskedOptions
from edge_spec.storage.atomic import cache_directory
from edge_spec.storage.resumable import KEPT_DAYS

TRIED, UNTRAINED = "distilled", "untrained"  # what the names of such models begin with


@dataclass(frozen=True)
class DraftRuns:
    """asked: how the target is opened. seed: of what a draft writes."""

    asked: AskedOptions
    seed: int
    progress: Progress

    def token_s(self, path: Path) -> float:
        """Seconds of a step of an ordinary draft, median of several, opened as it will draft."""
        with converted_aside(path), load_asked(str(path), self._alone, self.progress) as engine:
            return median_s(_step(engine.parts.model))

    def own_texts(
        self, path: Path, conversations: Sequence[Conversation], folder: Path
    ) -> list[Conversation]:
        """Those that the draft at `path` writes after the target's; `folder` keeps them."""
        folder.mkdir(exist_ok=True)
        tasks = OwnTexts(conversations, self.seed)
        with converted_aside(path), load_asked(str(path), self._alone, self.progress) as engine:
            return write_conversations(
                partial(local_writers, engine, tasks),
                tasks,
                folder,
                len(conversations) * NUM_TOKENS,
                self.progress,
            )

    @property
    def _alone(self) -> AskedOptions:
        """Returns how the draft is opened by itself: where and by what it will draft."""
        asked = self.asked
        return replace(
            asked,
            runtime=asked.draft_runtime,
            device=asked.draft_device,
            threads=asked.draft_threads or asked.threads,
            draft_runtime="auto",
            draft_device=None,
            draft_threads=None,
            plan=None,
            drafter="none",
        )


@contextmanager
def converted_aside(path: Path) -> Iterator[None]:
    """Removes with the block what is converted of the model at `path`, whose name nobody else has,
    and so does what a kill has left of others KEPT_DAYS ago."""
    bundles = cache_directory() / "bundles"
    try:
        yield
    finally:
        _remove(bundles.glob(f"{path.name}-*"))
        before = time.time() - KEPT_DAYS * 86400
        for prefix in (TRIED, UNTRAINED):
            _remove(each for each in bundles.glob(f"{prefix}-*") if each.stat().st_mtime < before)


def _remove(paths: Iterable[Path]) -> None:
    with suppress(OSError):  # another process may be removing them
        for path in paths:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _step(model: Model) -> Callable[[], object]:
    session = model.open_session()
    session.prefill([0] * min(CONTEXT, model.config.context_length - 1))
    return lambda: session.forward(TokenTree.chain(0))
