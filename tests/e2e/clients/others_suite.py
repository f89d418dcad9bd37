"""LlamaIndex and LiteLLM, as their users use them."""

from __future__ import annotations

import json
import os

import litellm
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

URL = os.environ["EDGE_SPEC_URL"]
HELLO = [{"role": "user", "content": "Write a sentence about the sea."}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASKED = {
    "model": "openai/smollm2",
    "api_base": URL,
    "api_key": "none",
    "temperature": 0,
    "max_tokens": 60,
}


class Person(BaseModel):
    age: int
    is_tall: bool


def add(a: int, b: int) -> int:
    """Adds two numbers"""
    return a + b


def like(**options: object) -> OpenAILike:
    return OpenAILike(
        model="smollm2",
        api_base=URL,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=60,
        **options,
    )


def test_llama_index_chats_whole_and_in_a_stream() -> None:
    messages = [ChatMessage(role="system", content="Be brief."), ChatMessage("Tell a story.")]
    whole = like().chat(messages).message.content
    streamed = [piece.delta or "" for piece in like().stream_chat(messages)]
    assert whole and "".join(streamed) == whole and len(streamed) > 1


async def test_llama_index_completes_beside_others() -> None:
    text = (await like().acomplete("Once upon a time")).text
    assert text == like().complete("Once upon a time").text


def test_llama_index_calls_tools() -> None:
    llm = like()
    tool = FunctionTool.from_defaults(add)
    answer = llm.chat_with_tools([tool], "What is 2 + 3?", tool_required=True)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "add" and set(call.tool_kwargs) == {"a", "b"}
    result = ChatMessage(
        role="tool", content="5", additional_kwargs={"tool_call_id": call.tool_id, "name": "add"}
    )
    question = ChatMessage(role="user", content="What is 2 + 3?")
    assert llm.chat([question, answer.message, result]).message.content
    *_, last = llm.stream_chat_with_tools([tool], "What is 2 + 3?", tool_required=True)
    (streamed,) = llm.get_tool_calls_from_response(last)
    assert streamed.tool_kwargs == call.tool_kwargs


def test_llama_index_reads_a_form() -> None:
    assert isinstance(like().as_structured_llm(Person).complete("Who?").raw, Person)


def test_litellm_answers_whole_and_in_a_stream() -> None:
    whole = litellm.completion(messages=HELLO, **ASKED).choices[0].message.content
    stream = litellm.completion(messages=HELLO, stream=True, **ASKED)
    assert whole and "".join(each.choices[0].delta.content or "" for each in stream) == whole


async def test_litellm_answers_beside_others() -> None:
    answer = await litellm.acompletion(messages=HELLO, **ASKED)
    assert answer.usage.completion_tokens > 0


def test_litellm_calls_tools_whole_and_in_a_stream() -> None:
    asked = {**ASKED, "messages": HELLO, "tools": [ADD], "tool_choice": "required"}
    message = litellm.completion(**asked).choices[0].message
    (call,) = message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    chunks = list(litellm.completion(stream=True, **asked))
    rebuilt = litellm.stream_chunk_builder(chunks).choices[0].message
    assert rebuilt.tool_calls[0].function == call.function
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    messages = [*HELLO, message.model_dump(), result]
    assert litellm.completion(messages=messages, **ASKED).choices[0].message.content


def test_litellm_reads_a_form_and_names_errors() -> None:
    answer = litellm.completion(messages=HELLO, response_format=Person, **ASKED)
    assert Person.model_validate_json(answer.choices[0].message.content)
    try:
        litellm.completion(messages=[{"role": "user", "content": "a " * 20000}], **ASKED)
    except litellm.ContextWindowExceededError as error:
        assert "tokens" in str(error)
    else:
        raise AssertionError("the prompt does not fit")
