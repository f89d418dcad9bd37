"""One text in two tokenizations: in step, encoded bit by bit, and whatever tokens it is in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers

from edge_spec.core.tree import TokenTree, Verdict
from edge_spec.drafters.draft.cross_tokenizer import MAX_OPEN, CrossTokenizerDrafter, PartCodec
from edge_spec.drafters.protocol import Budget
from edge_spec.text.tokenizer import Tokenizer
from fixtures import languages as spoken
from fixtures import trained_tokenizers

Languages = dict[str, Any]  # name -> its Language


@pytest.fixture(scope="session")
def languages(byte_tokenizer_json: str) -> Languages:
    made: Languages = spoken.train(trained_tokenizers, byte_tokenizer_json)
    return made


@pytest.mark.parametrize("name", spoken.DRAFTS)
def test_the_inner_drafter_reads_the_whole_text_in_ids_of_its_own(
    name: str, languages: Languages
) -> None:
    """Round by round, some of them drafted by others, and with draft tokens of every kind."""
    target, draft = languages["target"], languages[name]
    ids, inner = target.codec.encode(spoken.STORY * 2), spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    rng = np.random.default_rng(1)
    drafter.begin(ids[:5])
    at = 5
    while at < len(ids) - 1:
        written = spoken.complete(target, ids[:at])
        rest = PartCodec(draft.codec).after("x", (spoken.STORY * 2)[len(written) :][:30])
        wrong = rng.integers(0, draft.size, 3).tolist()
        inner.draft_tokens = [*rest[: rng.integers(0, 5)], *wrong[: rng.integers(0, 3)]]
        inner.confidence = [0.9] * len(inner.draft_tokens)
        tree = TokenTree.chain(ids[at - 1], ids[at : at + 2])  # of another drafter
        if rng.random() < 0.7:
            tree = drafter.propose(ids[at - 1], Budget(6, 7))
            read = PartCodec(draft.codec).after("", written)
            assert draft.bytes_of(inner.ids) == draft.bytes_of(read)
        verdict = spoken.outcome(tree, ids[at:])
        drafter.observe(tree, spoken.OUT, verdict)
        at += len(verdict.tokens)
    assert max(inner.rights) >= 3 and min(inner.rights) == 0
    assert inner.begun < len(inner.budgets) / 2  # most of the time the text only goes on


@pytest.mark.parametrize(
    ("text", "longest", "most"),
    [
        ("\U0001f680\U0001f469\u200d" * 400, None, 3 * MAX_OPEN),
        (" " * 2000, None, 16 * MAX_OPEN),
        (spoken.STORY * 8, 1, 16 * MAX_OPEN),  # nowhere canonical
    ],
)
def test_any_long_text_is_encoded_bit_by_bit(
    text: str, longest: int | None, most: int, languages: Languages
) -> None:
    target, draft = languages["target"], languages["small"]
    counting, inner = spoken.Counting(draft.codec), spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, counting)
    alone = {piece: id for id, piece in enumerate(target.pieces)}
    ids = target.codec.encode(text)
    if longest == 1:
        ids = [alone[bytes([byte])] for byte in text.encode()]
    drafter.begin(ids[:1])
    for at in range(1, len(ids)):
        drafter.observe(TokenTree.chain(0), spoken.OUT, Verdict((ids[at],), (), False))
        drafter.propose(ids[at], Budget(6, 7))
        assert counting.taken() < most
    assert draft.bytes_of(inner.ids) == text.encode()


def chatty(languages: Languages, bos: bool) -> tuple[Tokenizer, Any]:
    """A draft that knows <|end|> but no <|user|>, and may begin with <s>."""
    described = tokenizers.Tokenizer.from_str(languages["small"].codec._tokenizer.to_str())
    described.add_special_tokens(["<s>"])
    json = described.to_str().replace("<|user|>", "<|other|>")
    tokenizer = tokenizers.Tokenizer.from_str(json)
    return Tokenizer(json, tokenizer.token_to_id("<s>") if bos else None), languages["target"]


@pytest.mark.parametrize("bos", [False, True])
def test_chat_markers_that_both_know_become_the_drafts(bos: bool, languages: Languages) -> None:
    draft, target = chatty(languages, bos)
    ids = target.codec.encode("<|user|>Hi there\n<|end|>\n<|end|> Caf\u00e9")
    inner = spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft)
    drafter.begin(ids)
    drafter.propose(ids[-1], Budget(6, 7))
    expected = draft.encode("Hi there\n<|end|>\n<|end|> Caf\u00e9")
    assert inner.ids == expected
    assert (draft.token_text(expected[0]) == "<s>") == bos


def test_a_marker_ends_an_unfinished_character(languages: Languages) -> None:
    target, draft = languages["target"], languages["small"]
    part = target.codec.encode("\U0001f680")[:1]
    ids = [*target.codec.encode("Hi"), *part, *target.codec.encode("<|end|>there you")]
    inner = spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    drafter.begin(ids)
    drafter.propose(ids[-1], Budget(6, 7))
    assert inner.ids == draft.codec.encode("Hi<|end|>there you")


def test_a_draft_token_alone_is_encoded_behind_tokens_that_are_not_canonical(
    languages: Languages,
) -> None:
    target, draft = languages["target"], languages["permuted"]
    candidate = " nothing at all"
    bytes_alone = {piece: id for id, piece in enumerate(target.pieces)}
    for said in ("They said", "They sai\u4eee", "x" * 99, " " * 99):
        prompt = [bytes_alone[bytes([byte])] for byte in said.encode()]
        inner = spoken.Recording()
        inner.draft_tokens = draft.codec.encode(candidate)
        inner.confidence = [1.0] * len(inner.draft_tokens)
        drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
        drafter.begin(prompt)
        tree = drafter.propose(prompt[-1], Budget(20, 21))
        assert tree.tokens[1:].tolist() == target.codec.encode(candidate), said


@pytest.mark.parametrize("emoji", ["\U0001f680", "\U0001f469\u200d\U0001f680"])
def test_an_unfinished_character_is_finished_or_left_alone(
    emoji: str, languages: Languages
) -> None:
    target, draft = languages["target"], languages["large"]
    ids = target.codec.encode(f"They said {emoji}!")
    inner = spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    for count in range(len(ids) - len(emoji.encode()), len(ids)):
        drafter.begin(ids[:count])
        rest = f"They said {emoji}!"[len(spoken.complete(target, ids[:count])) :]
        if not target.bytes_of(ids[:count]).decode(errors="replace").endswith("\ufffd"):
            continue
        for candidate in (rest, "nothing", "\U0001f600"):
            inner.draft_tokens = [*draft.codec.encode(candidate), draft.eos]
            inner.confidence = [1.0] * len(inner.draft_tokens)
            tree = drafter.propose(ids[count - 1], Budget(20, 21))
            tokens = tree.tokens[1:].tolist()
            if candidate == rest:
                assert tokens == ids[count:]
            elif candidate == "nothing":
                assert tokens == []
            elif tokens:  # it begins with the same bytes
                text = spoken.complete(target, [*ids[:count], *tokens])
                assert text == f"They said {emoji}!"[: -len(rest)] + candidate


def test_bytes_that_are_no_character_are_read_as_they_are_shown(languages: Languages) -> None:
    target, draft = languages["sentencepiece first"], languages["large"]
    names = target.codec.vocabulary()
    wrong = [names["<0x6A>"], names["<0x80>"]]
    they, said = target.codec.encode("They"), target.codec.encode("said so")
    prompt = [*they, *wrong, *said]
    inner = spoken.Recording()
    drafter = CrossTokenizerDrafter(inner, target.codec, draft.codec)
    inner.draft_tokens = [*draft.codec.encode(" nothing"), draft.eos]
    inner.confidence = [1.0] * len(inner.draft_tokens)
    drafter.begin(prompt)
    tree = drafter.propose(prompt[-1], Budget(20, 21))
    assert draft.bytes_of(inner.ids).decode() == "Theyj\N{REPLACEMENT CHARACTER} said so"
    assert b"".join(target.pieces[token] for token in tree.tokens[1:]) == b" nothing"


@pytest.mark.parametrize("interrupted", ["target", "draft"])
def test_after_an_interrupt_the_draft_reads_the_same(
    interrupted: str, languages: Languages
) -> None:
    """Ctrl-C may come in any call of a tokenizer."""
    target, draft = languages["target"], languages["small"]
    ids = target.codec.encode("<|user|>" + spoken.STORY)
    num_interrupts = 0
    for at in range(1, 6):
        codecs = {"target": spoken.Counting(target.codec), "draft": spoken.Counting(draft.codec)}
        inner = spoken.Recording()
        inner.draft_tokens = draft.codec.encode(" and more")
        inner.confidence = [1.0] * len(inner.draft_tokens)
        drafter = CrossTokenizerDrafter(inner, codecs["target"], codecs["draft"])
        drafter.begin(ids[:30])
        drafter.propose(ids[29], Budget(5, 6))
        drafter.observe(TokenTree.chain(ids[29]), spoken.OUT, Verdict(tuple(ids[30:80]), (), False))
        codecs[interrupted].interrupt_at = at
        try:
            drafter.propose(ids[79], Budget(5, 6))
        except KeyboardInterrupt:
            num_interrupts += 1
        codecs[interrupted].interrupt_at = -1
        for prompt in (ids[:90], ids[:40], ids):
            drafter.begin(prompt)
            drafter.propose(prompt[-1], Budget(5, 6))
            assert draft.bytes_of(inner.ids).decode() == spoken.complete(target, prompt)
    assert num_interrupts
