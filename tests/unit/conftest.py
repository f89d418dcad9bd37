"""Fixtures of the unit tests. No network, no model file, no GPU.

Helpers are fixtures that return functions or classes: under --import-mode=importlib test modules
cannot import each other. They are session-scoped, so that hypothesis may use them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import settings
from tokenizers import decoders, models, pre_tokenizers

from edge_spec.core.metrics import RoundStats
from edge_spec.core.model import Forward
from edge_spec.core.sampling import Sampler, SamplingParams
from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.factory import DrafterContext
from edge_spec.drafters.protocol import Budget, Drafter
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.decoder import Decoder, GenerationLimits
from edge_spec.engine.engine import Engine
from edge_spec.engine.results import DecodedToken
from edge_spec.engine.speculation import Speculation, SpeculationFactory
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.policy import FixedPolicy
from edge_spec.testing import ScriptedModel, ScriptedSession, random_logits
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import GrammarCompiler
from edge_spec.text.tokenizer import Tokenizer

# The same examples in every run.
settings.register_profile("unit", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("unit")

Candidate = Callable[[tuple[int, ...], Budget], tuple[Sequence[int], Sequence[int]]]

# GPT-2's stand-ins for bytes: printable Latin-1 for itself, the others from U+0100 on.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_SYMBOLS = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
EOS, VOCAB = 258, 260
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def _make_tree(pending: int, tokens: Sequence[int], parents: Sequence[int]) -> TokenTree:
    rows = 1 + len(tokens)
    return TokenTree(
        np.array([pending, *tokens], np.int32),
        np.array([-1, *parents], np.int32),
        np.ones(rows, np.float32),
        proposed_by=("", *["test"] * len(tokens)),
    )


class TreeDrafter(Drafter):
    """Proposes what `candidate(text so far, budget)` returns: tokens and their parents' rows."""

    name = "test"

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        self.text: list[int] = []
        self.budgets: list[tuple[int, Budget]] = []  # with the length of the text

    def begin(self, prompt: Sequence[int], sampler: Any = None) -> None:
        self.text = list(prompt)

    def propose(self, pending: int, budget: Budget) -> TokenTree:
        assert pending == self.text[-1]
        self.budgets.append((len(self.text), budget))
        return _make_tree(pending, *self.candidate(tuple(self.text), budget))

    def observe(self, tree: TokenTree, out: Forward, verdict: Verdict) -> None:
        self.text += verdict.tokens


@dataclass
class Run:
    tokens: list[int]
    decoded: list[DecodedToken]
    rounds: list[RoundStats]
    session: ScriptedSession


def _decode(
    model: ScriptedModel,
    prompt: Sequence[int],
    drafters: Sequence[Any] = (),
    *,
    params: SamplingParams | None = None,
    max_tokens: int = 20,
    stop_ids: Sequence[int] = (),
    max_rows: int = 64,
    policy: Any = None,
) -> Run:
    """Decodes and checks after each round what the cache holds."""
    session = model.open_session()
    session.prefill(prompt[:-1])
    run = Run([], [], [], session)
    limits = GenerationLimits(
        max_tokens, frozenset(stop_ids), model.config.context_length, max_rows
    )
    sampler = Sampler(params or SamplingParams(), prompt)
    decoder = Decoder(session, drafters, policy or FixedPolicy())
    for decoded in decoder.decode(prompt, sampler, limits, run.rounds.append):
        run.decoded += decoded
        run.tokens += [token.id for token in decoded]
        assert session.committed == [*prompt, *run.tokens][:-1]
    assert session.committed == [*prompt, *run.tokens][:-1]
    return run


def _greedy(model: ScriptedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The most probable continuation, without any of the code under test."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(model.next_logits(tuple(tokens)))))
    return tokens[len(prompt) :]


def _scripted(prompt_length: int, script: Sequence[int], vocab_size: int = VOCAB) -> ScriptedModel:
    """A model that writes `script` after a prompt of this length and then only token 0."""

    def next_logits(tokens: tuple[int, ...]) -> np.ndarray:
        logits = np.zeros(vocab_size, np.float32)
        position = len(tokens) - prompt_length
        logits[script[position] if 0 <= position < len(script) else 0] = 5.0
        return logits

    return ScriptedModel(next_logits, vocab_size)


@pytest.fixture(scope="session")
def make_tree() -> Any:
    return _make_tree


@pytest.fixture(scope="session")
def tree_drafter() -> Any:
    return TreeDrafter


@pytest.fixture(scope="session")
def decode() -> Any:
    return _decode


@pytest.fixture(scope="session")
def greedy() -> Any:
    return _greedy


@pytest.fixture(scope="session")
def scripted() -> Any:
    return _scripted


@pytest.fixture(scope="session")
def byte_tokenizer_json() -> str:
    """256 bytes with their own value as id, "th" and "e ", and the special <eos> and <bos>."""
    vocab = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}
    space = _SYMBOLS[ord(" ")]
    vocab |= {"th": 256, f"e{space}": 257}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [("t", "h"), ("e", space)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    assert tokenizer.token_to_id("<eos>") == EOS and tokenizer.get_vocab_size() == VOCAB
    return tokenizer.to_str()


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_json: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer_json)


@pytest.fixture(scope="session")
def make_engine(byte_tokenizer: Tokenizer) -> Any:
    text = ChatFormat(byte_tokenizer, CHAT_TEMPLATE, eos_ids=(EOS,), bos_id=None)

    def make(
        model: ScriptedModel,
        drafters: Sequence[Any] = (),
        policy: Any = None,
        min_rows: int = 1,
        **parts: Any,
    ) -> Engine:
        batch_invariance = BatchInvariance(0, ())
        speculation_factory = SpeculationFactory(
            DrafterContext(model.config.vocab_size), model.capabilities, batch_invariance
        )
        return Engine(
            EngineComponents(
                name="test",
                runtime="scripted",
                model=model,
                text=text,
                batch_invariance=batch_invariance,
                speculation=Speculation(drafters, policy or FixedPolicy()),
                speculation_factory=speculation_factory,
                grammars=GrammarCompiler(text.tokenizer, model.config.vocab_size, text.eos_ids),
                min_rows=min_rows,
                **parts,
            )
        )

    return make


@pytest.fixture(scope="session")
def remembers_all() -> Any:
    """A model in which every token so far decides the next: any wrong token in a cache shows."""

    def make(context_length: int = 512) -> ScriptedModel:
        return ScriptedModel(random_logits(VOCAB, order=10_000), VOCAB, context_length)

    return make
