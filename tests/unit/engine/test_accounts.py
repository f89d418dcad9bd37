"""An answer's accounts: the tokens of its text, whoever drafted them and wherever it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from edge_spec.engine.results import FinishReason, GenerationResult, Origin
from edge_spec.errors import EdgeSpecError

EOS, BOS, TH, E_SPACE = 258, 259, 256, 257
PROMPT = list(b"ab")
# Letters, tokens of two letters, parts of characters that fit and that do not, a special token.
TOKENS = [*b"abt ", TH, E_SPACE, *"\u00e9\u20ac".encode(), *"\U0001f999".encode(), BOS]


@dataclass(frozen=True)
class Drafts:
    """What is drafted in a round: how many tokens ahead, and which of them are wrong."""

    lengths: Sequence[int]
    wrong: Sequence[int]

    def drafter(self, tree_drafter: Any, script: Sequence[int]) -> Any:
        rounds = iter(range(10**6))

        def candidate(context: tuple[int, ...], budget: Any) -> Any:
            number = next(rounds)
            count = min(self.lengths[number % len(self.lengths)], budget.num_draft_tokens)
            ahead = list(script[len(context) - len(PROMPT) :][:count])
            place = self.wrong[number % len(self.wrong)]
            if place < len(ahead):
                ahead[place] = ord("z")
            return ahead, range(len(ahead))

        return tree_drafter(candidate)


def accounts(result: GenerationResult) -> dict[str, Any]:
    """All that must not depend on drafting."""
    return {
        "text": result.text,
        "tokens": [
            (token.id, token.text, token.name, token.raw, token.ends) for token in result.tokens
        ],
        "finish_reason": result.finish_reason,
        "predicted_n": result.stats.predicted_n,
        "stop_n": result.stats.stop_n,
    }


def check(result: GenerationResult, chunks: Sequence[Any]) -> None:
    """The figures of one answer among themselves, and of its stream."""
    stats = result.stats
    assert "".join(token.text for token in result.tokens) == result.text
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [token.id for chunk in chunks for token in chunk.tokens] == [
        token.id for token in result.tokens
    ]
    assert [token.raw for chunk in chunks for token in chunk.tokens] == [
        token.raw for token in result.tokens
    ]
    assert (
        b"".join(token.raw or b"" for token in result.tokens).decode("utf-8", "replace")
        == result.text
    )
    accepted = [token for token in result.tokens if token.origin is Origin.ACCEPTED]
    assert stats.predicted_n == len(result.tokens)
    assert stats.draft_n_accepted == len(accepted) <= stats.draft_n
    assert sum(counts.draft_n_accepted for counts in stats.drafters.values()) == len(accepted)
    assert sum(n * count for n, count in stats.acceptance_histogram.items()) == len(accepted)
    assert sum(stats.acceptance_histogram.values()) == stats.rounds - stats.plain_rounds


scripts = st.lists(st.sampled_from(TOKENS), max_size=24)
places = st.tuples(st.integers(0, 30), st.integers(1, 4))
drafts = st.builds(
    Drafts,
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    wrong=st.lists(st.integers(0, 7), min_size=1, max_size=3),
)


@settings(max_examples=200)
@given(
    script=scripts,
    ends=st.booleans(),
    stops=st.lists(places, max_size=3),
    named=st.lists(st.sampled_from(["<bos>", "a<bos>", "<eos>"]), max_size=1),
    end_ids=st.lists(st.sampled_from([TH, ord("t"), BOS]), max_size=1),
    max_tokens=st.integers(1, 30),
    how=drafts,
)
@example(list(b"abt a"), True, [(2, 1)], [], [], 5, Drafts([5], [9]))  # in the middle of a round
@example(list(b"abt a"), True, [(2, 1)], [], [], 3, Drafts([5], [9]))  # in the last allowed token
@example([*b"a", *"\U0001f999".encode()], True, [(1, 1)], [], [], 9, Drafts([6], [9]))
@example([*b"ab", *"\u20ac".encode()[:2]], False, [(2, 1)], [], [], 4, Drafts([6], [9]))
@example(
    [*b"a", TH, *b"ab"], True, [(2, 2)], [], [], 9, Drafts([2], [1])
)  # across borders of tokens
@example([*b"a", BOS, *b"tb"], True, [(1, 1)], [], [], 9, Drafts([6], [9]))  # after a special token
def test_an_answers_accounts_do_not_depend_on_drafting(
    make_engine: Any,
    scripted: Any,
    tree_drafter: Any,
    byte_tokenizer: Any,
    script: list[int],
    ends: bool,
    stops: list[tuple[int, int]],
    named: list[str],
    end_ids: list[int],
    max_tokens: int,
    how: Drafts,
) -> None:
    written = [*script, EOS] if ends else [*script, *b"..........."]
    text = byte_tokenizer.decode(written)
    stop = [*named, *(text[start : start + length] for start, length in stops)]
    results = []
    for drafters in ([], [how.drafter(tree_drafter, written)]):
        engine = make_engine(scripted(len(PROMPT), written), drafters)
        asked = {"max_tokens": max_tokens, "stop": stop, "logprobs": 2, "stop_token_ids": end_ids}
        generation = engine.generate(PROMPT, stream=True, **asked)
        check(generation.result, list(generation))
        whole = engine.generate(PROMPT, **asked)
        assert accounts(whole) == accounts(generation.result)
        going_on = [*PROMPT, *written, *b"x"]  # reads what the cache of the answer lacks
        held = engine.generate(going_on, max_tokens=1).stats.cached_n
        results.append((accounts(whole), held))
    assert results[0] == results[1]
    event(str(results[0][0]["finish_reason"]))


@pytest.mark.parametrize("num_rounds", [1, 2])
@pytest.mark.parametrize("stop", [(), ("zz",), ("dz",)])
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_cancelled_answer_counts_what_it_has_shown(
    make_engine: Any,
    scripted: Any,
    tree_drafter: Any,
    num_rounds: int,
    stop: Sequence[str],
    is_closed: bool,
) -> None:
    """Rounds of four tokens; "d", the last of the first one, may begin a stop string."""
    text = b"abcdefghijklmnop"
    drafter = Drafts([3], [9]).drafter(tree_drafter, text)
    generation = make_engine(scripted(len(PROMPT), text), [drafter]).generate(
        PROMPT, stream=True, stop=stop, logprobs=0
    )
    chunks = [next(generation) for _ in range(num_rounds)]
    if is_closed:
        generation.close()
        result = generation.result
        assert result.text == text[: 4 * num_rounds].decode()
    else:
        generation.cancel()
        chunks += list(generation)
        result = generation.result
        check(result, chunks)
    assert result.finish_reason is FinishReason.CANCELLED
    assert result.stats.predicted_n == len(result.tokens) == len(result.text)
    assert result.stats.draft_n_accepted == 3 * result.stats.rounds


@pytest.mark.parametrize("stop", [(), ("hz",)])
def test_an_answer_that_fails_counts_what_it_has_shown(
    make_engine: Any, scripted: Any, tree_drafter: Any, stop: Sequence[str]
) -> None:
    text = b"abcdefghijklmnop"
    drafter = Drafts([3], [9]).drafter(tree_drafter, text)
    engine = make_engine(scripted(len(PROMPT), text), [drafter])
    generation = engine.generate(PROMPT, stream=True, stop=stop, logprobs=0)
    shown = next(generation).text + next(generation).text
    engine._session.forward = _failing
    with pytest.raises(EdgeSpecError):
        for chunk in generation:  # what was held back, then the error
            shown += chunk.text
    assert generation.result.finish_reason is FinishReason.ERROR
    assert generation.result.text == shown == "abcdefgh"
    assert generation.result.stats.predicted_n == 8


def _failing(*given: Any) -> Any:
    raise RuntimeError("the device is gone")
