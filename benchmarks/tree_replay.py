"""Replays recorded texts with chains and with trees, of suffix lookup, recycling and drafts.

    python benchmarks/simulate.py record TEXTS.npz --model TARGET --prompts FILE
    python benchmarks/tree_replay.py record TEXTS.npz DRAFT OUT.npz
    python benchmarks/tree_replay.py replay TEXTS.npz OUT.npz [--json FILE]

`record` keeps what a draft thinks likely after every token of the texts, twice: with all of the
text before it, and with the last 16 tokens alone, which makes a draft that is right as often as a
trained head is. `replay` runs the real round loop, drafters and policy on a clock that passes of
both models advance, and prints ratios to plain decoding: where draft tokens form chains, and where
they may branch. Off the text a draft is taken to be as sure as at another place of it. All of it is
simulated, and the same on every run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import open_engine, report
from simulate import DRAFT_COSTS, read

from edge_spec.control.adaptive import AdaptivePolicy
from edge_spec.control.cost import RowCosts
from edge_spec.core.metrics import Stats
from edge_spec.core.model import Capabilities, Forward, Session
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.composite import CompositeDrafter
from edge_spec.drafters.draft.draft_model import DraftModelDrafter
from edge_spec.drafters.lookup.recycling import TOP_TOKENS, RecyclingDrafter, top_tokens
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.drafters.protocol import Drafter
from edge_spec.placement.replay import Charged, Recording, VirtualClock, replay
from edge_spec.testing.scripted import smallest_config

STEP_S = 16.5e-3
# t(k) over t(1): of our kernels on llama.cpp for a model of 1.5B parameters (Zen 5), and of
# processors that compute more beside what they read.
TABLES = {
    "cpu": {1: 1, 2: 1.08, 3: 1.11, 4: 1.22, 6: 1.43, 8: 1.7, 12: 2.6, 16: 3.3},
    "wide": {1: 1, 2: 1.03, 4: 1.06, 8: 1.15, 12: 1.3, 16: 1.6},
    "gpu": {1: 1, 2: 1.01, 4: 1.02, 8: 1.05, 16: 1.12},
}
DRAFT_SLOPE = 0.06  # of a draft's pass, more for each further row
ORDERS = 4
READ_AT_ONCE = 16
SHORT = 16  # tokens that a draft with a short memory sees
KINDS = ("whole", "short")
_LEAST = 1e-6  # share of a token that is not among the likeliest


@dataclass(frozen=True)
class Drafted:
    """What a draft thinks likely after each token of a text, [tokens, TOP_TOKENS] each."""

    tokens: np.ndarray
    shares: np.ndarray


class RecordedDraft:
    """A draft model whose scores are those that were recorded."""

    capabilities = Capabilities(max_rows=64, trees=True, rollback=True, hidden_states=False)

    def __init__(
        self,
        texts: Sequence[tuple[Recording, Drafted]],
        vocab_size: int,
        clock: VirtualClock,
        pass_s: Callable[[int], float],
    ) -> None:
        self.config = smallest_config("draft", vocab_size, 1 << 16)
        self._texts = {recording.prompt: (recording, found) for recording, found in texts}
        self._lengths = sorted({len(prompt) for prompt in self._texts}, reverse=True)
        self._clock, self._pass_s = clock, pass_s
        self._scores = np.empty((64, vocab_size), np.float32)

    def open_session(self) -> RecordedDraftSession:
        return RecordedDraftSession(self)

    def close(self) -> None: ...

    def score(self, committed: Sequence[int], tree: TokenTree) -> np.ndarray:
        """[rows, vocab]"""
        self._clock.advance(self._pass_s(len(tree)))
        recording, drafted = self._text_of([*committed, int(tree.tokens[0])])
        text = (*recording.prompt, *recording.tokens)
        logits = self._scores[: len(tree)]
        logits[:] = np.log(_LEAST)
        on_text: list[bool] = []
        for row, (token, parent) in enumerate(
            zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True)
        ):
            place = len(committed) + int(tree.depths[row])
            before = on_text[parent] if row else tuple(committed) == text[: len(committed)]
            on_text.append(before and place < len(text) and text[place] == token)
            which = place + 1 - len(recording.prompt)
            if not on_text[row] or not 0 <= which < len(drafted.tokens):
                which = (7919 * token + place) % len(drafted.tokens)
            logits[row, drafted.tokens[which]] = np.log(np.maximum(drafted.shares[which], _LEAST))
        return logits

    def _text_of(self, tokens: Sequence[int]) -> tuple[Recording, Drafted]:
        for length in self._lengths:
            if found := self._texts.get(tuple(tokens[:length])):
                return found
        return next(iter(self._texts.values()))


class RecordedDraftSession:
    def __init__(self, draft: RecordedDraft) -> None:
        self._draft = draft
        self._tokens: list[int] = []
        self._tree = TokenTree.chain(0)

    @property
    def length(self) -> int:
        return len(self._tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def forward(self, tree: TokenTree) -> Forward:
        self._tree = tree
        return Forward(self._draft.score(self._tokens, tree))

    def commit(self, rows: Sequence[int]) -> None:
        self._tokens += self._tree.tokens[list(rows)].tolist()

    def rollback(self, length: int) -> None:
        del self._tokens[length:]

    def close(self) -> None: ...


def likeliest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    best = top_tokens(logits, TOP_TOKENS)
    highest = logits.max(axis=1, keepdims=True)
    shares = np.exp(np.take_along_axis(logits, best, axis=1) - highest)
    return best, shares / np.exp(logits - highest).sum(axis=1, keepdims=True)


def read_text(session: Session, recording: Recording, is_short: bool) -> Drafted:
    text, start = (*recording.prompt, *recording.tokens), len(recording.prompt) - 1
    session.rollback(0)
    if not is_short:
        session.prefill(text[:start])
    found = []
    for first in range(start, len(text) - 1, READ_AT_ONCE):
        last = min(first + READ_AT_ONCE, len(text) - 1)
        begin = max(0, first - SHORT) if is_short else first
        if is_short:
            session.rollback(0)
        tree = TokenTree.chain(text[begin], text[begin + 1 : last])
        found.append(likeliest(session.forward(tree).logits[first - begin :]))
        session.commit(range(len(tree)))
    tokens, shares = zip(*found, strict=True)
    return Drafted(np.concatenate(tokens), np.concatenate(shares))


def record(arguments: argparse.Namespace) -> None:
    recordings, _ = read(arguments.texts)
    arrays: dict[str, np.ndarray] = {}
    with open_engine(arguments.draft, runtime="llamacpp", drafter="none") as engine:
        session = engine.parts.model.open_session()
        for number, recording in enumerate(recordings):
            for kind in KINDS:
                found = read_text(session, recording, kind == "short")
                arrays |= {f"{kind}-tokens{number}": found.tokens.astype(np.int32)}
                arrays |= {f"{kind}-shares{number}": found.shares.astype(np.float16)}
                right = found.tokens == np.array(recording.tokens)[:, None]
                print(recording.category, kind, right.mean(axis=0)[:4].round(2), flush=True)
        session.close()
    np.savez_compressed(arguments.file, **arrays)


class Replayed:
    """Texts and drafts, with tokens numbered by how they come up: vocabularies are large."""

    def __init__(self, texts: Path, drafts: Path) -> None:
        recordings, _ = read(texts)
        with np.load(drafts) as arrays:
            kept = {name: arrays[name] for name in arrays.files}
        numbers: dict[int, int] = {}

        def renumbered(tokens: np.ndarray) -> np.ndarray:
            flat = [numbers.setdefault(token, len(numbers)) for token in tokens.ravel().tolist()]
            return np.array(flat, np.int32).reshape(tokens.shape)

        self.recordings = [
            replace(
                each,
                prompt=tuple(renumbered(np.array(each.prompt)).tolist()),
                tokens=tuple(renumbered(np.array(each.tokens)).tolist()),
                top=renumbered(each.top),
            )
            for each in recordings
        ]
        self.drafted = {
            kind: [
                Drafted(
                    renumbered(kept[f"{kind}-tokens{number}"]),
                    kept[f"{kind}-shares{number}"].astype(np.float32),
                )
                for number in range(len(recordings))
            ]
            for kind in KINDS
        }
        self.vocab_size = len(numbers)
        drawn = np.random.default_rng(0)
        # What an answer begins with depends on those before it.
        self.orders = [drawn.permutation(len(recordings)) for _ in range(ORDERS)]

    def speedup(
        self, table: Mapping[int, float], names: str, kind: str, share: float, branches: bool
    ) -> dict[str, Any]:
        """names: of drafters, joined by commas. kind, share: of the draft, and of a target's step
        that its pass takes."""
        exact = RowCosts({rows: STEP_S * more for rows, more in table.items()})

        def speculate(clock: VirtualClock) -> tuple[list[Drafter], AdaptivePolicy]:
            def draft_s(rows: int) -> float:
                return share * STEP_S * (1 + DRAFT_SLOPE * (rows - 1))

            made = list(self._drafters(names, kind, clock, draft_s))
            free = {each.name for each in made if not isinstance(each, DraftModelDrafter)}
            known = RowCosts(exact.measured)
            return made, AdaptivePolicy(known, {}, free, branches=branches, clock=clock)

        found: list[Stats] = []
        for order in self.orders:
            texts = [self.recordings[number] for number in order]
            found += replay(texts, self.vocab_size, speculate, lambda rows, _: exact.at(rows))
        ratios = [each.predicted_n * STEP_S / (each.predicted_ms / 1e3) for each in found]
        seconds = sum(each.predicted_ms for each in found) / 1e3
        rounds = sum(each.rounds for each in found)
        return {
            "speedup": sum(each.predicted_n for each in found) * STEP_S / seconds,
            "worst": min(ratios),
            "tokens_a_round": sum(each.predicted_n for each in found) / rounds,
            "rows_a_round": 1 + sum(each.draft_n for each in found) / rounds,
        }

    def _drafters(
        self, names: str, kind: str, clock: VirtualClock, draft_s: Callable[[int], float]
    ) -> Iterator[Drafter]:
        lookups: dict[str, Callable[[], Drafter]] = {
            "suffix": SuffixDrafter,
            "suffix+recycling": lambda: CompositeDrafter([SuffixDrafter(), RecyclingDrafter()]),
        }
        for name in names.split(","):
            if name in lookups:
                drafter = lookups[name]()
                yield Charged(drafter, DRAFT_COSTS[drafter.name], clock)
            else:
                pairs = list(zip(self.recordings, self.drafted[kind], strict=True))
                model = RecordedDraft(pairs, self.vocab_size, clock, draft_s)
                yield DraftModelDrafter(model, model.open_session(), self.vocab_size)


CASES = (
    ("suffix", "whole", 0.0),
    ("suffix+recycling", "whole", 0.0),
    ("draft", "whole", 0.44),
    ("draft", "whole", 0.3),
    ("draft", "whole", 0.1),
    ("suffix,draft", "whole", 0.3),
    ("draft", "short", 0.1),
    ("draft", "short", 0.05),
    ("suffix,draft", "short", 0.05),
)


def do_replay(arguments: argparse.Namespace) -> None:
    replayed, found = Replayed(arguments.texts, arguments.drafts), []
    print("| t(k) | drafters | draft | a pass of it | chains | trees | tokens a round | rows |")
    print("|---|---|---|---|---|---|---|---|")
    for table in arguments.tables:
        for names, kind, share in CASES:
            both = [
                replayed.speedup(TABLES[table], names, kind, share, branches)
                for branches in (False, True)
            ]
            found.append({"t(k)": table, "drafters": names, "draft": kind, "share": share})
            found[-1] |= {"chains": both[0], "trees": both[1]}
            cells = [
                f"{both[0]['speedup']:.3f}, {both[0]['worst']:.2f}",
                f"{both[1]['speedup']:.3f}, {both[1]['worst']:.2f}",
                ", ".join(f"{each['tokens_a_round']:.2f}" for each in both),
                ", ".join(f"{each['rows_a_round']:.1f}" for each in both),
            ]
            print(f"| {table} | {names} | {kind} | {share} | {' | '.join(cells)} |", flush=True)
    report({"cases": found}, arguments.json)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("texts", type=Path)
    recording.add_argument("draft")
    recording.add_argument("file", type=Path)
    recording.set_defaults(run=record)
    replaying = commands.add_parser("replay")
    replaying.add_argument("texts", type=Path)
    replaying.add_argument("drafts", type=Path)
    replaying.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    replaying.add_argument("--json", type=Path)
    replaying.set_defaults(run=do_replay)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
