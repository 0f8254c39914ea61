"""The specification of a client of a teacher's server."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import StageError
from async_opd.models.json_files import read_json
from async_opd.models.tokenizer import Text


@dataclass(frozen=True)
class EndpointSpec:
    """One server. ``top_k`` is 0 where only the sampled token is scored.

    ``vocabulary`` is the student's number of tokens, None if its ``config.json`` has none.
    """

    name: str
    url: str
    api: Literal["vllm", "sglang"]
    served_model: str
    top_k: int
    eos_ids: tuple[int, ...]
    concurrency: int
    vocabulary: int | None = None
    key_env: str | None = None
    unsampled_ids: tuple[int, ...] = ()
    """Tokens that stand for images, which the server's own answers behind images may not have."""

    def key(self) -> str | None:
        """The servers' key, read from the environment of this process; no message contains it.

        StageError if the variable is not set.
        """
        if self.key_env is None:
            return None
        key = os.environ.get(self.key_env)
        if not key:
            cause = "the process that calls the servers lacks the variable that api_key_env names"
            remedy = "export it on every node before ray start; the driver's is not passed on"
            raise StageError(self.name, cause, remedy)
        return key


def endpoint_spec(config: RunConfig, teacher: EndpointTeacher, name: str, url: str) -> EndpointSpec:
    """The spec of one of a teacher's servers."""
    text = Text.of(config)
    vocabulary = read_json(Path(config.student.model) / "config.json").get("vocab_size")
    return EndpointSpec(
        name=name,
        url=url,
        api=teacher.api,
        served_model=teacher.served_model,
        top_k=scored_top_k(config.loss),
        eos_ids=text.response_ends(),
        concurrency=teacher.concurrency,
        vocabulary=vocabulary if isinstance(vocabulary, int) else None,
        key_env=teacher.api_key_env,
        unsampled_ids=text.unsampled_ids,
    )
