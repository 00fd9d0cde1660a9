"""Define the base class of the configuration's sections."""

from typing import Any

from pydantic import BaseModel, ConfigDict

DERIVED: Any = None
"""The default of fields that `load_config` computes from other fields if they are not given."""


class Section(BaseModel):
    """The base class of sections and of the config: immutable models without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
