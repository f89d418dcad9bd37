"""Measure how a runtime's logits depend on the number of rows in a pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from pydantic import Field

from edge_spec.core.config import ModelConfig
from edge_spec.core.model import Model, Session
from edge_spec.core.tree import TokenTree

BRANCH_ROWS, BRANCH_ROUNDS = 8, 4  # for a small model
_TOP_TOKENS = 32


class Branching(NamedTuple):
    """A tree of BRANCH_ROWS rows, and those of its rows that form a chain and are kept."""

    parents: tuple[int, ...]
    kept: tuple[int, ...]


# Kept rows follow another branch, or precede rows that are not kept.
BRANCHES = Branching((-1, 0, 1, 2, 0, 4, 5, 6), (0, 4, 5, 6, 7))
PROBES = Branching((-1, 0, 1, 2, 0, 4, 1, 6), (0, 1, 2, 3))


def branches_agree(
    session: Session, vocab_size: int, num_rounds: int, branching: Branching
) -> bool:
    """Return True if the kept rows of a tree are bit-identical to the same tokens as a chain.

    Compares logits over several rounds unless the first fails: a cache may fill holes that rejected
    rows leave, and order then matters. session: holds the prompt, before and after.
    """
    drawn = np.random.default_rng(1).integers(0, vocab_size, num_rounds * BRANCH_ROWS)
    rounds = drawn.reshape(-1, BRANCH_ROWS).astype(np.int32)
    for part in (rounds[:1], rounds):
        branched = _score_rounds(session, part, branching, branches=True)
        if not np.array_equal(branched, _score_rounds(session, part, branching, branches=False)):
            return False
    return True


def _score_rounds(
    session: Session, rounds: np.ndarray, branching: Branching, branches: bool
) -> np.ndarray:
    parents, path = np.array(branching.parents, np.int32), list(branching.kept)
    length, rows = session.length, []
    for tokens in rounds:
        chain = TokenTree.chain(int(tokens[0]), tokens[path[1:]].tolist())
        tree = TokenTree(tokens, parents, np.ones(BRANCH_ROWS, np.float32))
        kept = path if branches else list(range(len(path)))
        rows.append(session.forward(tree if branches else chain).logits[kept].copy())
        session.commit(kept)
    session.rollback(length)
    return np.concatenate(rows)


def margin_change(logits: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest change, over rows, of a likely token's distance to the likeliest."""
    count = min(_TOP_TOKENS, expected.shape[1])
    top = np.argpartition(expected, -count, axis=1)[:, -count:]
    change = np.take_along_axis(logits - expected, top, axis=1)
    best = np.take_along_axis(logits - expected, expected.argmax(axis=1)[:, None], axis=1)
    return float(np.abs(change - best).max())


MARGIN_WIDTHS = (1, 8)  # enough to measure the noise
USUAL_WIDTHS = tuple(range(1, 17))
_SPREAD = frozenset({1, 2, 3, 4, 6, 8, 12, 16})  # kernels change less often at wide passes
_WIDER = (24, 32, 48, 64)  # if more rows than usual are needed
_COMPARED_TOKENS = 16  # at the usual widths; wider ones score more
_LEAST_COMPARED = 4
_COMPARED_VALUES = 1 << 18  # residual stream values before each layer, over all compared tokens
_PROMPT_TOKENS = 16
# In logits: with rounded activations and no more noise than this, no rounding has flipped yet. (On
# ARM64, 16 tokens of a random 2-layer model changed by at most 3e-6, the 12th of another text by
# 0.2. The demo model's 30 layers show it every few tokens.)
_ROUNDED_NOISE = 1e-3


