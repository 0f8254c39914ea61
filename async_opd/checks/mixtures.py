"""Checks of mixtures of experts: routing replay, and compiled layers."""

from __future__ import annotations

from async_opd.checks.findings import Findings
from async_opd.config.run_config import RunConfig
from async_opd.models.adapted import mixture
from async_opd.models.engine_args import Device
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import text_settings

REPLAYED = ("qwen3_moe",)
"""``model_type`` of students whose routers can replay (``trainer.mixtures.routing``)."""


def check_routing(
    config: RunConfig, device: Device, student: ModelFiles | None, found: Findings
) -> None:
    """Adds the problems of routing replay, and of a mixture that is to be compiled.

    ``student``: its files, if they could be read.
    """
    if config.train.compile and student is not None and mixture(student.path):
        message = "true: the experts of a mixture have not been shown to compile"
        found.add("train.compile", message, "false")
    if config.train.routing == "own":
        return
    key, remedy = "train.routing", "own"
    if device == "cpu":
        message = "replay: vLLM returns the experts that it chose on GPUs only"
        found.add(key, f"{message} (model runner V2)", remedy)
    if config.rollout.engine.extra.get("enable_prefix_caching") is False:
        message = "replay: vLLM returns the experts that it chose with its prefix cache only"
        found.add(key, message, f"{remedy}, or rollout.engine.extra without enable_prefix_caching")
    kind = None if student is None else text_settings(student.config).get("model_type")
    if kind is not None and kind not in REPLAYED:
        message = f"replay: a student of type {kind} has no router that can replay"
        found.add(key, message, f"{remedy}; students that can: {', '.join(REPLAYED)}")
