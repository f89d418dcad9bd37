"""The members of requests that other servers have, and what each is here."""

from __future__ import annotations

from typing import Any

from edge_spec.apps.server.field_names import Off

_WAYS_TO_DRAW = "tokens are drawn by temperature, top_k, top_p and min_p"
_ORDER = f"{_WAYS_TO_DRAW}, in this order"
_THINKING = "send chat_template_kwargs, such as enable_thinking, which the model's template reads"
_BEGINS = "tokens that begin a text are added; send token ids instead"
_BESIDE = "send its members beside the others"
_CHAT = "it belongs to POST /v1/chat/completions"
_COMPLETIONS = "it belongs to POST /v1/completions"
_NOTHING: tuple[Any, ...] = ("", [], {}, False)

ANSWER_ALSO = {
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), "max_tokens"),
    "max_output_tokens": "max_tokens",
    "n_cmpl": "n",
    "temp": "temperature",
    **dict.fromkeys(("repeat_penalty", "rep_pen"), "repetition_penalty"),
    **dict.fromkeys(
        ("penalty_last_n", "repetition_penalty_range", "rep_pen_range"), "repeat_last_n"
    ),
    **dict.fromkeys(("sampler_seed", "random_seed"), "seed"),
    **dict.fromkeys(
        ("stop_sequence", "stop_sequences", "stopping_strings", "stop_strings"), "stop"
    ),
    "ban_eos_token": "ignore_eos",
    **dict.fromkeys(("think", "thinking"), "enable_thinking"),
    **dict.fromkeys(
        (
            "reasoning_budget_tokens",
            "thinking_budget",
            "thinking_budget_tokens",
            "thinking_token_budget",
        ),
        "reasoning_budget",
    ),
    "guided_json": "json_schema",
    "guided_regex": "regex",
    **dict.fromkeys(("guided_grammar", "grammar_string", "ebnf"), "grammar"),
    **dict.fromkeys(("typical", "typ_p"), "typical_p"),
    **dict.fromkeys(("tfs", "tail_free_sampling"), "tfs_z"),
    "mirostat_mode": "mirostat",
    "nsigma": "top_n_sigma",
    "min_length": "min_tokens",
    "sampler_order": "samplers",
    "sampler_priority": "samplers",
}

ANSWER_HARMLESS = frozenset(
    (
        # OpenAI, and what asks others to route a request
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "provider", "usage", "route"),
        # llama.cpp: how a prompt is read and kept, how a stream is sent, and parameters of what is
        # off
        *("cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "verbose"),
        *("timings_per_token", "return_progress", "sse_ping_interval", "backend_sampling"),
        *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "dynatemp_exponent", "adaptive_decay"),
        *("speculative.n_max", "speculative.n_min", "speculative.p_min"),
        # vLLM and SGLang
        *("priority", "request_id", "cache_salt", "stream_interval", "truncation_side", "rid"),
        *("spaces_between_special_tokens", "mm_processor_kwargs", "media_io_kwargs", "extra_key"),
        *("guided_decoding_backend", "kv_transfer_params", "ec_transfer_params", "custom_labels"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"),
        *("routed_dp_rank", "stream_reasoning"),
        # Ollama: how a model is held in memory
        *("keep_alive", "num_ctx", "num_gpu", "num_thread", "num_batch", "num_keep", "use_mmap"),
        *("use_mlock", "low_vram"),
        # LM Studio and Jan
        *("ttl", "draft_model", "n_ctx", "ctx_len"),
        # text-generation-webui and SillyTavern
        *("api_type", "api_server", "truncation_length", "max_context_length", "smoothing_curve"),
        *("dynatemp_low", "dynatemp_high", "max_tokens_second", "auto_max_new_tokens"),
        *("prompt_lookup_num_tokens", "static_cache"),
        # Open WebUI and LiteLLM
        *("chat_id", "message_id", "litellm_call_id", "litellm_session_id", "litellm_trace_id"),
        *("litellm_metadata",),
    )
)

