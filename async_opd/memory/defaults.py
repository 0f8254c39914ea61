"""Defaults that follow from the models and the memory of a GPU.

data.max_prompt_tokens, responses ──► engine.max_model_len
peak of a rank's step, GPU        ──► train.gradient_checkpointing
device, kind of student           ──► train.compile
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_opd.config.device_defaults import engine_sizes
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.memory.pools import Machine, bytes_of_a_token, engine_section, step_of
from async_opd.memory.step import peak
from async_opd.models.json_files import read_json
from async_opd.models.model_files import is_vision_model
from async_opd.models.rope import Positions, max_model_len
from async_opd.models.tokenizer import text_settings

NEAR_FULL = 0.85
"""Share of a GPU that a rank's step may plan for by ``gradient_checkpointing: auto``."""


def needed_tokens(config: RunConfig) -> int | None:
    """Tokens of the longest sequence of any engine; None without ``data.max_prompt_tokens``.

    One more than prompt and response: engines sample a token when they score. None with an
    environment, too: how long its tools and messages are is not known.
    """
    if config.environment is not None:
        return None
    longest = max(config.rollout.max_tokens, config.eval.max_tokens or 0)
    prompt = config.data.max_prompt_tokens
    return None if prompt is None else prompt + longest + 1


def with_lengths(config: RunConfig) -> RunConfig:
    """The config with what the run needs as ``max_model_len`` of engines that have none.

    Models keep their own limit whose rotary positions depend on it, and so do teachers that render
    prompts differently, or images, whose lengths are not known.
    """
    needed = needed_tokens(config)

    def sized(engine: EngineConfig, model: str) -> dict[str, EngineConfig]:
        own = Positions.of(_settings(model), None)
        bounded = own.original is not None or own.longest is None
        if needed is None or max_model_len(engine) or bounded or needed >= (own.longest or 0):
            return {"engine": engine}
        return {"engine": engine.model_copy(update={"max_model_len": needed})}

    teachers = {
        name: one.model_copy(update=sized(one.engine, config.teacher_model(name)))
        if isinstance(one, EngineTeacher) and _reads_the_students(config, name)
        else one
        for name, one in config.teachers.items()
    }
    rollout = config.rollout.model_copy(update=sized(config.rollout.engine, config.student.model))
    return config.model_copy(update={"rollout": rollout, "teachers": teachers})


def _reads_the_students(config: RunConfig, name: str) -> bool:
    """Whether a teacher gets the student's prompts, token by token."""
    teacher = config.teachers[name]
    altered = teacher.renders or teacher.prompt_template is not None
    return not (altered or is_vision_model(config.teacher_model(name)))


def with_recomputation(config: RunConfig, machine: Machine, beside: int) -> RunConfig:
    """The config with the least recomputation whose planned peak fits ``NEAR_FULL`` of a GPU.

    ``beside``: bytes of a rank's GPU that are not its step's. Unchanged where the memory is not
    known, and for a student without layers that can be recomputed. ModelError.
    """
    train = config.train
    if train.gradient_checkpointing != "auto" or machine.device == "cpu" or machine.total is None:
        return config
    if not machine.sizes(config.student.model).recomputable:
        return config
    for kind in ("none", "selective", "full"):
        chosen = train.model_copy(update={"gradient_checkpointing": kind})
        made = config.model_copy(update={"train": chosen})
        if sum(peak(step_of(made, machine)).values()) + beside <= NEAR_FULL * machine.total:
            break
    return made


def with_compiled_layers(config: RunConfig, machine: Machine) -> RunConfig:
    """The config with compiled decoder layers on GPUs, by ``train.compile: auto``, or without.

    Without them for a mixture, a VLM student, rows that ranks share and replayed routing:
    such layers were not compared with eager ones, or cannot be one graph. ModelError.
    """
    train = config.train
    if train.compile != "auto":
        return config
    chosen = machine.device == "cuda" and train.context_parallel == 1 and train.routing == "own"
    if chosen:
        student = machine.sizes(config.student.model)
        chosen = not student.experts and student.tower is None and student.recomputable
    return config.model_copy(update={"train": train.model_copy(update={"compile": chosen})})


def cache_bytes(config: RunConfig, name: str, machine: Machine) -> tuple[int, int]:
    """Tokens of the longest sequence of an engine's pool, and bytes of its keys and values.

    On each GPU. Layers with a window keep the window and one engine step at least; those without
    attention keep nothing. 0 tokens if the length is not known.
    """
    pool, model = engine_section(config, name)
    settings = _settings(model)
    tokens = max_model_len(pool.engine) or Positions.of(settings, None).longest or 0
    step = engine_sizes(pool.engine, machine.device).max_num_batched_tokens
    layers = bytes_of_a_token(config, name, machine)
    kept = zip(_kept(settings, len(layers), tokens, step), layers, strict=False)
    return tokens, sum(many * each for many, each in kept)


def _kept(settings: dict[str, Any], layers: int, tokens: int, step: int) -> Iterator[int]:
    """Of each layer the tokens whose keys and values it keeps at least.

    The first ``layers`` have theirs.
    """
    used = settings.get("use_sliding_window", True)  # Qwen's models name one that they do not use
    window = settings.get("sliding_window") if used else None
    within = min(window + step, tokens) if isinstance(window, int) else tokens
    kinds = settings.get("layer_types") or ["sliding_attention"] * layers
    for kind in kinds:
        yield {"full_attention": tokens, "sliding_attention": within}.get(kind, 0)


def _settings(model: str) -> dict[str, Any]:
    """The text settings of a local model's config.json; empty if there is none."""
    return dict(text_settings(read_json(Path(model) / "config.json")))
