"""Read a target's hidden states for conversations, store them in float16, and form batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from edge_spec.core.features import GivesFeatures
from edge_spec.core.model import Model, Progress
from edge_spec.distill.prompts import Conversation
from edge_spec.errors import UnsupportedModelError
from edge_spec.storage.atomic import atomic_file

_KEPT = np.dtype("<f2")
_LARGEST = float(np.finfo(_KEPT).max)
_READING = "Reading what the model computes"


@dataclass(frozen=True, eq=False)
class Example:
    """features: [rows, layers, hidden_size] float16 of the conversation's tokens from `first` on,
    except the last, which nothing follows."""

    conversation: Conversation
    first: int
    features: np.ndarray

    @property
    def anchors(self) -> np.ndarray:
        """Rows from which drafting may begin. In the first, the target chose the answer's first
        token; the first draft token is the second."""
        start = self.conversation.start - 1 - self.first
        return np.arange(start, len(self.features))


@dataclass(frozen=True)
class FeatureRequest:
    """layers: numbered as in `core.features`. of_answers: without prompts."""

    layers: tuple[int, ...]
    of_answers: bool

    def first_token(self, conversation: Conversation) -> int:
        return conversation.start - 1 if self.of_answers else 0


def to_half(values: np.ndarray) -> np.ndarray:
    kept: np.ndarray = np.clip(values, -_LARGEST, _LARGEST).astype(_KEPT)
    return kept


def require_features(model: Model, name: str) -> None:
    """Raises UnsupportedModelError if the runtime provides no features."""
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
) -> list[Example]:
    """Return examples sorted by prompt. folder: stores the features, and is resumed. Raises an
    EdgeSpecError, OSError."""
    conversations = sort_by_prompt(conversations)
    hidden_size = model.config.hidden_size
    shape = (-1, len(request.layers), hidden_size)
    sizes = [len(each.tokens) - 1 - request.first_token(each) for each in conversations]
    ends = np.cumsum(sizes) * len(request.layers) * hidden_size * _KEPT.itemsize  # in the file
    path = folder / f"features-{_digest(conversations, request)}.bin"
    for other in folder.glob("features-*.bin"):
        if other != path:  # of other conversations
            other.unlink()
    with path.open("ab") as file:
        begun = int(np.searchsorted(ends, file.tell(), side="right"))
        file.truncate(int(ends[begun - 1]) if begun else 0)
        progress(_READING, begun / len(conversations))
        with closing(read_rows(model, conversations[begun:], request)) as found:
            for done, rows in enumerate(found, begun + 1):
                file.write(rows.tobytes())
                progress(_READING, done / len(conversations))
    stored = np.split(np.memmap(path, _KEPT, "r").reshape(shape), np.cumsum(sizes)[:-1])
    return [
        Example(each, request.first_token(each), rows)
        for each, rows in zip(conversations, stored, strict=True)
    ]


def read_rows(
    model: Model, conversations: Sequence[Conversation], request: FeatureRequest
) -> Generator[np.ndarray]:
    """Yield [rows, layers, hidden_size] float16 of each conversation, in order."""
    if not conversations:
        return
    session = model.open_session()
    pieces: list[np.ndarray] = []

    def take(position: int, rows: np.ndarray) -> None:
        pieces.append(to_half(rows))

    def read(tokens: np.ndarray) -> None:
        if len(tokens):  # an answer of one token has no rows
            session.prefill(tokens.tolist())

    prompt: np.ndarray | None = None
    of_prompt: list[np.ndarray] = []
    try:
        assert isinstance(session, GivesFeatures)
        session.collect_features(request.layers, take)
        for each in conversations:
            asked = each.tokens[: each.start]
            pieces.clear()
            # A separate prefill, so that results do not depend on where reading resumed.
            if prompt is None or not np.array_equal(asked, prompt):
                session.rollback(0)
                read(asked)
                prompt, of_prompt = asked, pieces.copy()
                pieces.clear()
            else:
                session.rollback(each.start)
            read(each.tokens[each.start : -1])
            yield np.concatenate([*of_prompt, *pieces])[request.first_token(each) :]
    finally:
        session.close()


def sort_by_prompt(conversations: Sequence[Conversation]) -> list[Conversation]:
    """Group answers by prompt, so that each prompt is read once."""
    prompts = [each.tokens[: each.start].tobytes() for each in conversations]
    first_at = {prompt: index for index, prompt in reversed(list(enumerate(prompts)))}
    order = sorted(range(len(prompts)), key=lambda index: first_at[prompts[index]])
    return [conversations[index] for index in order]


def _digest(conversations: Sequence[Conversation], request: FeatureRequest) -> str:
    content = hashlib.sha256(repr((request.layers, request.of_answers)).encode())
    for each in conversations:
        content.update(f"{each.start} {len(each.tokens)} ".encode() + each.tokens.tobytes())
    return content.hexdigest()[:16]


@dataclass(frozen=True, eq=False)
class Window:
    """Rows `begin` to `end` of an example."""

    example: Example
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class Batch:
    """Windows stacked and padded with zeros.

    features: [windows, rows, layers, hidden_size] float32, without the last layer's.
    states: [windows, rows + positions, hidden_size] float32, after the target's final norm.
    next_tokens: [windows, rows] int64, the token after each row.
    written: [windows, rows, positions] int64, the tokens after that one; -1 beyond the end.
    anchors: [windows, rows] bool, where drafting may begin.
    is_row: [windows, rows] bool; False for padding.
    """

    features: np.ndarray
    states: np.ndarray
    next_tokens: np.ndarray
    written: np.ndarray
    anchors: np.ndarray
    is_row: np.ndarray


def windows_of(examples: Sequence[Example], num_rows: int) -> list[Window]:
    """Return windows of at most `num_rows` rows, with an anchor each."""
    return [
        Window(each, begin, min(begin + num_rows, len(each.features)))
        for each in examples
        for begin in range(0, len(each.features), num_rows)
        if begin + num_rows > each.anchors[0]
    ]


def shuffle_batches(
    windows: Sequence[Window], rows_a_batch: int, seed: int, epoch: int
) -> list[list[Window]]:
    """Return batches of similarly long windows, reproducible by seed and epoch."""
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(windows))
    lengths = np.array([len(windows[i]) for i in order])
    order = order[np.argsort(lengths // 32, kind="stable")]
    batches = list(in_batches([windows[i] for i in order], rows_a_batch))
    return [batches[i] for i in random.permutation(len(batches))]


def in_batches(windows: Sequence[Window], rows_a_batch: int) -> Iterator[list[Window]]:
    """Yield batches of about `rows_a_batch` rows with padding."""
    batch: list[Window] = []
    for window in windows:
        widest = max(map(len, [*batch, window]))
        if batch and widest * (len(batch) + 1) > rows_a_batch:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def batch_of(windows: Sequence[Window], num_positions: int) -> Batch:
    """num_positions: draft tokens."""
    count, width = len(windows), max(map(len, windows))
    num_layers, size = windows[0].example.features.shape[1:]
    batch = Batch(
        features=np.zeros((count, width, num_layers - 1, size), np.float32),
        states=np.zeros((count, width + num_positions, size), np.float32),
        next_tokens=np.zeros((count, width), np.int64),
        written=np.full((count, width, num_positions), -1, np.int64),
        anchors=np.zeros((count, width), bool),
        is_row=np.zeros((count, width), bool),
    )
    no_tokens = np.full(num_positions + 1, -1, np.int32)  # after the end of a text
    for at, each in enumerate(windows):
        example, length = each.example, len(each)
        rows = example.features[each.begin : each.end + num_positions]
        batch.features[at, :length] = rows[:length, :-1]
        batch.states[at, : len(rows)] = rows[:, -1]
        tokens, first = example.conversation.tokens, example.first + each.begin
        places = first + np.arange(length)
        batch.next_tokens[at, :length] = tokens[places + 1]
        drafted = places[:, None] + 2 + np.arange(num_positions)
        batch.written[at, :length] = np.concatenate([tokens, no_tokens])[drafted]
        batch.anchors[at, :length] = np.arange(each.begin, each.end) >= example.anchors[0]
        batch.is_row[at, :length] = True
    return batch


def save_arrays(
    path: Path, arrays: Mapping[str, np.ndarray], note: object = None, mode: int = 0o644
) -> None:
    """note: for JSON. Raises StorageError if the disk is full, OSError."""
    stored: dict[str, Any] = {**arrays, "note": np.array(json.dumps(note))}
    with atomic_file(path, mode) as work, work.open("wb") as file:
        np.savez(file, **stored)


def load_arrays(path: Path) -> tuple[dict[str, np.ndarray], Any]:
    """Return the arrays and the note. Raises ValueError for a damaged file, OSError."""
    try:
        with path.open("rb") as file, np.load(file) as stored:  # np.load refuses pickles
            arrays = dict(stored)
        return arrays, json.loads(str(arrays.pop("note")))
    except (AttributeError, BadZipFile, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"it is damaged: {error}") from None