@dataclass(frozen=True)
class BatchInvariance:
    """How rows of one model agree across passes.

    `tie_margin`: largest seen change of a margin between likely tokens across widths.
    `invariant_widths`: ascending widths whose chain rows, at any place, were bit-identical to plain
    steps padded to the first of them; else (1,). `branch_invariant`: so were rows of a branch and
    rows after a committed one. `probe_invariant`: so were chain rows before unrelated rows that are
    never kept. `noise_is_known`: `tie_margin` holds for other texts; False if activations are
    rounded and too few were seen for one to flip. `by_construction`: kernels make rows agree in all
    passes; nothing was measured. `plain_cost`: a pass of `plain_width` rows over one of a row.
    `widths`: measured widths. `way`: the chosen way of computing, if there are several.
    """

    tie_margin: float
    invariant_widths: tuple[int, ...]
    branch_invariant: bool = True
    probe_invariant: bool = True
    noise_is_known: bool = True
    by_construction: bool = False
    plain_cost: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    widths: tuple[int, ...] = ()
    way: str = ""

    @property
    def plain_width(self) -> int:
        return self.invariant_widths[0]


BY_CONSTRUCTION = BatchInvariance(0.0, (1,), by_construction=True)


@dataclass(frozen=True)
class _Scores:
    """The same tokens after one prompt, scored at several widths."""

    prompt: Sequence[int]
    tokens: Sequence[int]  # scored tokens
    margin: float  # largest change of a likely token's distance to the likeliest
    digests: Mapping[int, Sequence[bytes]]  # of each token's logits, by width


def measure_batch_invariance(
    model: Model, widths: Sequence[int] = MARGIN_WIDTHS
) -> BatchInvariance:
    """Score the same tokens at each of the ascending widths, of which the first is 1.

    Takes 12 plain steps for MARGIN_WIDTHS, 90 for USUAL_WIDTHS, plus two to eighteen passes of up
    to BRANCH_ROWS rows and maybe 16 padded plain steps. Takes twice that and a prefill if long
    texts use other kernels; a third or less for a large model (`_num_compared`).
    """
    widths = measured_widths(model, widths)
    scores = []
    branch_invariant = probe_invariant = model.capabilities.trees
    vocab_size = model.config.vocab_size
    num_rounds = BRANCH_ROUNDS // 2 if is_large(model.config) else BRANCH_ROUNDS
    for prompt_tokens in _prompts(model, widths[-1]):
        room = model.config.context_length - prompt_tokens
        is_short = room < BRANCH_ROUNDS * BRANCH_ROWS
        if is_short or model.capabilities.max_rows < BRANCH_ROWS:
            branch_invariant = probe_invariant = False  # unknown
        with closing(model.open_session()) as session:
            scores.append(_score_widths(model, session, prompt_tokens, widths))
            if branch_invariant:
                branch_invariant = branches_agree(session, vocab_size, num_rounds, BRANCHES)
            if probe_invariant:
                probe_invariant = branches_agree(session, vocab_size, num_rounds, PROBES)
    margin = max((each.margin for each in scores), default=0.0)
    return BatchInvariance(
        margin,
        _invariant(model, scores, widths),
        branch_invariant,
        probe_invariant,
        noise_is_known=not model.capabilities.rounds_activations or margin > _ROUNDED_NOISE,
        widths=tuple(widths),
    )


def _prompts(model: Model, widest: int) -> list[int]:
    """Return the prompt lengths to measure after; for slow, large models only the longer one."""
    settled = model.capabilities.settled_tokens
    wanted = {settled} if is_large(model.config) and settled else {_PROMPT_TOKENS, settled}
    longest = model.config.context_length - widest
    return sorted({min(tokens, longest) for tokens in wanted} - {0})


def is_large(config: ModelConfig) -> bool:
    """Return True if fewer tokens tell as much as _COMPARED_TOKENS of a small model."""
    return _num_compared(config) < _COMPARED_TOKENS


