"""What the server tells of its models, in the form of each API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import FastAPI, Request

from edge_spec.apps.server.body import Body
from edge_spec.apps.server.models import Description, Models, ServedModel

_SPOKEN = "0.12.0"  # the version of Ollama whose API this is: clients refuse older ones


def is_for_anthropic(headers: Mapping[str, str]) -> bool:
    """Return whether a request for models is in Anthropic's API, which shares its paths."""
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
    """Describe a model; its limits are known once it was open."""
    limit = model.description and model.description.info["context_length"]
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": model.since.isoformat(),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def _ollama_entry(model: ServedModel) -> dict[str, Any]:
    named = {"name": model.name, "model": model.name, "modified_at": model.since.isoformat()}
    return {**named, "digest": "", "size": 0, "details": {}}


class ShowRequest(Body):
    also: ClassVar = {"name": "model"}
    keeps_others = True
    model: str


def add_models(app: FastAPI, models: Models) -> None:
    async def describe(name: str | None) -> Description:
        model = models.find(name)
        if model.description is not None:
            return model.description
        async with models.using(model) as opened:
            return opened.description

    @app.get("/v1/models")
    async def all_models(request: Request) -> Any:
        """The models that are served, and which of them are open."""
        if not is_for_anthropic(request.headers):
            return {"object": "list", "data": list(map(_openai_entry, models))}
        data = list(map(_anthropic_entry, models))
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return {"data": data, "has_more": False, **ends}

    @app.get("/v1/models/{model:path}")
    async def one_model(model: str, request: Request) -> Any:
        """One of them, by its name or an alias."""
        entry = _anthropic_entry if is_for_anthropic(request.headers) else _openai_entry
        return entry(models.find(model))

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """The models that are served."""
        return {"models": list(map(_ollama_entry, models))}

    @app.get("/api/ps")
    async def open_models() -> dict[str, Any]:
        """Those that are open."""
        return {"models": [_ollama_entry(model) for model in models if model.opened is not None]}

    @app.post("/api/show")
    async def show(request: ShowRequest) -> Mapping[str, Any]:
        """One of them, and what it can do. This opens the model."""
        since = models.find(request.model).since.isoformat()
        return {"modified_at": since, **(await describe(request.model)).for_ollama}

    @app.get("/api/version")
    async def spoken() -> dict[str, str]:
        """The version of Ollama whose API this is."""
        return {"version": _SPOKEN}

    @app.get("/edge-spec/info")
    async def what_runs(model: str | None = None) -> Mapping[str, Any]:
        """What answers, and the drafters that requests may ask for. This opens the model."""
        return (await describe(model)).info

    @app.get("/props")
    async def settings(model: str | None = None) -> Mapping[str, Any]:
        """How conversations are answered, as llama.cpp's server tells it. This opens the model."""
        return (await describe(model)).props

    @app.get("/edge-spec/plan")
    async def plan(model: str | None = None) -> dict[str, Any]:
        """What runs the model, who drafts, and why. This opens the model."""
        return {"plan": (await describe(model)).info["plan"]}
