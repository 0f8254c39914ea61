"""Checks of ``train.context_parallel``: whether ranks can share the rows of this student."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from async_opd.checks.findings import Findings
from async_opd.config.run_config import RunConfig
from async_opd.models.model_files import OF_ATTENTION, ModelFiles
from async_opd.models.tokenizer import text_settings

ALIBI, RECURRENT = "adds ALiBi in an attention of its own", "passes on a recurrent state"
REASONS = {
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma"), RECURRENT),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h"), RECURRENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "has convolutions over tokens"),
    "gpt_oss": "has attention sinks, which no kernel for shared rows knows",
}
"""Why ranks cannot share rows, by ``model_type``. The trainer asks every other student when it
starts (``trainer.student.attention_choice``)."""


def check_shared_rows(config: RunConfig, student: ModelFiles | None, found: Findings) -> None:
    """Adds the problems of rows that ranks share. ``student``: its files, if they were read."""
    if config.train.context_parallel == 1:
        return
    key = "train.context_parallel"
    if config.train.attention == "flex":
        message = "flex, whose masks are of a rank's own tokens, with rows that ranks share"
        found.add("train.attention", message, f"auto, or {key} 1")
    for reason in () if student is None else _reasons(text_settings(student.config)):
        message = f"ranks cannot share the rows of this student, which {reason}"
        found.add(key, message, "1, or another student.model")


def _reasons(settings: Mapping[str, Any]) -> Iterator[str]:
    kind, layers = str(settings.get("model_type")), settings.get("layer_types")
    if kind in REASONS:
        yield REASONS[kind]
    elif settings.get("alibi"):
        yield ALIBI
    elif isinstance(layers, list) and (others := set(map(str, layers)) - OF_ATTENTION):
        yield f"has layers of kind {', '.join(sorted(others))}"
