"""What the bodies of all APIs are made of: objects with strict types, which pass over no member
that would change the answer, and the messages and tools of a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from edge_spec.apps import validation
from edge_spec.apps.server.errors import ApiError

MAX_TOOLS = 128
MAX_INT = 2**31 - 1
LEAVE_OUT = "leave it out"
JsonObject = dict[str, JsonValue]
_SHOWN = 60  # characters of a name that a client made up
_ALIKE = 0.86  # of the letters of a name, from which on it is one of ours, mistyped

_NAMES = {  # of fields, and other servers' names for them
    "max_tokens": "n_predict num_predict max_new_tokens max_length max_output_tokens",
    "n": "n_cmpl",
    "temperature": "temp",
    "repetition_penalty": "repeat_penalty rep_pen",
    "repeat_last_n": "penalty_last_n repetition_penalty_range rep_pen_range",
    "seed": "sampler_seed random_seed",
    "stop": "stop_sequence stop_sequences stopping_strings stop_strings",
    "ignore_eos": "ban_eos_token",
    "enable_thinking": "think thinking",
    "reasoning_budget": "reasoning_budget_tokens thinking_budget thinking_budget_tokens "
    "thinking_token_budget",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "grammar": "guided_grammar grammar_string ebnf",
}
ALSO = {other: name for name, others in _NAMES.items() for other in others.split()}


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Members that change no answer: who asks, how a request is routed, how a prompt is read and kept,
# and parameters of what is off.
HARMLESS = words(
    """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
    provider usage route cache_prompt id_slot slot_id n_keep n_discard n_cache_reuse verbose
    timings_per_token return_progress sse_ping_interval backend_sampling mirostat_tau
    mirostat_eta xtc_threshold dry_base dry_allowed_length dry_penalty_last_n
    dry_sequence_breakers dynatemp_exponent adaptive_decay speculative.n_max speculative.n_min
    speculative.p_min priority request_id cache_salt stream_interval truncation_side rid
    spaces_between_special_tokens mm_processor_kwargs media_io_kwargs extra_key
    guided_decoding_backend kv_transfer_params ec_transfer_params custom_labels
    stream_reasoning keep_alive num_ctx num_gpu num_thread num_batch num_keep use_mmap
    use_mlock low_vram ttl draft_model n_ctx ctx_len api_type api_server truncation_length
    max_context_length smoothing_curve dynatemp_low dynatemp_high max_tokens_second
    auto_max_new_tokens prompt_lookup_num_tokens static_cache chat_id message_id
    litellm_call_id litellm_session_id litellm_trace_id litellm_metadata
    max_tool_calls prompt_cache_options client_metadata image cache_control diagnostics
    inference_geo speed user_profile_id workspace_id anthropic_version anthropic_beta betas
    context_management numa main_gpu vocab_only logits_all f16_kv embedding_only num_gqa
    rope_frequency_base rope_frequency_scale penalize_newline truncate shift t_max_prompt_ms
    n_indent"""
)
_ON = words(
    """typical_p typical typ_p tfs_z tfs tail_free_sampling do_sample num_beams best_of
    length_penalty guidance_scale encoder_repetition_penalty skip_special_tokens
    add_special_tokens add_bos_token detokenize"""
)
_ON_OR_OFF = words(
    """include_reasoning parallel_tool_calls parse_tool_calls reasoning_in_content
    separate_reasoning"""
)
# Values of a member that ask for nothing, so that one that is not known here may have them.
_NOTHING: tuple[Any, ...] = (0, -1, "", [], {})  # 0 is False
_USUAL: Mapping[str, tuple[Any, ...]] = {  # where others ask for nothing
    **dict.fromkeys(_ON, (1,)),  # 1 is True
    **dict.fromkeys(_ON_OR_OFF, (*_NOTHING, 1)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "verbosity": ("medium",),
}
_STATELESS = "nothing is stored here, so send the whole conversation"
_INSTEAD = {
    **dict.fromkeys(("previous_response_id", "conversation"), _STATELESS),
    **dict.fromkeys(("images", "audio"), "the model reads text"),
    "functions": "send tools",
    "extra_body": "send its members beside the others",
}


def refusal(name: str, fault: str) -> PydanticCustomError:
    """Return the error of a member of the object that is being read."""
    told = {"fault": fault, "member": name}
    told = {each: text.encode("utf-8", "replace").decode() for each, text in told.items()}
    return PydanticCustomError("member", "{fault}", told)


def asks_for_nothing(name: str, value: Any) -> bool:
    return value in _USUAL.get(name, _NOTHING)


def whole(value: Any) -> Any:
    """Return a number such as 100.0 as the whole number that it is: JSON has numbers alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1, le=MAX_INT)]


def _closed(schema: JsonObject, kind: type[Body]) -> None:
    """Says in the description whether there may be members that are no fields."""
    if not kind.keeps_others:
        schema["additionalProperties"] = {"enum": [None, *_NOTHING, False]}


