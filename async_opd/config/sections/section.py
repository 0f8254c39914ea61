"""The base class of all sections of the config, and that of sections which name a model."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Gt, Lt
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

MAX_NAME = 100
CHECK_NAMES = "names are checked"
"""The context in which a user's own config is validated; run directories may have any names."""


def _printable(name: str, info: ValidationInfo) -> str:
    if info.context == CHECK_NAMES and (len(name) > MAX_NAME or not name.isprintable()):
        raise ValueError(f"a name of at most {MAX_NAME} printable characters on one line")
    return name


Name = Annotated[str, AfterValidator(_printable)]
"""A text that is shown, or is a key of metrics."""

Count = Annotated[int, Gt(0), Lt(1 << 31)]
"""A number of steps, samples, tokens, processes or MiB."""


def steps_or_versions(given: Any) -> Any:
    """The keys of a section with ``every`` and ``every_steps``: no default beside the second."""
    if isinstance(given, dict) and given.get("every_steps") is not None:
        return {"every": None, **given}
    return given


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
    revision: str | None = Field(default=None, pattern=r"^[\w./-]+$", max_length=200)
    """Commit, tag or branch of a hub id; by default the newest. With ``trust_remote_code`` it is
    required, and a commit."""
    trust_remote_code: bool = False
    """Runs code that comes with the model. Only for models you trust."""
    processor_kwargs: dict[str, Any] = Field(default={})
    """Settings of the model's image processor in place of its defaults, such as ``size``, for
    engines and ranks. See docs/vision.md."""

    @field_validator("processor_kwargs")
    @classmethod
    def _trust_no_code(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "trust_remote_code" in str(value):
            raise ValueError("no trust_remote_code here: it is a key of the section itself")
        return value


class Rendering(Section):
    """How a prompt becomes the text that a model reads. See docs/data.md."""

    chat_template_file: str | None = Field(default=None, min_length=1)
    """File with a chat template (Jinja), in place of the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template, such as ``enable_thinking: false`` or ``tools``. One
    that the template does not read is refused."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message of every prompt, in place of the prompt's if it has one."""
    response_prefix: str | None = None
    """Text after the header of the assistant's turn that responses continue, in place of the
    thought that the generation prompt begins (``"<think>\\n"``); empty: none."""
