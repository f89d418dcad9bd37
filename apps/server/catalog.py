"""What the server reports about its models, in each API's form."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

from fastapi import FastAPI, Request

from edge_spec import SamplingParams
from edge_spec.apps.server.answer import OpenModel, ServedModel
from edge_spec.apps.server.body import Body
from edge_spec.apps.server.models import Models
from edge_spec.cli.options import ServerOptions
from edge_spec.core.recommended_sampling import sampling_source, sampling_text

_SPOKEN = "0.12.0"  # Ollama's version with this API; clients refuse older ones


def is_for_anthropic(headers: Mapping[str, str]) -> bool:
    """Return True for a request in Anthropic's API, which shares OpenAI's paths for models."""
    return "anthropic-version" in headers


def _openai_entry(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.since.timestamp()),
        "owned_by": "edge-spec",
        "aliases": list(model.aliases),
        "status": {"value": model.status},
    }


def _anthropic_entry(model: ServedModel) -> dict[str, Any]:
    """Describe a model. Its limits are None until it was open once."""
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": model.since.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": model.context_length,
    }


def _ollama_entry(model: ServedModel) -> dict[str, Any]:
    named = {"name": model.name, "model": model.name, "modified_at": model.since.isoformat()}
    return {**named, "digest": "", "size": 0, "details": {}}


def _info(model: OpenModel) -> dict[str, Any]:
    engine = model.engine
    return {
        "model": model.name,
        "runtime": engine.runtime,
        "drafter": model.drafter,
        "drafters": ["auto", "none", *engine.drafters],
        "plan": engine.plan,
        "context_length": engine.context_length,
        "version": version("edge-spec"),
    }


def _props(model: OpenModel) -> dict[str, Any]:
    engine, text, options = model.engine, model.engine.parts.text, model.options
    asked = options.sampling.asked
    of_page = engine.chat_sampling(**asked)
    return {
        "default_generation_settings": {
            "n_ctx": engine.context_length,
            "params": _params(of_page, options),
        },
        "total_slots": options.parallel,
        "model_alias": model.name,
        "modalities": {"vision": False, "audio": False},
        "chat_template": text.chat_template or "",
        "bos_token": "" if text.bos_id is None else text.tokenizer.token_text(text.bos_id),
        "eos_token": text.tokenizer.token_text(text.eos_ids[0]) if text.eos_ids else "",
        "build_info": f"edge-spec {version('edge-spec')}",
        "edge_spec": {
            "plan": engine.plan,
            "sampling": sampling_text(of_page),
            "sampling_source": sampling_source(text.sampling, asked),
            "request_params": _params(options.sampling.params, options),
        },
    }


def _params(sampling: SamplingParams, options: ServerOptions) -> dict[str, float]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "n_predict": options.sampling.limit(None),
    }


def _for_ollama(model: OpenModel) -> dict[str, Any]:
    engine, text = model.engine, model.engine.parts.text
    architecture = engine.parts.model.config.architecture
    able = ["completion", *(("tools",) if text.chat_template else ())]
    if text.chat_template and text.answer_form(()) is not None:
        able.append("thinking")
    return {
        "template": text.chat_template or "",
        "details": {"family": architecture, "families": [architecture]},
        "model_info": {
            "general.architecture": architecture,
            f"{architecture}.context_length": engine.context_length,
        },
        "capabilities": able,
    }


class ShowRequest(Body):
    also: ClassVar = {"name": "model"}
    keeps_others = True
    model: str


def add_models(app: FastAPI, models: Models) -> None:
    ask = models.ask

    @app.get("/v1/models")
    async def all_models(request: Request) -> Any:
        """List the served models, and whether they are open."""
        if not is_for_anthropic(request.headers):
            return {"object": "list", "data": list(map(_openai_entry, models))}
        data = list(map(_anthropic_entry, models))
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"data": data, "has_more": False, **ends}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> Any:
        """Return a model, by its name or an alias."""
        entry = _anthropic_entry if is_for_anthropic(request.headers) else _openai_entry
        return entry(models.find(model))

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """List the served models."""
        return {"models": list(map(_ollama_entry, models))}

    @app.get("/api/ps")
    async def open_models() -> dict[str, Any]:
        """List the open models."""
        return {"models": [_ollama_entry(model) for model in models if model.opened is not None]}

    @app.post("/api/show")
    async def show(request: ShowRequest) -> dict[str, Any]:
        """Describe a model and what it can do. Opens the model."""
        since = models.find(request.model).since.isoformat()
        return {"modified_at": since, **await ask(request.model, _for_ollama)}

    @app.get("/api/version")
    async def spoken() -> dict[str, str]:
        """Return the version of Ollama whose API this is."""
        return {"version": _SPOKEN}

    @app.get("/edge-spec/info")
    async def what_runs(model: str | None = None) -> dict[str, Any]:
        """Describe what answers, and the drafters that requests may name. Opens the model."""
        return await ask(model, _info)

    @app.get("/props")
    async def settings(model: str | None = None) -> dict[str, Any]:
        """Describe how conversations are answered, as llama.cpp's server does. Opens the model."""
        return await ask(model, _props)

    @app.get("/edge-spec/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        """Say what runs the model, who drafts, and why. Opens the model."""
        return await ask(model, lambda model: {"plan": model.engine.plan})
