"""Reads what a target computes of conversations once, keeps it on disk in float16 within a bound,
and cuts it into batches in a fixed order: what a step of training reads."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import BadZipFile

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Model, Progress
from edge_spec.distill.prompts import Conversation
from edge_spec.errors import UnsupportedModelError, UsageError
from edge_spec.storage.atomic import atomic_file

_KEPT = np.dtype("<f2")
_LARGEST = float(np.finfo(_KEPT).max)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Example:
    """A conversation with what the target computed of its tokens.

    features: [rows, layers, hidden_size] float16 of the tokens from `first` on, of all but the
    last token, which nothing follows.
    """

    conversation: Conversation
    first: int
    features: np.ndarray

    @property
    def anchors(self) -> np.ndarray:
        """Rows from which drafting may begin: in the first of them the target chose the answer's
        first token, and the first draft token is the second."""
        start = self.conversation.start - 1 - self.first
        return np.arange(start, len(self.features))


@dataclass(frozen=True)
class FeatureRequest:
    """layers: as `core.features` counts them. of_answers: whether those of prompts are left out.
    max_bytes: of the file; conversations that it has no room for are left out."""

    layers: tuple[int, ...]
    of_answers: bool
    max_bytes: int


# Gives what `feature_rows` does, wherever it is computed.
Reader = Callable[[Sequence[Conversation], FeatureRequest], Generator[np.ndarray]]


def halved(values: np.ndarray) -> np.ndarray:
    kept: np.ndarray = np.clip(values, -_LARGEST, _LARGEST).astype(_KEPT)
    return kept


def require_features(model: Model, name: str) -> None:
    """Raises UnsupportedModelError where the runtime does not give them."""
    session = model.open_session()
    try:
        if not isinstance(session, GivesFeatures):
            raise UnsupportedModelError(
                f"a drafter for {name} is trained on what its layers compute, which this runtime "
                "does not give",
                remedy="Use --runtime ort, llamacpp or reference.",
            )
        session.collect_features((model.config.num_layers,), lambda position, rows: None)
    finally:
        session.close()


def read_features(
    model: Model,
    conversations: Sequence[Conversation],
    request: FeatureRequest,
    folder: Path,
    progress: Progress,
    reader: Reader | None = None,
) -> list[Example]:
    """Answers to one prompt stand together, in the order of their first ones. Goes on with what
    `folder` has of these conversations. reader: None: the model itself. Raises UsageError where
    the bound leaves out all of the held-out ones or all of the others, an EdgeSpecError, OSError.
    """
    conversations = by_prompt(conversations)
    row_bytes = len(request.layers) * model.config.hidden_size * _KEPT.itemsize
    sizes = [_num_rows(each, request) for each in conversations]
    ends = np.cumsum(sizes) * row_bytes
    count = int(np.searchsorted(ends, request.max_bytes, side="right"))
    kept = conversations[:count]
    if {each.is_held_out for each in kept} != {each.is_held_out for each in conversations}:
        raise UsageError(
            f"a cache of {request.max_bytes / 1e6:.0f} MB has room for {count} of "
            f"{len(conversations)} conversations, too few to train on",
            remedy=f"Give --max-cache, {ends[-1] / 1e6:.0f} or more for all of them.",
        )
    if count < len(conversations):
        _log.warning(
            "--max-cache has room for the features of %d of %d conversations: the others are left "
            "out",
            count,
            len(conversations),
        )
    path = folder / f"features-{_digest(kept, request)}.bin"
    for other in folder.glob("features-*.bin"):
        if other != path:  # of other conversations
            other.unlink()
    with path.open("ab") as file:
        begun = int(np.searchsorted(ends[:count], file.tell(), side="right"))
        file.truncate(int(ends[begun - 1]) if begun else 0)
        if begun < count:
            rows = (reader or partial(feature_rows, model))(kept[begun:], request)
            _collect(rows, begun, count, file, progress)
    shape = (-1, len(request.layers), model.config.hidden_size)
    stored = np.memmap(path, _KEPT, "r").reshape(shape)
    starts = np.cumsum([0, *sizes[:count]])
    return [
        Example(each, _first(each, request), stored[starts[i] : starts[i + 1]])
        for i, each in enumerate(kept)
    ]


def feature_rows(
    model: Model, conversations: Sequence[Conversation], request: FeatureRequest
) -> Generator[np.ndarray]:
    """Yields [rows, layers, hidden_size] float16 of each conversation, in their order."""
    session = model.open_session()
    pieces: list[np.ndarray] = []

    def take(position: int, rows: np.ndarray) -> None:
        pieces.append(halved(rows))

    def read(tokens: np.ndarray) -> None:
        if len(tokens):  # an answer of one token has none that anything follows
            session.prefill(tokens.tolist())

    prompt: np.ndarray | None = None
    of_prompt: list[np.ndarray] = []
    try:
        assert isinstance(session, GivesFeatures)
        session.collect_features(request.layers, take)
        for each in conversations:
            asked = each.tokens[: each.start]
            pieces.clear()
            # Read by itself, so that numbers are the same wherever the reading began.
            if prompt is None or not np.array_equal(asked, prompt):
                session.rollback(0)
                read(asked)
                prompt, of_prompt = asked, pieces.copy()
                pieces.clear()
            else:
                session.rollback(each.start)
            read(each.tokens[each.start : -1])
            yield np.concatenate([*of_prompt, *pieces])[_first(each, request) :]
    finally:
        session.close()


def by_prompt(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Answers to one prompt after each other, so that it is read once."""
    first_at: dict[bytes, int] = {}
    for index, each in enumerate(conversations):
        first_at.setdefault(_prompt_of(each), index)
    return sorted(conversations, key=lambda each: first_at[_prompt_of(each)])


