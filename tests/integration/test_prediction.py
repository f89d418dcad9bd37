"""Predicted outputs: a text of the client's is drafted, changes nothing, and is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from edge_spec import Engine, SamplingParams
from fixtures.server_requests import BOTH, CHAT, HELLO, events

Serve = Callable[..., httpx.Client]
WRONG = "\n".join(f"{line}: no model of random weights writes this." for line in range(9))


def predicted(text: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": text}}


@pytest.mark.parametrize("drafter", ["auto", "suffix", "none"])
@pytest.mark.parametrize("change", ["same", "cut", "wrong", "empty", "long"])
def test_a_prediction_changes_no_text_and_is_counted_alike(
    served: Engine, drafter: str, change: str
) -> None:
    served.set_drafter(drafter)
    plain = served.chat(HELLO, max_tokens=40)
    changed = {
        "same": plain.text,
        "cut": plain.text[10:],
        "wrong": WRONG,
        "empty": "",
        "long": plain.text + WRONG * 500,
    }[change]
    result = served.chat(HELLO, max_tokens=40, prediction=changed)
    assert (result.text, result.finish_reason) == (plain.text, plain.finish_reason)
    assert [token.id for token in result.tokens] == [token.id for token in plain.tokens]
    assert plain.prediction is None and result.prediction is not None
    tokens = served.encode(changed)[: served.context_length]
    assert sum(result.prediction) == len(tokens)
    with served.without_drafting():
        counted = served.chat(HELLO, max_tokens=40, prediction=changed).prediction
    assert counted == result.prediction  # whoever drafts


def test_a_prediction_that_comes_true_is_drafted_from_its_first_token(served: Engine) -> None:
    """Ids that text leads back to: others would be other tokens of the same text."""
    body = {"logit_bias": dict.fromkeys(range(97, 123), 30.0)}  # letters, which are tokens each
    sampling = SamplingParams(**body)
    plain = served.generate("a", max_tokens=30, sampling=sampling)
    with served.verifying_all_draft_tokens():
        result = served.generate("a", max_tokens=30, sampling=sampling, prediction=plain.text)
    assert result.text == plain.text
    assert result.tokens[0].drafter == "prediction"
    assert result.prediction == (len(served.encode(plain.text)), 0)
    assert result.stats.drafters["prediction"].draft_n_accepted > 15


@pytest.mark.parametrize("parts", [False, True])
@BOTH
def test_a_request_may_predict(serve: Serve, path: str, parts: bool) -> None:
    client = serve()
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
    body = {**asked, "max_tokens": 24, "n": 2}
    plain = client.post(path, json=body).json()
    text = plain["choices"][0].get("text") or plain["choices"][0]["message"]["content"]
    halves = [{"type": "text", "text": half} for half in (text[:9], text[9:])]
    body |= predicted(halves if parts else text)
    answer = client.post(path, json=body).json()
    assert answer["choices"] == plain["choices"]
    assert "completion_tokens_details" not in plain["usage"]
    details = answer["usage"].pop("completion_tokens_details")
    assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
    assert details["accepted_prediction_tokens"] > 0
    usage = {name: answer["usage"][name] for name in ("completion_tokens", "prompt_tokens")}
    assert usage == {name: plain["usage"][name] for name in usage}
    *_, last = events(client, path, **body, stream_options={"include_usage": True})
    assert last["usage"]["completion_tokens_details"] == details


@pytest.mark.parametrize(
    "wrong",
    [
        {"prediction": "a text"},
        {"prediction": {"content": "a text"}},
        {"prediction": {"type": "content"}},
        {"prediction": {"type": "tokens", "content": [1]}},
        predicted(5),
        predicted([{"type": "image_url", "image_url": {"url": "x"}}]),
    ],
)
def test_what_is_no_prediction_is_refused_by_its_name(serve: Serve, wrong: dict[str, Any]) -> None:
    refused = serve().post(CHAT, json={"messages": HELLO, **wrong})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prediction"