ANSWER_OFF = {
    **dict.fromkeys(("typical_p", "tfs_z"), Off((1,), _WAYS_TO_DRAW)),
    **dict.fromkeys(
        (
            "mirostat",
            "xtc_probability",
            "top_a",
            "smoothing_factor",
            "dynatemp_range",
            "skew",
            "epsilon_cutoff",
            "eta_cutoff",
            "penalty_alpha",
        ),
        Off((0,), _WAYS_TO_DRAW),
    ),
    "top_n_sigma": Off((0, -1), _WAYS_TO_DRAW),
    "adaptive_target": Off((-1,), _WAYS_TO_DRAW),
    "dynamic_temperature": Off((False,), _WAYS_TO_DRAW),
    "min_keep": Off((0, 1), _WAYS_TO_DRAW),
    "samplers": Off(([],), _ORDER),
    "temperature_last": Off((False,), _ORDER),
    "do_sample": Off((True,), "temperature 0 takes the likeliest token each time"),
    "use_beam_search": Off((False,), "one token after the other is drawn"),
    "num_beams": Off((1,), "one token after the other is drawn"),
    "length_penalty": Off((1,)),
    "early_stopping": Off((False,)),
    "guidance_scale": Off((1,)),
    "negative_prompt": Off(("",)),
    "dry_multiplier": Off((0,), "send repetition_penalty"),
    "encoder_repetition_penalty": Off((1,), "send repetition_penalty"),
    "no_repeat_ngram_size": Off((0,), "send repetition_penalty"),
    "repetition_detection": Off((), "send repetition_penalty"),
    "bad_words": Off(_NOTHING, "send logit_bias with the ids of tokens"),
    "banned_strings": Off(_NOTHING, "send logit_bias with the ids of tokens"),
    "banned_tokens": Off(_NOTHING, "send logit_bias with the ids of tokens"),
    "custom_token_bans": Off(_NOTHING, "send logit_bias with the ids of tokens"),
    "allowed_token_ids": Off(([],), "send logit_bias with the ids of tokens"),
    "logits_processors": Off(([],)),
    "custom_logit_processor": Off(("",)),
    "min_tokens": Off((0,), "ignore_eos with max_tokens makes an answer of a given length"),
    "stop_regex": Off(_NOTHING, "send stop with texts"),
    "include_stop_str_in_output": Off((False,), "a stop string is not part of the answer"),
    "no_stop_trim": Off((False,), "a stop string is not part of the answer"),
    "skip_special_tokens": Off((True,), "special tokens are not part of the text"),
    "add_special_tokens": Off((True,), _BEGINS),
    "add_bos_token": Off((True,), _BEGINS),
    "detokenize": Off((True,)),
    "prompt_logprobs": Off((0, False), "the prompt's tokens are not scored"),
    "post_sampling_probs": Off((False,), "logprobs are the model's own"),
    "logprob_token_ids": Off(([],)),
    "return_tokens": Off((False,), 'send "speculative": {"tokens": true}'),
    "return_token_ids": Off((False,), 'send "speculative": {"tokens": true}'),
    "return_tokens_as_token_ids": Off((False,), 'send "speculative": {"tokens": true}'),
    "return_prompt_text": Off((False,)),
    "return_hidden_states": Off((False,)),
    "response_fields": Off(([],), "a reply has all of its fields"),
    "truncate_prompt_tokens": Off((), "shorten the prompt"),
    "t_max_predict_ms": Off((0, -1), "send max_tokens"),
    "n_indent": Off((0,)),
    "lora": Off(([],), "serve a model that has the adapter in it"),
    "lora_path": Off(("",), "serve a model that has the adapter in it"),
    "image_data": Off(([],), "the model reads text"),
    "images": Off(([],), "the model reads text"),
    "audio": Off((), "the model writes text"),
    "format": Off(("",), "send response_format"),
    "options": Off(({},), _BESIDE),
    "parameters": Off(({},), _BESIDE),
    "extra_body": Off(({},), _BESIDE),
    "template": Off(("",), "the model's own chat template is used"),
    "system": Off(("",), "send a message of the role system"),
    "context": Off(([],), "send all messages or the whole prompt"),
    "instructions": Off(("",), "send a message of the role system"),
    "raw": Off((False,), "POST /v1/completions takes a prompt without a template"),
    "input": Off((), "send messages to /v1/chat/completions, or prompt to /v1/completions"),
    "inputs": Off((), "send messages to /v1/chat/completions, or prompt to /v1/completions"),
    "vllm_xargs": Off(({},)),
    "watermarking": Off((False,)),
}

CHAT_OFF = {
    **ANSWER_OFF,
    "functions": Off((), "send tools"),
    "function_call": Off(("none", "auto"), "send tool_choice"),
    "web_search_options": Off((), "no answer searches the web"),
    "verbosity": Off(("medium",), "say in a message how long the answer is to be"),
    "chat_template": Off((), "the model's own chat template is used"),
    "reasoning_in_content": Off((True, False)),
    "thinking_forced_open": Off((False,), _THINKING),
    "parse_tool_calls": Off((True,), 'send "tool_choice": "none"'),
    "reasoning_budget_message": Off(("",), _THINKING),
    "reasoning_control": Off((False,), _THINKING),
    "echo": Off((False,), _COMPLETIONS),
    "prompt": Off((), f"send messages; {_COMPLETIONS}"),
    "suffix": Off(("",), _COMPLETIONS),
    "best_of": Off((1,), _COMPLETIONS),
}

COMPLETION_OFF = {
    **ANSWER_OFF,
    "messages": Off((), f"send prompt; {_CHAT}"),
    "tools": Off(([],), _CHAT),
    "tool_choice": Off(("none", "auto"), _CHAT),
    "parallel_tool_calls": Off((True, False)),
    "top_logprobs": Off((0,), "send logprobs with their number"),
    **dict.fromkeys(("include_reasoning", "separate_reasoning"), Off((True, False))),
    "reasoning_budget": Off((-1, 0), _CHAT),
    **dict.fromkeys(
        (
            "chat_template_kwargs",
            "reasoning_effort",
            "enable_thinking",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
        ),
        Off(({}, False), _CHAT),
    ),
}

# Anthropic's: who pays, where, and what its own prompt cache is told.
MESSAGES_HARMLESS = ANSWER_HARMLESS | {
    *("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"),
    *("anthropic_version", "anthropic_beta", "betas"),
    "context_management",  # nothing of a conversation is left out here
}
MESSAGES_OFF = {
    **{name: off for name, off in ANSWER_OFF.items() if name != "system"},
    "thread": Off((), "nothing is stored here, so send the whole conversation"),
    "container": Off((), "code runs where the client is"),
    "mcp_servers": Off(([],), "send their tools as tools"),
}
# Ollama's, which are about its own runner.
OLLAMA_HARMLESS = ANSWER_HARMLESS | {
    *("numa", "main_gpu", "vocab_only", "logits_all", "f16_kv", "embedding_only", "num_gqa"),
    *("rope_frequency_base", "rope_frequency_scale", "penalize_newline", "truncate", "shift"),
}
