"""Define the base class of the config's sections."""

from typing import Any

from pydantic import BaseModel, ConfigDict

DERIVED: Any = None
"""The default of fields that `load_config` computes from other fields if they are not given."""


class Section(BaseModel):
    """The base class of the config and its sections: a pydantic model with immutable fields.

    Unknown fields are refused.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
