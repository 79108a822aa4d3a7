"""What every section of a config is made of: described fields, nothing unknown, defaults checked."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

ResumePolicy = Literal["free", "logged", "segment", "refused"]


def setting(description: str, *, resume: ResumePolicy, default: Any = ..., **checks: Any) -> Any:
    """A config field: its meaning, unit and what a resume may do with it."""
    return Field(default, description=description, json_schema_extra={"resume": resume}, **checks)


class Section(BaseModel):
    """Base of every section: frozen, unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _none_is_null(cls, values: Any) -> Any:
        """The word that descriptions use for an absent value means null in every field that may have none."""
        if not isinstance(values, dict):
            return values
        return {key: None if value == "none" and cls._may_be_null(key) else value for key, value in values.items()}

    @classmethod
    def _may_be_null(cls, key: Any) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and type(None) in get_args(field.annotation)
