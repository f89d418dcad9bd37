"""What the objects of a body have in common: strict types, refusals of one line, and no member
that would change the answer is passed over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from pydantic_core import PydanticCustomError

from edge_spec.apps import validation
from edge_spec.apps.server.errors import ApiError

MAX_INT = 2**31 - 1
LEAVE_OUT = "leave it out"
JsonObject = dict[str, JsonValue]
_SHOWN = 60  # characters of a name that a client made up
_ALIKE = 0.8  # of the letters of a name, from which on it is one of ours, mistyped

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
    litellm_call_id litellm_session_id litellm_trace_id litellm_metadata"""
)
# Members that are taken with one of these values, which asks for nothing.
_NOTHING: tuple[Any, ...] = (0, -1, "", [], {})  # 0 is False
_OFF: Sequence[tuple[str, tuple[Any, ...]]] = (
    (
        """functions messages prompt input structured_outputs chat_template audio
        previous_response_id conversation thread""",
        (),
    ),
    (
        """mirostat mirostat_mode xtc_probability top_a smoothing_factor dynatemp_range skew nsigma
        epsilon_cutoff eta_cutoff penalty_alpha top_n_sigma adaptive_target min_keep samplers
        sampler_order sampler_priority temperature_last dynamic_temperature use_beam_search
        early_stopping negative_prompt dry_multiplier no_repeat_ngram_size bad_words
        banned_strings banned_tokens custom_token_bans allowed_token_ids logits_processors
        min_tokens min_length stop_regex include_stop_str_in_output no_stop_trim prompt_logprobs
        post_sampling_probs logprob_token_ids return_tokens return_token_ids
        return_tokens_as_token_ids return_prompt_text return_hidden_states response_fields
        t_max_predict_ms n_indent lora lora_path image_data images format options parameters
        extra_body template system context instructions raw vllm_xargs watermarking
        thinking_forced_open reasoning_budget reasoning_budget_message reasoning_control echo
        suffix tools top_logprobs chat_template_kwargs reasoning_effort enable_thinking
        documents add_generation_prompt continue_final_message mcp_servers background
        context_management""",
        _NOTHING,
    ),
    (
        """typical_p typical typ_p tfs_z tfs tail_free_sampling do_sample num_beams length_penalty
        guidance_scale encoder_repetition_penalty skip_special_tokens add_special_tokens
        add_bos_token detokenize parse_tool_calls best_of""",
        (1,),
    ),
    (
        """include_reasoning parallel_tool_calls reasoning_in_content separate_reasoning""",
        (*_NOTHING, 1),
    ),
    ("tool_choice function_call", ("none", "auto")),
    ("verbosity", ("medium",)),
)
OFF = {name: values for names, values in _OFF for name in names.split()}
_STATELESS = "nothing is stored here, so send the whole conversation"
_INSTEAD = {
    **dict.fromkeys(("previous_response_id", "conversation", "thread"), _STATELESS),
    **dict.fromkeys(("options", "extra_body"), "send its members beside the others"),
    **dict.fromkeys(("images", "audio"), "the model reads text"),
    **dict.fromkeys(("format", "structured_outputs"), "send response_format, regex or grammar"),
    "messages": "send prompt or input, or ask POST /v1/chat/completions",
    "functions": "send tools",
    "function_call": "send tool_choice, or tool_calls in a message",
}


def refusal(name: str, fault: str) -> PydanticCustomError:
    """Return the error of a member of the object that is being read."""
    told = {"fault": fault, "member": name}
    told = {each: text.encode("utf-8", "replace").decode() for each, text in told.items()}
    return PydanticCustomError("member", "{fault}", told)


def require_off(name: str, value: Any, *, shown_as: str | None = None) -> None:
    """Refuses a member that is not supported, unless its value asks for nothing."""
    if value not in OFF.get(name, ()):
        told = f"is not supported: {_INSTEAD.get(name, LEAVE_OUT)}"
        raise refusal(shown_as or name, told)


def whole(value: Any) -> Any:
    """Return a number such as 100.0 as the whole number that it is: JSON has numbers alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1, le=MAX_INT)]


def _closed(schema: JsonObject, kind: type[Body]) -> None:
    """Says in the description whether there may be members that are no fields."""
    if not kind.keeps_others:
        schema["additionalProperties"] = {"type": "null"}  # which asks for nothing


class Body(BaseModel):
    """An object of a request.

    also: other servers' names of its fields. harmless: members that change no answer. off: members
    that are taken where their values ask for nothing. keeps_others: clients keep members of their
    own in it; mistyped names are refused all the same.
    """

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_closed
    )
    also: ClassVar[Mapping[str, str]] = {}
    harmless: ClassVar[frozenset[str]] = frozenset()
    off: ClassVar[frozenset[str]] = frozenset()
    keeps_others: ClassVar[bool] = False

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
            elif meaning not in cls.off:
                cls._refuse_unknown(name, taken)
            else:
                require_off(meaning, value, shown_as=name)
        return known

    @classmethod
    def _refuse_unknown(cls, name: str, taken: list[str]) -> None:
        near = get_close_matches(name, taken, n=1, cutoff=_ALIKE)
        if cls.keeps_others and not near:
            return
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
