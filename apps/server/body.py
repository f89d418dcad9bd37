"""What the objects of a request have in common: strict types, members that are all known, and
unions of which a refusal names the member that was meant."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from edge_spec.apps.server.field_names import OtherNames

MAX_INT = 2**31 - 1
JsonObject = dict[str, JsonValue]


def whole(value: Any) -> Any:
    """Returns a number such as 100.0 as the whole number that it is: JSON has numbers alone."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=1, le=MAX_INT)]


def _closed(schema: JsonObject, kind: type[Body]) -> None:
    """Says in the description whether there may be members that are no fields."""
    if not kind.other_names.keeps_others:
        schema["additionalProperties"] = {"type": "null"}  # which asks for nothing


class Body(BaseModel):
    """Takes its fields by their names, and by those that other servers have for them."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, json_schema_extra=_closed
    )
    other_names: ClassVar[OtherNames] = OtherNames()

    @model_validator(mode="before")
    @classmethod
    def _knows_members(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        taken = [field.alias or name for name, field in cls.model_fields.items()]
        return cls.other_names.read(given, taken)


class OpenBody(Body):
    """An object in which clients keep things of their own, such as ids."""

    other_names = OtherNames(keeps_others=True)
