"""`edge-spec chat` over a model whose answers are known; started by the tests of the terminal.

    scripted_chat.py ANSWERS PACE

ANSWERS: a JSON file, prompts and their answers. PACE: a file descriptor of which one byte is read
before each round of an answer to a prompt that begins with "slow". The prompt "fail" ends in
an error.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import termios
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from edge_spec import Engine
from edge_spec.apps.chat import run
from edge_spec.cli.options import SamplingOptions
from edge_spec.core.model import Forward
from edge_spec.core.tree import TokenTree
from edge_spec.drafters.factory import DrafterContext
from edge_spec.engine.components import EngineComponents
from edge_spec.engine.speculation import SpeculationFactory
from edge_spec.errors import ModelFileError, SessionError
from edge_spec.scheduler.batch_invariance import BatchInvariance
from edge_spec.scheduler.lossless import Losslessness
from edge_spec.testing import ScriptedModel, ScriptedSession
from edge_spec.text.chat_format import ChatFormat
from edge_spec.text.grammar import GrammarCompiler
from edge_spec.text.tokenizer import Tokenizer

SPECIALS = ["<eos>", "<user>", "<asked>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<user>' if message.role == 'user' else '' }}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}"
    "{{ '<asked>' if message.role == 'user' else '<eos>' }}"
    "{% endfor %}"
)


def byte_tokenizer() -> Tokenizer:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIALS)
    return Tokenizer(library.to_str())


class AnsweringModel(ScriptedModel):
    """Answers what was asked last."""

    def __init__(self, answers: Mapping[str, str], pace: int) -> None:
        self.text = byte_tokenizer()
        self.eos, self.user, self.asked = (self.text.encode(each)[0] for each in SPECIALS)
        self.answers = {ask: self.text.encode(answer) for ask, answer in answers.items()}
        self.pace = pace
        super().__init__(self._next_logits, 256 + len(SPECIALS), context_length=4096)

    def open_session(self) -> ScriptedSession:
        return PacedSession(self)

    def prompt(self, tokens: list[int]) -> str:
        asked = len(tokens) - 1 - tokens[::-1].index(self.asked)
        user = asked - tokens[asked::-1].index(self.user)
        return self.text.decode(tokens[user + 1 : asked])

    def _next_logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        written = tokens[::-1].index(self.asked)
        answer = self.answers.get(self.prompt(list(tokens)), [])
        logits = np.zeros(self.config.vocab_size, np.float32)
        logits[answer[written] if written < len(answer) else self.eos] = 5.0
        return logits


class PacedSession(ScriptedSession):
    def __init__(self, model: AnsweringModel) -> None:
        super().__init__(model)
        self._answering = model

    def forward(self, tree: TokenTree) -> Forward:
        tokens = [*self.committed, int(tree.tokens[0])]
        prompt = self._answering.prompt(tokens)
        if prompt.startswith("slow"):
            os.read(self._answering.pace, 1)
        if prompt == "fail":
            raise SessionError("the device is gone", remedy="Try another one.")
        return super().forward(tree)


def opener(answers: Mapping[str, str], pace: int) -> Any:
    def open_model(model: str, report: Any) -> Engine:
        if model == "missing":
            raise ModelFileError("there is no model called missing", remedy="Choose another.")
        while model == "endless" and os.read(pace, 1):
            report("Downloading", 0.5)
        scripted = AnsweringModel(answers, pace)
        batch_invariance = BatchInvariance(0, (1,))
        text = ChatFormat(scripted.text, TEMPLATE, (scripted.eos,), None)
        speculation_factory = SpeculationFactory(
            DrafterContext(scripted.config.vocab_size),
            scripted.capabilities,
            batch_invariance,
            Losslessness(),
        )
        return Engine(
            EngineComponents(
                name=model,
                runtime="script",
                model=scripted,
                text=text,
                grammars=GrammarCompiler(text.tokenizer, scripted.config.vocab_size, text.eos_ids),
                batch_invariance=batch_invariance,
                speculation=speculation_factory.choose("suffix"),
                speculation_factory=speculation_factory,
                drafter="suffix",
            )
        )

    return open_model


if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # its signals are for this process
    scripted_answers = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    run(
        opener(scripted_answers, int(sys.argv[2])),
        "scripted",
        SamplingOptions(max_tokens=600, temperature=0.0),
        None,
        as_json=False,
    )
