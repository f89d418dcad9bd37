"""LangChain's standard tests of a chat model, through ChatOpenAI."""

from __future__ import annotations

import os
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """The penalty keeps a model of this size from repeating a sentence without end."""
        return {
            "base_url": os.environ["EDGE_SPEC_URL"],
            "api_key": "none",
            "model": "smollm2",
            "temperature": 0,
            "stream_usage": True,
            "extra_body": {"repetition_penalty": 1.1},
        }

    @property
    def has_tool_choice(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestChatOpenAIResponses(TestChatOpenAI):
    """The same over OpenAI's newer API."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