def _num_compared(config: ModelConfig) -> int:
    """Return how many tokens to score at each usual width. Rounding activations to 8 bits hides
    most differing last bits, less so with more activations."""
    enough = -(-_COMPARED_VALUES // (config.num_layers * config.hidden_size or 1))
    return max(_LEAST_COMPARED, min(_COMPARED_TOKENS, enough))


def widths_for(num_rows: int) -> tuple[int, ...]:
    """Return the widths to measure if rounds have up to `num_rows` rows."""
    wider = [width for width in _WIDER if width <= num_rows]
    if num_rows > max(USUAL_WIDTHS[-1], *wider, 0):
        wider += [width for width in _WIDER if width > num_rows][:1]
    return (*USUAL_WIDTHS, *wider)


def measured_widths(model: Model, widths: Sequence[int]) -> list[int]:
    """Return the widths that fit the model and its context; only some for a large model."""
    limit = min(model.capabilities.verified_rows, max(1, model.config.context_length // 2))
    left_out = set(USUAL_WIDTHS) - _SPREAD if is_large(model.config) else set()
    return [width for width in widths if width <= limit and width not in left_out]


def _score_widths(
    model: Model, session: Session, prompt_tokens: int, widths: Sequence[int]
) -> _Scores:
    """Score tokens at each width, leaving the prompt in the session."""
    num_rows = widths[-1]
    num_compared = _num_compared(model.config)
    drawn = np.random.default_rng(0).integers(0, model.config.vocab_size, prompt_tokens + num_rows)
    prompt, tokens = drawn[:prompt_tokens].tolist(), drawn[prompt_tokens:].tolist()
    session.prefill(prompt)
    widest = session.forward(TokenTree.chain(tokens[0], tokens[1:])).logits.copy()
    margin, digests = 0.0, {num_rows: _digests(widest)}
    for width in widths[:-1]:
        session.rollback(prompt_tokens)
        found: list[bytes] = []
        compared = max(width, min(num_rows, num_compared))
        for start in range(0, compared - width + 1, width):
            part = tokens[start : start + width]
            logits = session.forward(TokenTree.chain(part[0], part[1:])).logits
            margin = max(margin, margin_change(logits, widest[start : start + width]))
            found += _digests(logits)
            session.commit(range(width))
        digests[width] = found
    session.rollback(prompt_tokens)
    return _Scores(prompt, tokens, margin, digests)


def _invariant(model: Model, scores: Sequence[_Scores], widths: Sequence[int]) -> tuple[int, ...]:
    """Return widths that agree with each other and with padded plain steps. Of several groups takes
    the one with most of _SPREAD, then the narrowest."""
    groups: list[list[int]] = []
    for width in widths:
        for group in groups:
            if all(_agree(each.digests[group[0]], each.digests[width]) for each in scores):
                group.append(width)
                break
        else:
            groups.append([width])
    for group in sorted(groups, key=lambda group: (-len(_SPREAD & set(group)), group[0])):
        if group[0] == 1 and len(group) > 1:
            return tuple(group)
        # Padded plain steps score every token in row 0, unlike the passes above.
        if group[0] > 1 and all(_agrees_padded(model, each, group) for each in scores):
            return tuple(group)
    return (1,)


def _agrees_padded(model: Model, scores: _Scores, group: Sequence[int]) -> bool:
    """Compare padded plain steps of the tokens that fit the context."""
    width, found = group[0], list[bytes]()
    with closing(model.open_session()) as session:
        session.prefill(scores.prompt)
        for token in scores.tokens[: _num_compared(model.config)]:
            if session.length + width > model.config.context_length:
                break
            found += _digests(session.forward(TokenTree.chain(token).padded(width)).logits[:1])
            session.commit([0])
    return all(_agree(found, scores.digests[width]) for width in group)


def _digests(logits: np.ndarray) -> list[bytes]:
    return [hashlib.sha256(row.tobytes()).digest() for row in logits]


def _agree(first: Sequence[bytes], second: Sequence[bytes]) -> bool:
    return all(one == other for one, other in zip(first, second, strict=False))
