"""Checks for students that see: what no step of theirs can compute, or keep."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.checks.findings import Findings
    from async_opd.config.run_config import RunConfig
    from async_opd.models.model_files import ModelFiles


def check_seeing_student(config: RunConfig, student: ModelFiles | None, found: Findings) -> None:
    """Reports settings that do not go with a student that sees, or need one."""
    if student is None:
        return
    sees = student.config.get("vision_config") is not None
    for problem in _of_seeing(config) if sees else _of_text(config, student):
        found.add(*problem)


def _of_seeing(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, message and remedy."""
    train, sees = config.train, "with a student that sees"
    if train.context_parallel > 1:
        why = "ranks share rows by tokens, and the tokens of an image come from one tower"
        message = f"found {train.context_parallel} {sees}: {why}"
        yield "train.context_parallel", message, "1"
    if train.compile:
        message = f"found true {sees}: compiled towers were not compared with eager ones"
        yield "train.compile", message, "false"
    if train.lora is not None and train.lora.sync == "adapter":
        message = f"found adapter {sees}: vLLM's names of its adapted layers were not compared"
        yield "train.lora.sync", message, "merged"
    if train.routing == "replay":
        message = f"found replay {sees}: an engine's choices for tokens of images were not compared"
        yield "train.routing", message, "own"
    if config.log.replay:
        message = f"found true {sees}: kept steps have no images, and could not be computed again"
        yield "log.replay", message, "false"


def _of_text(config: RunConfig, student: ModelFiles) -> Iterator[tuple[str, str, str]]:
    if config.train.freeze:
        named = ", ".join(config.train.freeze)
        message = f"found {named}, but {student.path} sees no images: it has no such part"
        yield "train.freeze", message, "remove it"
