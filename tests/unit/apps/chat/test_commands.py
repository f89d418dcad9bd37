"""Commands of `edge-spec chat`, as pipes and terminals call them."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from edge_spec.apps.answering import Stop
from edge_spec.apps.chat.commands import (
    COMMANDS,
    CommandAnswer,
    Leave,
    help_text,
    run_command,
)
from edge_spec.apps.chat.conversation import ChatConversation
from edge_spec.apps.chat.rendering import plain
from edge_spec.apps.chat.repl import talk_in_lines
from edge_spec.cli.options import SamplingOptions
from edge_spec.core.recommended_sampling import recommended_sampling
from edge_spec.drafters.lookup.suffix import SuffixDrafter
from edge_spec.engine.results import GenerationResult
from edge_spec.errors import EdgeSpecError, ModelFileError, SessionError, UsageError
from fixtures import echo_model
from fixtures.faults import Fault, FaultKind, FaultyModel

GREEDY: dict[str, Any] = {"temperature": 0.0}  # so that answers can be had again
DOCS = Path(__file__).parents[4] / "docs"


@pytest.fixture
def opened() -> list[Any]:
    """What models were opened as, and their engines."""
    return []


@pytest.fixture
def talk(make_engine: Any, remembers_all: Any, opened: list[Any]) -> Any:
    """Begins a conversation on a model of which every token so far decides the next."""

    def begin(using: Any = None, asked: Any = GREEDY, **answering: Any) -> ChatConversation:
        def opener(model: str, report: Any) -> Any:
            if model == "missing":
                raise ModelFileError("there is no missing", remedy="Choose another.")
            engine = make_engine(using or remembers_all(), [SuffixDrafter()])
            if model == "stating":
                states = recommended_sampling({"temperature": 0.5})
                engine.parts = replace(
                    engine.parts, text=replace(engine.parts.text, sampling=states)
                )
            opened.append((model, engine))
            return engine

        options = SamplingOptions(**{"max_tokens": 12, **asked, **answering})
        return ChatConversation(opener, "first", options, None)

    return begin


def say(conversation: ChatConversation, text: str) -> GenerationResult:
    return conversation.answer(text, lambda chunk: None)


def typed(conversation: ChatConversation, line: str) -> str:
    """What a command shows."""
    outcome = run_command(conversation, line)
    assert not isinstance(outcome, CommandAnswer | Leave)
    return plain(outcome)


def test_a_stopped_answer_is_kept_as_far_as_it_came(talk: Any) -> None:
    conversation = talk(max_tokens=100)
    pieces = []

    def on_chunk(chunk: Any) -> None:
        pieces.append(chunk.text)
        if len(pieces) == 3:
            conversation.stop.request()

    conversation.answer("hello", on_chunk)
    assert conversation.said[1]["content"] == "".join(pieces) != ""
    assert len(conversation.last.tokens) < 100


def test_a_signal_may_stop_an_answer_while_it_begins() -> None:
    """As the handler of Ctrl-C does between two lines of `watch`, in the same thread."""
    stop, num_cancelled = Stop(), 0

    class Beginning:
        def cancel(self) -> None:
            nonlocal num_cancelled
            num_cancelled += 1
            if num_cancelled == 1:
                stop.request()

    stop.requested = True
    thread = Thread(target=stop.watch, args=(Beginning(),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and num_cancelled == 2


def test_a_stop_before_the_answer_exists_stops_it(talk: Any) -> None:
    conversation = talk()
    with conversation.stop.ready():
        conversation.stop.request()
        say(conversation, "hello")
    assert conversation.last.tokens == []
    with conversation.stop.ready():
        assert len(say(conversation, "hello again").tokens) == 12


def test_an_answer_that_cannot_be_given_leaves_the_conversation_as_it_was(talk: Any) -> None:
    conversation = talk()
    say(conversation, "hello")
    before = list(conversation.said)
    with pytest.raises(UsageError, match="context holds"):
        say(conversation, "x" * 600)
    assert conversation.said == before


def test_undo_takes_the_last_message_back_with_its_answer(talk: Any) -> None:
    conversation = talk()
    say(conversation, "hello")
    before = list(conversation.said)
    say(conversation, "and then?")
    assert "and then?" in typed(conversation, "/undo")
    assert conversation.said == before
    typed(conversation, "/undo")
    assert conversation.said == []
    with pytest.raises(UsageError, match="nothing was asked yet"):
        typed(conversation, "/undo")


def test_a_conversation_is_saved_as_json_and_loaded(talk: Any, tmp_path: Path) -> None:
    conversation, file = talk(), tmp_path / "talk.json"
    typed(conversation, "/system Be brief.")
    say(conversation, "gr\u00fc\u00dfe")
    assert "2 messages saved" in typed(conversation, f"/save {file}")
    typed(conversation, f"/save {file}")  # its own file may be written again
    other = talk()
    assert "2 messages loaded" in typed(other, f"/load {file}")
    assert (other.messages, other.system) == (conversation.messages, "Be brief.")


def test_a_snapshot_goes_on_where_the_conversation_was(talk: Any, tmp_path: Path) -> None:
    conversation, file = talk(), tmp_path / "talk"
    say(conversation, "hello")
    assert "2 messages saved" in typed(conversation, f"/save {file}")
    other = talk()
    assert "2 messages loaded" in typed(other, f"/load {file}")
    assert other.messages == conversation.messages
    there, here = say(other, "and then?"), say(conversation, "and then?")
    assert [token.id for token in there.tokens] == [token.id for token in here.tokens]
    assert there.stats.cached_n == here.stats.cached_n > 0
    file.write_bytes(file.read_bytes()[:-9])
    before = list(other.said)
    with pytest.raises(EdgeSpecError):
        run_command(other, f"/load {file}")
    assert other.said == before


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "\x00\xff",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 1}]}',
        '{"messages": [{"role": "tool", "content": "x"}]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
        '{"messages": [1]}',
        '{"messages": [{"role": "user", "content": "x", "reasoning_content": null}]}',
        '{"messages": [{"role": "user", "content": "x", "tool_calls": "y"}]}',
    ],
)
def test_a_file_without_a_conversation_changes_nothing(
    talk: Any, tmp_path: Path, content: str
) -> None:
    conversation, file = talk(), tmp_path / "talk.json"
    say(conversation, "hello")
    before = conversation.messages
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match="holds no conversation"):
        run_command(conversation, f"/load {file}")
    with pytest.raises(UsageError, match="exists"):
        run_command(conversation, f"/save {file}")
    assert conversation.messages == before
    assert file.read_bytes() == content.encode("latin-1")


def test_the_new_model_goes_on_with_the_conversation_and_the_old_one_is_closed(
    talk: Any, opened: list[Any]
) -> None:
    conversation = talk()
    say(conversation, "hello")
    typed(conversation, "/model second")
    assert [model for model, _ in opened] == ["first", "second"]
    with pytest.raises(UsageError, match="closed"):
        opened[0][1].chat("hello")
    assert say(conversation, "and then?").stats.prompt_n > 12


SHOWN = [  # one line after the other
    ("/stats", "No answer yet."),
    ("/tokens", "No answer yet."),
    ("/system", "System message: none"),
    ("/system Be brief.", "System message: Be brief."),
    ("/reset", "The conversation is forgotten."),
    ("/system", "System message: Be brief."),
    ("/system none", "System message: none"),
    ("/draft", "Speculation: auto."),
    ("/draft off", "Speculation: off."),
    ("/draft on", "Speculation: auto."),
    ("/model", "test on scripted."),
    ("/plain on", "Markdown is shown as text."),
    ("/plain", "Markdown is shown as text."),
    ("/plain off", "Markdown is shown formatted."),
]
REFUSED = {
    "/save": "file is missing",
    "/load": "file is missing",
    "/plain maybe": "neither on nor off",
    "/draft nonsense": "no drafter called",
    "/retry": "nothing was asked yet",
    "/model missing": "there is no missing",
}


def test_commands_show_what_is_there_and_refuse_what_is_not(talk: Any) -> None:
    conversation = talk()
    for line, shown in SHOWN:
        assert typed(conversation, line) == f"{shown}\n", line
    for line, told in REFUSED.items():
        with pytest.raises(EdgeSpecError, match=told):
            run_command(conversation, line)
    assert conversation.messages == [] and conversation.model == "first"
    assert isinstance(run_command(conversation, "/exit"), Leave)
    assert "There is no /what." in typed(conversation, "/what")
    typed(conversation, "/system Be brief.")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]
    assert say(conversation, "hello").tokens


def test_through_a_pipe_answers_are_plain_text_and_errors_of_commands_a_line(
    talk: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/retry\n/model missing\n/quit\nlost\n"))
    conversation = talk()
    talk_in_lines(conversation, as_json=False)
    answer = conversation.said[1]["content"]
    out = capsys.readouterr().out
    assert out == f"{answer}\n{answer}\nthere is no missing. Choose another.\n"


def test_through_a_pipe_a_message_that_cannot_be_answered_ends_it(
    talk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("x" * 600))
    with pytest.raises(EdgeSpecError, match="context holds"):
        talk_in_lines(talk(), as_json=False)


@pytest.fixture
def thinking() -> ChatConversation:
    """A conversation with a model that answers a message with its own text, thoughts included."""
    engine = echo_model.open_echo(600, echo_model.THINKING_TEMPLATE)
    return ChatConversation(lambda *_: engine, "echo", SamplingOptions(**GREEDY), None)


def test_through_a_pipe_there_is_the_text_alone_and_json_has_the_thought(
    thinking: ChatConversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json in (False, True):
        monkeypatch.setattr(sys, "stdin", io.StringIO("<think>hm, so</think>Yes.\n"))
        talk_in_lines(thinking, as_json=as_json)
    text, _, document = capsys.readouterr().out.partition("\n")
    assert text == "Yes."
    turn = json.loads(document)["turns"][1]
    assert (turn["text"], turn["reasoning"]) == ("Yes.", "hm, so")
    assert turn["reasoning_n"] == len("<think>hm, so</think>")


def test_thoughts_are_kept_apart_saved_and_counted_as_the_template_shows_them(
    thinking: ChatConversation, tmp_path: Path
) -> None:
    said = {"role": "assistant", "content": "Yes.", "reasoning_content": "hm " * 90 + "so"}
    message = f"<think>{said['reasoning_content']}</think>Yes."
    say(thinking, message)
    assert thinking.said[1] == said
    assert said["reasoning_content"] in typed(thinking, "/thoughts").replace("\n", " ")
    assert "thought for" in typed(thinking, "/stats")
    typed(thinking, f"/save {tmp_path / 'talk.json'}")
    thinking.forget()
    typed(thinking, f"/load {tmp_path / 'talk.json'}")
    assert thinking.said[1] == said
    assert "does not see the oldest 2" in str(thinking.make_room("more"))  # their thought, too
    thinking.said[1].pop("reasoning_content")
    thinking.left_out = 0
    assert thinking.make_room("more") is None


def test_json_is_one_document_of_all_turns(
    talk: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/stats\nand then?\n"))
    talk_in_lines(talk(), as_json=True)
    out, errors = capsys.readouterr()
    turns = json.loads(out)["turns"]
    assert [turn["prompt"] for turn in turns] == ["hello", "and then?"]
    assert turns[0].keys() >= {"text", "finish_reason", "tokens", "stats", "seed"}
    assert "tokens/s" in errors


def test_help_and_the_page_about_chat_list_every_command() -> None:
    page = (DOCS / "use.md").read_text("utf-8")
    rows = [f"| `{each.usage.replace('|', chr(92) + '|')}` | {each.help} |" for each in COMMANDS]
    assert "\n".join(rows) in page
    assert all(command.usage in help_text() for command in COMMANDS)


def test_a_full_context_leaves_the_oldest_turns_out_and_says_so(talk: Any) -> None:
    conversation = talk(max_tokens=60)
    typed(conversation, "/system Be brief.")
    told = []
    for number in range(12):
        told.append(conversation.make_room(f"question {number}"))
        say(conversation, f"question {number}")
    notes = [note for note in told if note]
    assert told[0] is None and notes and "oldest" in notes[0] and "512" in notes[0]
    assert len(conversation.said) == 24  # nothing is lost
    seen = conversation.messages_for("more")[:-1]
    assert seen[0]["role"] == "system" and seen[1]["role"] == "user"
    assert seen[1:] == conversation.said[conversation.left_out :]
    typed(conversation, "/reset")
    assert conversation.left_out == 0


def test_an_answer_after_turns_were_left_out_is_that_of_the_shorter_prompt(
    talk: Any, remembers_all: Any
) -> None:
    model = remembers_all()
    conversation, fresh = talk(model, max_tokens=60), talk(model, max_tokens=60)
    while conversation.make_room("more") is None:
        say(conversation, "more")
    seen = conversation.messages_for("more")
    answer = say(conversation, "more")
    assert answer.text == fresh.engine.chat(seen, max_tokens=60).text != ""


@pytest.mark.parametrize(("at", "kept"), [(1, False), (5, True)])
def test_what_was_answered_before_the_model_failed_stays(
    talk: Any, remembers_all: Any, at: int, kept: bool
) -> None:
    fault = Fault(FaultKind.RAISES, "forward", at)
    conversation = talk(FaultyModel(remembers_all(), [fault]))
    shown: list[str] = []
    with pytest.raises(SessionError):
        conversation.answer("hello", lambda chunk: shown.append(chunk.text))
    said = [message["content"] for message in conversation.said]
    assert said == (["hello", "".join(shown)] if kept else [])
    assert [turn["finish_reason"] for turn in conversation.turns] == ["error"] * kept
    assert conversation.running is None
    assert say(conversation, "again").finish_reason == "length"


def test_what_an_argument_may_be_is_read_from_the_usage(talk: Any) -> None:
    conversation = talk()
    choices = {command.name: command.choices(conversation) for command in COMMANDS}
    assert choices["/draft"] == ["auto", "none", *conversation.engine.drafters]
    assert choices["/reasoning"] == ["auto", "off"] and choices["/plain"] == ["on", "off"]
    assert choices["/system"] == ["none"] and not choices["/save"]
