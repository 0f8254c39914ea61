"""The base class of all sections of the config."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of the config that refuses unknown keys, infinities and NaN."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        populate_by_name=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )
