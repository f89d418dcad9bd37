"""Finds every token at which a model's answers end.

A model's files state some of them. Others are found where its tokenizer is open, so that answers
end also where the files state too few: by their names, as llama.cpp finds them, and by the chat
template, which writes one after each message of the assistant.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace

from edge_spec.errors import EdgeSpecError
from edge_spec.text.chat_format import BY_NAME, BY_TEMPLATE, ChatFormat
from edge_spec.text.plain_messages import Message

# Of an answer, a turn or a message; then what ends a completion between a prefix and a suffix: its
# padding, and the beginnings of another file or repository.
END_NAMES = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),
        *("<eos>", "[EOS]", "[e~[", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<turn|>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<end_of_turn>"),
        *("<end_of_utterance>", "<EOT>", "_<EOT>", "\u2581<EOT>", "[EOT]"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>"),
        *("<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_END, _TAG, _BEGIN = "<|end|>", "</s>", "<s>"
_EOS_OF_PLAMO = "<|plamo:eos|>"
# Vocabularies with these tokens have the other one within answers: as the end of a part of them
# (of a thought, say), or as a tag of HTML.
_WITHIN = (
    ({"<|return|>", "<|call|>"}, _END),
    ({"<|calls|>", "<|flush|>"}, _END),
    ({"<|tool_response>"}, _TAG),
    ({_EOS_OF_PLAMO}, _TAG),
)
_CONTROL = re.compile(r"<[|\uff5c].+[|\uff5c]>")
_QUESTION, _ANSWER, _FOLLOW_UP = "First question.", "First answer.", "Second question."
_CONVERSATION: tuple[Message, ...] = (
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _FOLLOW_UP},
)


def with_every_end(text: ChatFormat, vocab_size: int) -> ChatFormat:
    """Returns the same with the ends that are found added to those that are stated, which stay
    first: the chat template knows the very first one. Tokens that the model does not score are
    none.
    """
    sources = {id: text.end_sources.get(id, "") for id in text.eos_ids if id < vocab_size}
    ids = {name: text.tokenizer.token_id(name) for name in (*END_NAMES, _BEGIN, _EOS_OF_PLAMO)}
    known = {name: id for name, id in ids.items() if id is not None and id < vocab_size}
    within = {known[name] for needed, name in _WITHIN if needed <= known.keys() and name in known}
    named = {id for name, id in known.items() if name in END_NAMES} - within
    if not text.tokenizer.special_text(known.get(_BEGIN, -1)) and (sources or len(named) > 1):
        named.discard(known.get(_TAG, -1))  # HTML, as in the vocabularies of Gemma and Qwen
    for id in sorted(named):
        sources.setdefault(id, BY_NAME)
    turn_end = _turn_end(text)
    if turn_end is not None and turn_end not in within and turn_end < vocab_size:
        sources.setdefault(turn_end, BY_TEMPLATE)
    return replace(text, eos_ids=tuple(sources), end_sources=sources)


def _turn_end(text: ChatFormat) -> int | None:
    """Returns the first control token that the chat template writes after an answer; None where it
    writes none, or the one that begins a message, or does not take these messages."""
    if text.chat_template is None:
        return None
    with suppress(EdgeSpecError):
        before, _, after = text.template().render(_CONVERSATION).partition(_ANSWER)
        turn_end = _first_control(text, after.partition(_FOLLOW_UP)[0])
        return None if turn_end == _first_control(text, before) else turn_end
    return None


def _first_control(text: ChatFormat, rendered: str) -> int | None:
    """Counts tokens that look like one, too: some tokenizers do not call them special."""
    for token in text.tokenizer.encode(rendered):
        is_control = text.tokenizer.special_text(token) or _CONTROL.fullmatch(
            text.tokenizer.token_text(token)
        )
        if is_control and token != text.bos_id:
            return token
    return None
