"""An answer of the sidecar that the model fails in."""

from __future__ import annotations

from queue import Queue
from typing import Any

from edge_spec.apps.sidecar.conversation import Conversation, Job
from edge_spec.testing import Fault, FaultKind, FaultyModel


def test_an_error_brings_what_was_written_and_the_next_answer_is_right(
    make_engine: Any, remembers_all: Any
) -> None:
    faulty = FaultyModel(remembers_all(), [Fault(FaultKind.RAISES, "forward", 4)])
    sent: Queue[dict[str, Any]] = Queue()
    conversation = Conversation(lambda: make_engine(faulty), sent.put, lambda job: None)

    def answer(engine: Any) -> Any:
        return engine.generate([1, 2, 3], max_tokens=6, stream=True)

    def response() -> tuple[str, dict[str, Any]]:
        """The text of the chunks, and what follows them."""
        text = ""
        while "params" in (message := sent.get(timeout=10)):
            text += message["params"]["text"]
        return text, message

    for id in (1, 2):
        conversation.submit(Job(id, answer))
    text, failed = response()
    error = failed["error"]
    assert error["code"] == -32000 and error["data"]["type"] == "SessionError"
    produced = error["data"]["result"]
    assert produced["text"] == text and produced["finish_reason"] == "error"
    assert produced["stats"]["predicted_n"] == 3
    again, answered = response()
    assert answered["result"]["text"] == again and again.startswith(text)
    assert answered["result"]["finish_reason"] == "length"
    conversation.end(10)
    conversation.join(10)
