"""The base of every settings class: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class StrictSettings(BaseModel):
    """A frozen pydantic model. Values are coerced as YAML needs it ('5e-4' is a float); keys are not guessed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), coerce_numbers_to_str=True)
