"""Checks of what a student can train with: adapters, mixtures, shared rows, images, a cold start.

Of a cold start's data they check the rows, and the answers that are trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from async_opd.checks.data import DataChecks, Rows, checked
from async_opd.checks.room import Room, Tally
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.train import ENGINE_RANKS, LoraConfig
from async_opd.core.errors import Findings, in_words
from async_opd.models.adapted import linear_layers, mixture
from async_opd.models.engine_args import Device
from async_opd.models.model_files import OF_ATTENTION, ModelError, ModelFiles
from async_opd.models.tokenizer import Text, text_settings

REPLAYED = ("qwen3_moe",)
"""``model_type`` of students whose routers can replay (``trainer.student.routing``)."""


ALIBI, RECURRENT = "adds ALiBi in its attention", "passes on a recurrent state"
REASONS = {
    **dict.fromkeys(("bloom", "mpt"), ALIBI),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "recurrent_gemma"), RECURRENT),
    **dict.fromkeys(("jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h"), RECURRENT),
    **dict.fromkeys(("lfm2", "lfm2_moe"), "has convolutions over tokens"),
    "gpt_oss": "has attention sinks, which no kernel for shared rows knows",
}
"""Why ranks cannot share rows, by ``model_type``. The trainer asks every other student when it
starts (``trainer.student.attention_choice``)."""


def check_vlm_student(config: RunConfig, student: ModelFiles | None, found: Findings) -> None:
    """Reports settings that do not go with a VLM student, or need one."""
    if student is None:
        return
    vision = student.config.get("vision_config") is not None
    for problem in _of_vlm(config) if vision else _of_text(config, student):
        found.add(*problem)


def _of_vlm(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Key, message and remedy."""
    train, vlm = config.train, "with a VLM student"
    if train.context_parallel > 1:
        why = "ranks share rows by tokens, and the tokens of an image come from one tower"
        message = f"found {train.context_parallel} {vlm}: {why}"
        yield "train.context_parallel", message, "1"
    if train.compile is True:
        message = f"found true {vlm}: compiled towers were not compared with eager ones"
        yield "train.compile", message, "false"
    if train.lora is not None and train.lora.sync == "adapter":
        message = f"found adapter {vlm}: vLLM's names of its adapted layers were not compared"
        yield "train.lora.sync", message, "merged"
    if train.routing == "replay":
        message = f"found replay {vlm}: an engine's choices for tokens of images were not compared"
        yield "train.routing", message, "own"
    if config.log.replay:
        message = f"found true {vlm}: kept steps have no images, and could not be computed again"
        yield "log.replay", message, "false"


def _of_text(config: RunConfig, student: ModelFiles) -> Iterator[tuple[str, str, str]]:
    if config.train.freeze:
        named = ", ".join(config.train.freeze)
        message = f"found {named}, but {student.path} takes no images: it has no such part"
        yield "train.freeze", message, "remove it"


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


def check_routing(
    config: RunConfig, device: Device, student: ModelFiles | None, found: Findings
) -> None:
    """Adds the problems of routing replay, and of a mixture that is to be compiled.

    ``student``: its files, if they could be read.
    """
    if config.train.compile is True and student is not None and mixture(student.path):
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
        message = "adapter: engines get the names of layers, which are read from local files"
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


KEY = "cold_start.data"


def cold_start_rows(data: DataChecks) -> list[Rows]:
    """Reads ``cold_start.data``, and checks that there is an answer to each row."""
    settings = data.config.cold_start
    if settings is None:
        return []
    read = data.sources("cold_start")
    data.images("cold_start")
    without = data.parts["cold_start" if settings.data else "train"].unanswered
    if settings.answers == "given" and without.count:
        data.found.add(
            KEY,
            f"{without.count} rows have no {data.config.data.answer!r}, the first is "
            f"{without.first}: there is nothing to train on",
            "add the answers, name their field in data.answer, or set cold_start.answers to "
            "teacher",
        )
    if settings.answers == "teacher":
        for source in sorted(data.parts["cold_start"].routes):
            if data.config.teacher_of(source) is None:
                remedy = "add it to the sources of a teacher"
                data.found.add(KEY, f"no teacher answers data source {source!r}", remedy)
    return read


def given_answers(data: DataChecks, sources: Sequence[Rows], room: Room) -> None:
    """Checks that the answers that a cold start trains on can be tokenized and have embeddings."""
    settings = data.config.cold_start
    if settings is None or settings.answers != "given":
        return
    text, foreign = Text.of(data.config), Tally()
    try:
        for row in (row for rows in sources for row in checked(rows)):
            if row.answer is not None:
                room.add_foreign(row, text.plain(row.answer), foreign)
    except Exception as error:  # a tokenizer can raise anything
        message = f"an answer cannot be tokenized: {in_words(error)}"
        data.found.add(KEY, message, "correct the answer")
    for message, remedy in room.foreign_faults("answers", foreign):
        data.found.add(KEY, message, remedy)
