"""The fields of a request that are about the thoughts before its answer, in the words of OpenAI,
OpenRouter, llama.cpp, vLLM and SGLang, and of makers of models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from edge_spec.apps.server.body import MAX_INT, Body, JsonObject, Whole
from edge_spec.text.parts.thought_forms import SWITCHES

_NAMES = frozenset((*SWITCHES, "reasoning_effort"))  # in chat templates
_IN_TEXT = ("none", "raw")  # formats that leave thoughts where the model wrote them


def _thinks(value: Any) -> Any:
    """Reads what makers of models send for it: a switch, or an object with a type."""
    if isinstance(value, dict) and list(value) == ["type"]:
        return {"enabled": True, "disabled": False}.get(str(value["type"]), value)
    return value


Effort = Annotated[str, Field(pattern=r"^[a-zA-Z_-]{1,20}$")]  # models know different words
Budget = Annotated[Whole, Field(ge=-1, le=MAX_INT)]  # of tokens; -1: no limit


class Reasoning(Body):
    """OpenRouter's."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Budget | None = None
    exclude: bool | None = None


class ReasoningRequest(Body):
    chat_template_kwargs: JsonObject | None = None
    enable_thinking: Annotated[bool, BeforeValidator(_thinks)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    reasoning_budget: Budget | None = None
    reasoning_format: (
        Literal["auto", "deepseek", "deepseek-legacy", "parsed", "hidden", "none", "raw"] | None
    ) = None
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None

    @property
    def thinking(self) -> Literal["auto", "off"] | int | None:
        """Returns what engines are asked for: see `edge_spec.text.thoughts.Reasoning`. None where
        the request says nothing of it."""
        reasoning, switches = self.reasoning or Reasoning(), self.template_kwargs
        budget = reasoning.max_tokens if self.reasoning_budget is None else self.reasoning_budget
        effort = self.reasoning_effort or reasoning.effort
        on = [switches.get(name) for name in SWITCHES]
        if effort == "none" or budget == 0 or any(each is False for each in on):
            return "off"
        if budget not in (None, -1):
            return budget
        return None if budget is None and effort is None and on == [None, None] else "auto"

    @property
    def tells_thoughts(self) -> bool:
        """Says whether the answer has its thoughts beside the text."""
        hidden = self.reasoning_format == "hidden" or self.include_reasoning is False
        return not (hidden or (self.reasoning is not None and self.reasoning.exclude))

    @property
    def has_thoughts_in_text(self) -> bool:
        return self.reasoning_format in _IN_TEXT or self.separate_reasoning is False

    @property
    def template_kwargs(self) -> JsonObject:
        """Returns what the chat template is given by name."""
        reasoning = self.reasoning or Reasoning()
        effort = self.reasoning_effort or reasoning.effort
        thinks = reasoning.enabled if self.enable_thinking is None else self.enable_thinking
        named: JsonObject = {"enable_thinking": thinks}
        if effort == "none":
            named["enable_thinking"] = False
        else:
            named["reasoning_effort"] = effort
        given = {name: value for name, value in named.items() if value is not None}
        # Some templates know the switch by another name, and some think when they are asked alone.
        is_on = thinks or (thinks is None and effort not in (None, "none", "minimal"))
        on: JsonObject = dict.fromkeys(SWITCHES, True) if is_on else {}
        return {**on, **(self.chat_template_kwargs or {}), **given}

    @property
    def required_kwargs(self) -> set[str]:
        """Returns the names of those that a template has to read: what is said of thoughts is of
        none where the model has none."""
        given = self.template_kwargs.items()
        return {name for name, value in given if value and name not in _NAMES}

    @model_validator(mode="before")
    @classmethod
    def _has_budget(cls, given: Any) -> Any:
        """Reads a budget that stands beside the switch, as Anthropic's API has it."""
        asked = given.get("thinking") if isinstance(given, dict) else None
        if isinstance(asked, dict) and list(asked) == ["type", "budget_tokens"]:
            budget = asked["budget_tokens"]
            return {**given, "thinking": {"type": asked["type"]}, "reasoning_budget": budget}
        return given