def _prompt_of(conversation: Conversation) -> bytes:
    return conversation.tokens[: conversation.start].tobytes()


def _collect(
    found: Generator[np.ndarray], begun: int, count: int, file: BinaryIO, progress: Progress
) -> None:
    progress("Reading what the model computes", begun / count)
    with closing(found):
        for index, rows in enumerate(found, begun + 1):
            file.write(rows.tobytes())
            progress("Reading what the model computes", index / count)


def _digest(conversations: Sequence[Conversation], request: FeatureRequest) -> str:
    """Changes with what the file holds."""
    content = hashlib.sha256(repr((request.layers, request.of_answers)).encode())
    for each in conversations:
        content.update(f"{each.start} {len(each.tokens)} ".encode() + each.tokens.tobytes())
    return content.hexdigest()[:16]


def _first(conversation: Conversation, request: FeatureRequest) -> int:
    return conversation.start - 1 if request.of_answers else 0


def _num_rows(conversation: Conversation, request: FeatureRequest) -> int:
    return len(conversation.tokens) - 1 - _first(conversation, request)


@dataclass(frozen=True, eq=False)
class Window:
    example: Example
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows beside each other, padded with zeros.

    features: [windows, rows, layers, hidden_size] float32, without the last layer's.
    states: [windows, rows + positions, hidden_size] float32, after the target's final norm.
    tokens: [windows, rows + positions] int64, the text that the states are of.
    next_tokens: [windows, rows] int64, the token after each row.
    written: [windows, rows, positions] int64, the tokens after that one; -1 where there are none.
    anchors: [windows, rows] bool, from which drafting may begin.
    is_row: [windows, rows] bool; else it is padding.
    """

    features: np.ndarray
    states: np.ndarray
    tokens: np.ndarray
    next_tokens: np.ndarray
    written: np.ndarray
    anchors: np.ndarray
    is_row: np.ndarray


def windows_of(examples: Sequence[Example], num_rows: int) -> list[Window]:
    """Returns the windows, without those that hold no anchor."""
    return [
        Window(each, begin, min(begin + num_rows, len(each.features)))
        for each in examples
        for begin in range(0, len(each.features), num_rows)
        if begin + num_rows > each.anchors[0]
    ]


def shuffled(
    windows: Sequence[Window], rows_a_batch: int, seed: int, epoch: int
) -> list[list[Window]]:
    """The same batches for one seed and epoch. Windows of like lengths stand together, so that
    little is padded."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(windows))
    lengths = np.array([windows[i].end - windows[i].begin for i in order])
    order = order[np.argsort(lengths // 32, kind="stable")]
    batches = list(in_batches([windows[i] for i in order], rows_a_batch))
    return [batches[i] for i in random.permutation(len(batches))]


def in_batches(windows: Sequence[Window], rows_a_batch: int) -> Iterator[list[Window]]:
    """Returns batches of about `rows_a_batch` rows each, padding included."""
    batch: list[Window] = []
    widest = 0
    for window in windows:
        widest = max(widest, window.end - window.begin)
        if batch and widest * (len(batch) + 1) > rows_a_batch:
            yield batch
            batch, widest = [], window.end - window.begin
        batch.append(window)
    if batch:
        yield batch


def written_after(tokens: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """[places, count] int: the tokens from the second one after each place on, since the first one
    after it is the pending token; -1 after the end. tokens: [tokens] int."""
    padded = np.concatenate([tokens, np.full(count + 1, -1, tokens.dtype)])
    found: np.ndarray = padded[places[:, None] + 2 + np.arange(count)]
    return found


def batch_of(windows: Sequence[Window], num_positions: int) -> Batch:
    """num_positions: of draft tokens."""
    width = max(each.end - each.begin for each in windows)
    size = windows[0].example.features.shape[1:]
    count = len(windows)
    batch = Batch(
        features=np.zeros((count, width, size[0] - 1, size[1]), np.float32),
        states=np.zeros((count, width + num_positions, size[1]), np.float32),
        tokens=np.zeros((count, width + num_positions), np.int64),
        next_tokens=np.zeros((count, width), np.int64),
        written=np.full((count, width, num_positions), -1, np.int64),
        anchors=np.zeros((count, width), bool),
        is_row=np.zeros((count, width), bool),
    )
    for at, each in enumerate(windows):
        _fill(batch, at, each, num_positions)
    return batch


def _fill(batch: Batch, at: int, window: Window, num_positions: int) -> None:
    example, length = window.example, window.end - window.begin
    rows = example.features[window.begin : window.end + num_positions]
    batch.features[at, :length] = rows[:length, :-1]
    batch.states[at, : len(rows)] = rows[:, -1]
    places = example.first + np.arange(window.begin, window.end)
    tokens = example.conversation.tokens
    read = tokens[places[0] : places[0] + length + num_positions]
    batch.tokens[at, : len(read)] = read
    batch.next_tokens[at, :length] = tokens[places + 1]
    batch.written[at, :length] = written_after(tokens, places, num_positions)
    batch.anchors[at, :length] = np.arange(window.begin, window.end) >= example.anchors[0]
    batch.is_row[at, :length] = True


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], note: object = None, mode: int = 0o644
) -> None:
    """note: what JSON can hold. Raises StorageError where there is no space, OSError."""
    stored: dict[str, Any] = {**arrays, "note": np.array(json.dumps(note))}
    with atomic_file(path, mode) as work, work.open("wb") as file:
        np.savez(file, **stored)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Returns the arrays and the note. Raises ValueError for a file that is not whole, OSError."""
    try:
        with path.open("rb") as file, np.load(file) as stored:  # which refuses pickles
            arrays = dict(stored)
        return arrays, json.loads(str(arrays.pop("note")))
    except (AttributeError, BadZipFile, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from None
