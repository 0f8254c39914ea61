"""The base class of all sections of the config, and that of sections which name a model."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


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


class ModelSection(Section):
    """A model that engines of the run load."""

    model: str = Field(min_length=1)
    """Directory of a Hugging Face model, or a hub id. A name is a directory if its first part is a
    folder beside the config."""
    revision: str | None = Field(default=None, pattern=r"^[\w./-]{1,200}$")
    """Commit, tag or branch of a hub id; by default the newest. With ``trust_remote_code`` it is
    required, and a commit."""
    trust_remote_code: bool = False
    """Runs code that comes with the model. Only for models you trust."""