class Body(BaseModel):
    """An object of a request.

    also: other servers' names of its fields. harmless: members that change no answer.
    keeps_others: clients keep members of their own in it; mistyped names are refused all the same,
    and so are `unlike`.
    """

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_closed
    )
    also: ClassVar[Mapping[str, str]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()
    keeps_others: ClassVar[bool] = False
    unlike: ClassVar[frozenset[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _knows_members(cls, given: Any) -> Any:
        """Return the members by our names. null means left out, whatever the name."""
        if not isinstance(given, dict):
            return given
        taken = [field.alias or name for name, field in cls.model_fields.items()]
        known = {name: value for name, value in given.items() if name in taken}
        for name, value in given.items():
            meaning = cls.also.get(name, name)
            if name in taken or name in cls.harmless or value is None:
                continue
            if meaning in taken:
                if known.get(meaning, value) not in (value, None):
                    raise refusal(name, f"is not what {meaning} says: send one of them")
                known[meaning] = value
            else:
                cls._refuse_unknown(name, value, taken)
        return known

    @classmethod
    def _refuse_unknown(cls, name: str, value: Any, taken: list[str]) -> None:
        near = get_close_matches(name, taken, n=1, cutoff=_ALIKE)
        is_kept = cls.keeps_others and name not in cls.unlike
        if not near and (is_kept or asks_for_nothing(cls.also.get(name, name), value)):
            return
        if name in _INSTEAD:
            raise refusal(name, f"is not supported: {_INSTEAD[name]}")
        shown = name if len(name) <= _SHOWN else f"{name[:_SHOWN]}..."
        way = f"is {near[0]} meant?" if near else LEAVE_OUT
        raise refusal(shown, f"is no field that is known here: {way}")


class OpenBody(Body):
    """An object in which clients keep things of their own, such as ids."""

    keeps_others = True


def refused_body(faults: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return what the client is told of the faults that pydantic found."""
    if faults[0]["type"] == "json_invalid" and len(faults[0]["loc"]) == 1:
        return ApiError(400, "The body is no valid JSON.")
    path, line = validation.told(faults, body)
    message = " ".join(line.split())
    message += "" if message.endswith("?") else "."
    return ApiError(400, message, param=str(path[0]) if path else None)


class TextPart(OpenBody):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(OpenBody):
    """A text that declines."""

    type: Literal["refusal"]
    refusal: str


Content = str | list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]]
Arguments = str | JsonObject  # JSON, as a text or as it is


def joined(content: Content) -> str:
    """Return the text of all parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def message_of(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    """Return a message as the engine takes it, without `others` that are None."""
    given = {name: value for name, value in others.items() if value is not None}
    return {"role": role, "content": content, **given}


def answer_of(
    texts: Sequence[str], thoughts: Iterable[str], calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return an earlier answer as one message. thoughts: empty ones are none."""
    return message_of(
        "assistant",
        "".join(texts) if texts or not calls else None,
        reasoning_content="\n\n".join(filter(None, thoughts)) or None,
        tool_calls=calls or None,
    )


def call_of(id: str | None, name: str, arguments: Arguments | None) -> dict[str, Any]:
    """Return a call as the engine takes it."""
    named = {} if id is None else {"id": id}
    function = {"name": name, "arguments": arguments or "{}"}
    return {**named, "type": "function", "function": function}


class FunctionCall(OpenBody):
    """A call as an answer had it; arguments that were not there are none."""

    name: str
    arguments: Arguments | None = None


def _wrapped(given: Any) -> Any:
    """Return a function of OpenAI's newer form in the older one."""
    if not isinstance(given, dict) or "function" in given or "name" not in given:
        return given
    own = {name: given[name] for name in ("id",) if name in given}
    return {"type": given.get("type", "function"), "function": given, **own}


class ToolCall(OpenBody):
    """A call, or the tool that is to be called."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    _is_wrapped = model_validator(mode="before")(_wrapped)


class Message(Body):
    """developer is another name of system. The assistant and tools may leave content out.
    refusal: read in place of content. prefix: the answer goes on with this message."""

    also: ClassVar = {
        "reasoning": "reasoning_content",
        "thinking": "reasoning_content",
        "partial": "prefix",
        "tool_name": "name",
    }
    keeps_others = True
    unlike = frozenset(("function_call", "images", "audio"))
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    prefix: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise refusal("content", f"is missing: a message of the role {self.role} needs a text")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return it as the engine takes it."""
        functions = [(each.id, each.function) for each in self.tool_calls or ()]
        calls = [call_of(id, function.name, function.arguments) for id, function in functions]
        return message_of(
            self.role,
            self.refusal if self.content is None else joined(self.content),
            name=self.name,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content,
            tool_calls=calls or None,
        )


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


class Function(OpenBody):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None  # True: keywords that cannot be held are refused


class Tool(OpenBody):
    type: Literal["function"] = "function"
    function: Function

    _is_wrapped = model_validator(mode="before")(_wrapped)


def _word(choice: Any) -> Any:
    """Return the word where it stands as the type of an object, as Anthropic's API has it."""
    if isinstance(choice, dict) and list(choice) == ["type"]:
        return choice["type"] if choice["type"] in ("none", "auto", "required", "any") else choice
    return choice


Word = Literal["none", "auto", "required", "any"]
Choice = Annotated[Word | ToolCall, BeforeValidator(_word)]


def tool_of(name: str, **others: Any) -> dict[str, Any]:
    """Return a tool in OpenAI's form, without those of `others` that are None."""
    given = {name: value for name, value in others.items() if value is not None}
    return {"type": "function", "function": {"name": name, **given}}
