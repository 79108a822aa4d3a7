"""What every section of a config is made of: described fields, nothing unknown, defaults checked."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ResumePolicy = Literal["free", "logged", "segment", "refused"]


def setting(description: str, *, resume: ResumePolicy, default: Any = ..., **checks: Any) -> Any:
    """A config field: its meaning, unit and what a resume may do with it."""
    return Field(default, description=description, json_schema_extra={"resume": resume}, **checks)


class Section(BaseModel):
    """Base of every section: frozen, unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)
