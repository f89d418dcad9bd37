"""What the objects of a request have in common: strict types; members that are no fields are
ignored, as OpenAI's clients expect."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue

JsonObject = dict[str, JsonValue]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
