"""Text in, stream of text out, over a model whose tokens are known."""

from __future__ import annotations

import gc
import signal
from typing import Any
from unittest import mock

import pytest

from edge_spec.core.sampling import SamplingParams
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.results import FinishReason, Origin
from edge_spec.testing import ScriptedModel, random_logits

EOS, BOS, VOCAB = 258, 259, 260  # of the byte tokenizer
PROMPT = b"ab"


def writes(scripted: Any, text: str | bytes, *, end: bool = True) -> ScriptedModel:
    """A model that answers PROMPT with the bytes of `text`."""
    script = list(text.encode() if isinstance(text, str) else text)
    model: ScriptedModel = scripted(len(PROMPT), [*script, EOS] if end else script)
    return model


def script_drafter(tree_drafter: Any, text: str) -> Any:
    """Drafts the next four bytes of the answer `text`."""

    def candidate(context: tuple[int, ...], budget: Any) -> Any:
        ahead = list(text.encode()[len(context) - len(PROMPT) :][: min(4, budget.num_draft_tokens)])
        return ahead, range(len(ahead))

    return tree_drafter(candidate)


def joined(result: Any) -> str:
    return "".join(token.text for token in result.tokens)


TEXT = "the caf\u00e9 costs 3 \u20ac \U0001f600!"


@pytest.mark.parametrize("max_tokens", range(1, len(TEXT.encode()) + 1))
def test_stream_pieces_join_to_the_decoded_text(
    make_engine: Any, scripted: Any, byte_tokenizer: Any, tree_drafter: Any, max_tokens: int
) -> None:
    # Some of these lengths end inside a character of several bytes.
    engine = make_engine(writes(scripted, TEXT), [script_drafter(tree_drafter, TEXT)])
    generation = engine.generate(list(PROMPT), max_tokens=max_tokens, stream=True)
    chunks = list(generation)
    result = generation.result
    expected = byte_tokenizer.decode(list(TEXT.encode())[:max_tokens])
    assert "".join(chunk.text for chunk in chunks) == result.text == joined(result) == expected
    streamed = [token.id for chunk in chunks for token in chunk.tokens]
    assert streamed == [token.id for token in result.tokens]
    assert result.finish_reason == FinishReason.LENGTH
    assert len(result.tokens) == max_tokens


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("c", "the "),
        ("caf", "the "),
        ("\u20ac", "the caf\u00e9 costs 3 "),
        (" \U0001f600", "the caf\u00e9 costs 3 \u20ac"),
        (["zzz", "costs", "3"], "the caf\u00e9 "),
        (["3", "costs"], "the caf\u00e9 "),
        ("the", ""),
        ("", TEXT),
        ((), TEXT),
        ("the cafe", TEXT),
        ("!?", TEXT),  # held back at the end, and shown as nothing follows
    ],
)
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_string_cuts_the_text_exactly(
    make_engine: Any, scripted: Any, tree_drafter: Any, drafted: bool, stop: Any, expected: str
) -> None:
    drafters = [script_drafter(tree_drafter, TEXT)] if drafted else []
    engine = make_engine(writes(scripted, TEXT), drafters)
    generation = engine.generate(list(PROMPT), stop=stop, stream=True)
    shown = ""
    for chunk in generation:
        shown += chunk.text
        assert expected.startswith(shown)  # nothing is shown that is taken back
    result = generation.result
    assert shown == result.text == joined(result) == expected
    assert result.finish_reason == FinishReason.STOP


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("<bos>", "ab"),
        (["zz", "<bos>"], "ab"),
        ("b<bos>c", "a"),
        ("<bos><bos>", "ab"),  # whatever follows the first of them
        ("<bos>d", "ab"),
        ("d<bos>", "abcd"),  # nothing of the kind is written
        ("cd", "ab"),
        ("<eos>", "abcd"),
    ],
)
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_string_may_name_a_special_token_which_no_text_shows(
    make_engine: Any, scripted: Any, tree_drafter: Any, drafted: bool, stop: Any, expected: str
) -> None:
    script = [*b"ab", BOS, *b"c", BOS, BOS, *b"d", EOS]

    def candidate(context: tuple[int, ...], budget: Any) -> Any:
        ahead = script[len(context) - len(PROMPT) :][: min(4, budget.num_draft_tokens)]
        return ahead, range(len(ahead))

    drafters = [tree_drafter(candidate)] if drafted else []
    engine = make_engine(scripted(len(PROMPT), script), drafters)
    result = engine.generate(list(PROMPT), stop=stop)
    assert result.text == joined(result) == expected
    assert result.finish_reason == FinishReason.STOP


def test_max_tokens_and_drafting_do_not_change_the_text(
    make_engine: Any, scripted: Any, tree_drafter: Any
) -> None:
    plain = make_engine(writes(scripted, TEXT)).generate(list(PROMPT), max_tokens=9)
    engine = make_engine(writes(scripted, TEXT), [script_drafter(tree_drafter, TEXT)])
    drafted = engine.generate(list(PROMPT), max_tokens=9)
    assert [token.id for token in plain.tokens] == [token.id for token in drafted.tokens]
    assert plain.text == drafted.text
    assert {token.origin for token in plain.tokens} == {Origin.PLAIN}
    assert [token.origin for token in drafted.tokens[:5]] == [Origin.ACCEPTED] * 4 + [Origin.BONUS]
    assert drafted.tokens[0].to_dict() == {
        **{"id": ord("t"), "text": "t"},
        **{"origin": "accepted", "drafter": "test"},
    }


