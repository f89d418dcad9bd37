"""Qwen2.5-Coder 0.5B as people have it: its texts, tokens, template, tools and forms on llama.cpp.

What tiny models cannot show: types of a usual quantization beside each other, a vocabulary of
151,936, a template that was not written for a test, and texts in which drafters find something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from edge_spec.apps.server import RunningServer, ServerOptions
from edge_spec.core.metrics import Stats
from edge_spec.engine.engine import Engine
from edge_spec.loader import load_engine
from edge_spec.models import runtimes
from edge_spec.models.options import LoadOptions
from edge_spec.text.grammar import Grammar
from edge_spec.text.tokenizer import Tokenizer
from fixtures.silence import quiet

pytestmark = pytest.mark.slow

NUM_TOKENS = 32
PROMPTS = (
    "Repeat this function, and add one that subtracts: def add(a, b):\n    return a + b",
    "Count from one to twelve, a number a line.",
    "Name a colour, and say in one sentence why you like it.",
)
SYSTEM = (
    "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.{}"
    "<|im_end|>\n"
)
ASKED, ASSISTANT = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
            "required": ["city", "days"],
        },
    },
}
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
AWKWARD = (
    *("", " ", "\n\n\n", "\t\tx", "  two  spaces ", "\u00a0\u2003x", "1234567 3.14 0x1F"),
    *(
        "It's we'll I'D",
        "caf\u00e9 cafe\u0301",
        "\u4f60\u597d\uff0c\u4e16\u754c",
        "\u0e2a\u0e27\u0e31",
    ),
    *("\U0001f469\u200d\U0001f680\U0001f1e9\U0001f1ea", "\u202eright\u202c", "\ufeffbom", "a\x00b"),
    *("def f(x):\r\n\treturn x  # \u00fc\n", "</s>", "<|im_start|>user\n<|im_end|>", "<|im_end"),
    *(f"{FIM[0]}a{FIM[1]}b{FIM[2]}", "<tool_call>\n{}</tool_call>", "[PAD151665]", "x" * 300),
)
Ids = Callable[[Path, str], list[int]]


@pytest.fixture(scope="module")
def engine(coder_gguf: Path) -> Iterator[Engine]:
    """With our kernels, where they were compiled: rows then have the same bits in every pass.
    Elsewhere the mode makes sure of the texts, so that no test depends on the processor."""
    pytest.importorskip("llama_cpp")
    options = LoadOptions(runtime="llamacpp", threads=1, context_length=1024, lossless="always")
    with load_engine(str(coder_gguf), options, quiet) as engine:
        yield engine


@pytest.fixture(scope="module")
def tokenizer(coder_gguf: Path) -> Tokenizer:
    return Tokenizer(runtimes.open_model_info(coder_gguf).tokenizer_json())


def answers(engine: Engine, drafter: str) -> tuple[list[list[int]], Stats]:
    """The tokens of all answers, all draft tokens verified; and the sums of what was drafted."""
    engine.set_drafter(drafter)
    total, found = Stats(), []
    with engine.verifying_all_draft_tokens():
        for prompt in PROMPTS:
            result = engine.chat(prompt, max_tokens=NUM_TOKENS)
            found.append([token.id for token in result.tokens])
            total.draft_n += result.stats.draft_n
            total.draft_n_accepted += result.stats.draft_n_accepted
    return found, total


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[list[int]]:
    found, total = answers(engine, "none")
    assert total.draft_n == 0 and sum(map(len, found)) > 2 * NUM_TOKENS
    return found


@pytest.mark.parametrize("drafter", ["auto", "suffix", "recycling", "lookahead"])
def test_a_drafter_changes_no_text(engine: Engine, plain: list[list[int]], drafter: str) -> None:
    found, total = answers(engine, drafter)
    assert found == plain
    assert total.draft_n > total.draft_n_accepted > 0  # both ways a row can go were gone


def test_three_conversations_at_once_write_what_each_writes_alone(
    engine: Engine, plain: list[list[int]]
) -> None:
    if not engine.parts.speculation_factory.lossless.by_construction:
        pytest.skip("the kernels were not compiled here, or this llama.cpp does not take them")
    engine.set_drafter("auto")
    engines = [engine, engine.fork(), engine.fork()]
    engine.parts.batch.prepare_for(3)
    engine.parts.batch.settle()
    assert engine.parts.batch.most > 1

    def answer(number: int) -> list[list[int]]:
        results = [engines[number].chat(each, max_tokens=NUM_TOKENS) for each in PROMPTS]
        return [[token.id for token in result.tokens] for result in results]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(answer, range(3))) == [plain] * 3
    for each in engines[1:]:
        each.close()


def test_a_draft_of_another_size_changes_no_text(
    engine: Engine, plain: list[list[int]], coder_gguf: Path
) -> None:
    """A model that drafts for itself: all of its tokens are right, and both have to remember the
    same text."""
    options = LoadOptions(
        runtime="llamacpp",
        threads=1,
        context_length=1024,
        draft=(str(coder_gguf),),
        draft_runtime="llamacpp",
        drafter="draft-model",
        draft_n_max=4,
    )
    with load_engine(str(coder_gguf), options, quiet) as pair, pair.verifying_all_draft_tokens():
        result = pair.chat(PROMPTS[0], max_tokens=NUM_TOKENS)
    assert [token.id for token in result.tokens] == plain[0]
    assert result.stats.draft_n_accepted > NUM_TOKENS // 2


def drawn_texts(count: int) -> list[str]:
    """Characters of all kinds that meet at random."""
    rng = np.random.default_rng(11)
    ranges = ((32, 127), (9, 14), (160, 600), (0x900, 0xA00), (0x4E00, 0x4F00), (0x1F300, 0x1F600))
    chosen = rng.integers(len(ranges), size=(count, 12))
    return ["".join(chr(rng.integers(*ranges[kind])) for kind in row) for row in chosen]


def test_tokens_are_llama_cpps_own(tokenizer: Tokenizer, coder_gguf: Path, llama_ids: Ids) -> None:
    texts = (*AWKWARD, *drawn_texts(300))
    different = [text for text in texts if tokenizer.encode(text) != llama_ids(coder_gguf, text)]
    assert different == []


def test_the_template_renders_what_the_model_was_trained_on(engine: Engine) -> None:
    text = engine.parts.text
    hello = {"role": "user", "content": "Hello"}
    asked = ASKED.format("Hello")
    assert text.rendered([hello]) == SYSTEM.format("") + asked + ASSISTANT
    system = {"role": "system", "content": "Be brief."}
    more = [hello, {"role": "assistant", "content": "Hi"}, hello]
    said = f"<|im_start|>system\nBe brief.<|im_end|>\n{asked}{ASSISTANT}Hi<|im_end|>\n{asked}"
    assert text.rendered([system, *more]) == said + ASSISTANT
    assert text.chat_prompt("Hello") == text.tokenizer.encode(text.rendered([hello]))


def test_a_required_call_is_one_and_no_drafter_changes_it(engine: Engine) -> None:
    """The model's own tokens for the tags are written, and its JSON is what the schema says."""
    body = {
        "messages": [{"role": "user", "content": "How is the weather in Oslo for two days?"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 64,
        "temperature": 0,
    }
    found = []
    with engine.fork() as fork, RunningServer(fork, ServerOptions(port=0)) as running:
        for drafter in ("none", "auto"):
            asked = {**body, "speculative": {"drafter": drafter}}
            url = f"{running.url}/v1/chat/completions"
            answer = httpx.post(url, json=asked, timeout=300).json()
            assert "choices" in answer, answer
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "weather"
            found.append(json.loads(call["function"]["arguments"]))
    assert set(found[0]) == {"city", "days"} and found[0]["days"] <= 9
    assert found[1] == found[0]


def test_an_answer_of_a_schema_is_valid_and_no_drafter_changes_it(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "rain": {"type": "boolean"}},
        "required": ["city", "rain"],
        "additionalProperties": False,
    }
    texts = []
    for drafter in ("none", "auto"):
        engine.set_drafter(drafter)
        with engine.verifying_all_draft_tokens():
            result = engine.chat(
                "Does it rain in Oslo? Answer in JSON.",
                max_tokens=48,
                grammar=Grammar.json_schema(schema),
            )
        assert result.finish_reason == "stop"
        texts.append(result.text)
    found = json.loads(texts[0])
    assert isinstance(found["city"], str) and isinstance(found["rain"], bool)
    assert texts[1] == texts[0]
