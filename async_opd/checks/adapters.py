"""Checks of ``train.lora``: its package, its targets, and what engines take of it."""

from __future__ import annotations

from importlib.util import find_spec

from async_opd.checks.findings import Findings
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.train import ENGINE_RANKS, LoraConfig
from async_opd.models.adapted import linear_layers, mixture
from async_opd.models.model_files import ModelError, ModelFiles


def check_adapters(config: RunConfig, student: ModelFiles | None, found: Findings) -> None:
    """Adds the problems of a run with LoRA. ``student``: its files, if they are complete."""
    lora = config.train.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        message, remedy = "peft, which trains adapters, is not installed", "pip install"
        found.add("train.lora", message, f"{remedy} 'async-opd[lora]'")
    if lora.sync == "adapter" and lora.engine_rank is None:
        message = f"{lora.rank}: engines apply adapters up to rank {ENGINE_RANKS[-1]}"
        found.add("train.lora.rank", message, "lower it, or set train.lora.sync to merged")
    if lora.sync == "adapter" and lora.targets == "all-linear" and student is None:
        message = "adapter: engines are told the names of layers, which are read from local files"
        found.add(
            "train.lora.sync", message, "a local student.model, train.lora.targets, or merged"
        )
    if student is not None:
        try:
            _layers(lora, student, found)
        except ModelError as error:
            found.add("student.model", error.message, error.remedy)


def _layers(lora: LoraConfig, student: ModelFiles, found: Findings) -> None:
    if lora.sync == "adapter" and mixture(student.path):
        message = "adapter: engines would wrap the experts of a mixture for adapters"
        found.add("train.lora.sync", message, "merged")
    names = {name.rpartition(".")[2] for name in linear_layers(student.path)}
    wrong = [] if lora.targets == "all-linear" else sorted(set(lora.targets) - names)
    if wrong:
        message = f"{student.path} has no linear layer {', '.join(wrong)}"
        found.add("train.lora.targets", message, f"all-linear, or some of {_listed(names)}")


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))