def test_the_same_seed_gives_the_same_text_and_is_reported(make_engine: Any) -> None:
    model = ScriptedModel(random_logits(VOCAB, scale=4.0), VOCAB)
    sampling = SamplingParams(temperature=1.0)
    first = make_engine(model, [SuffixDrafter()]).generate("abab", max_tokens=40, sampling=sampling)
    again = SamplingParams(temperature=1.0, seed=first.seed)
    second = make_engine(model).generate("abab", max_tokens=40, sampling=again)
    assert first.seed is not None and second.seed == first.seed
    assert first.text == second.text


@pytest.mark.parametrize(("stop", "shown"), [("more!", "two "), ((), "two m")])
def test_a_closed_generation_keeps_all_that_was_generated(
    make_engine: Any, scripted: Any, tree_drafter: Any, stop: Any, shown: str
) -> None:
    """The first round has five tokens; of a stop string that may begin with the last, it is held
    back."""
    text = "two more"
    engine = make_engine(writes(scripted, text), [script_drafter(tree_drafter, text)])
    generation = engine.generate(list(PROMPT), stop=stop, stream=True)
    chunk = next(generation)
    assert chunk.text == "".join(token.text for token in chunk.tokens) == shown
    generation.close()
    result = generation.result
    assert result.text == joined(result) == "two m"
    assert len(result.tokens) == result.stats.predicted_n == 5
    assert result.finish_reason == FinishReason.CANCELLED


def test_cancel_ends_after_the_current_round_and_the_engine_goes_on(
    make_engine: Any, remembers_all: Any
) -> None:
    engine = make_engine(remembers_all())
    generation = engine.generate("hello", stream=True)
    for number, _ in enumerate(generation):
        if number == 2:
            generation.cancel()
    assert len(generation.result.tokens) in (3, 4)
    assert generation.result.finish_reason == FinishReason.CANCELLED
    fresh = make_engine(remembers_all()).generate("hello there", max_tokens=9)
    after = engine.generate("hello there", max_tokens=9)
    assert [token.id for token in after.tokens] == [token.id for token in fresh.tokens]


def test_cancel_during_the_prompt_writes_nothing(make_engine: Any, remembers_all: Any) -> None:
    engine = make_engine(remembers_all(2048))
    prompt = list(b"x" * 1000)
    generation = engine.generate(prompt, stream=True)
    session = engine._session
    prefill = session.prefill

    def cancelling(tokens: Any) -> None:
        prefill(tokens)
        generation.cancel()

    session.prefill = cancelling
    assert list(generation) == []
    assert generation.result.finish_reason == FinishReason.CANCELLED
    held = session.length
    assert 0 < held == generation.num_read < 999
    del session.prefill
    assert engine.generate(prompt, max_tokens=1).stats.cached_n == held


def interrupt() -> None:
    """Calls what handles Ctrl-C: a real signal goes to the whole process, with all its threads."""
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler)
    handler(signal.SIGINT, None)


def test_an_interrupt_cancels_and_the_handler_is_restored(
    make_engine: Any, remembers_all: Any
) -> None:
    before = signal.getsignal(signal.SIGINT)
    generation = make_engine(remembers_all()).generate("hello", stream=True)
    with generation.cancelled_by_interrupt():
        next(generation)
        interrupt()
        list(generation)
        with pytest.raises(KeyboardInterrupt):
            interrupt()
    assert signal.getsignal(signal.SIGINT) is before
    assert generation.result.finish_reason == FinishReason.CANCELLED


@pytest.mark.parametrize("stop", ["af\u00e9", "c", "costs 3"])
def test_behind_a_stop_string_the_cache_holds_what_plain_decoding_holds(
    make_engine: Any, scripted: Any, tree_drafter: Any, stop: str
) -> None:
    """The rows after it would be reused by a prompt that goes on as the model did, where plain
    decoding reads them as a prompt."""
    held = []
    for drafters in ([], [script_drafter(tree_drafter, TEXT)]):
        engine = make_engine(writes(scripted, TEXT), drafters)
        engine.generate(list(PROMPT), stop=stop)
        going_on = list(PROMPT) + list(TEXT.encode())[:20]
        held.append(engine.generate(going_on, max_tokens=1).stats.cached_n)
    assert held[0] == held[1] > len(PROMPT)


def test_an_answer_that_an_interrupt_ended_does_not_touch_the_next_one(
    make_engine: Any, remembers_all: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frames live as long as somebody keeps the exception, as notebooks do."""
    engine = make_engine(remembers_all())
    generation = engine.generate("hello", stream=True)
    for _ in range(4):
        next(generation)
    with monkeypatch.context() as patched:
        patched.setattr(generation._text, "push", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as kept:
            next(generation)
    del generation
    running = engine.generate("hello there", max_tokens=20, stream=True)
    for _ in range(10):
        next(running)
    kept.value.__traceback__ = None
    del kept
    gc.collect()
    found = [token.id for token in running.finish().tokens]
    fresh = make_engine(remembers_all()).generate("hello there", max_tokens=20)
    assert found == [token.id for token in fresh.tokens]
