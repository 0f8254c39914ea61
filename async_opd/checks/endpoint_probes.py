"""Prompts with images that are sent to teachers' servers before a run starts."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any

from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import RolloutFault
from async_opd.data.prompts import to_prompt
from async_opd.models.tokenizer import Text

if TYPE_CHECKING:
    from async_opd.checks.preflight import Inputs
    from async_opd.config.run_config import RunConfig
    from async_opd.core.samples import Prompt


def endpoint_probes(config: RunConfig, inputs: Inputs) -> dict[str, Prompt]:
    """The first prompt with images of each teacher that has servers, if there is one."""
    asked = {name for name, one in config.teachers.items() if isinstance(one, EndpointTeacher)}
    pictured = (row for row in chain(*inputs.checked, *inputs.eval) if row.images)
    found: dict[str, Prompt] = {}
    for row in pictured if asked else ():
        name, text = config.teacher_of(row.data_source), Text.of(config)
        if name in asked - found.keys():
            bounds: dict[str, Any] = {"limit": inputs.max_prompt_tokens, "sized": text.image_tokens}
            with suppress(RolloutFault):
                found[name] = to_prompt(row, text.encode, config.teacher_of, **bounds)
    return found
