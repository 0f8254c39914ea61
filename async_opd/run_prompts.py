"""The prompts of a run: of its training, of its cold start, and the thread that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from async_opd.cold_start import ColdStart
from async_opd.core.samples import NO_TEACHER
from async_opd.data.answers import GivenAnswers
from async_opd.data.hub import files_sized
from async_opd.data.mixture import Mixture, phases_of
from async_opd.data.prompts import PromptStream
from async_opd.data.streamed_rows import StreamedRows
from async_opd.data.teacher_prompts import Reader, teacher_readers
from async_opd.job import Job
from async_opd.models.model_size import ModelSize
from async_opd.models.tokenizer import Text
from async_opd.observability.stall import teachers_s
from async_opd.waiting.reading_thread import ReadingThread


def training_prompts(job: Job, text: Text, readers: Mapping[str, Reader]) -> PromptStream:
    """The prompts of the training, from those on that its start has left."""
    config = job.config
    return PromptStream(
        job.inputs.train,
        Mixture(phases_of(config, job.inputs.train)),
        text.encode,
        config.teacher_of,
        seed=config.seed,
        shuffle=config.data.shuffle,
        cursor=job.start.cut.cursor if job.start else 0,
        graded=config.reward is not None or config.environment is not None,
        limit=job.inputs.max_prompt_tokens,
        readers=readers,
        truncate=config.data.overlong == "truncate_left",
        sized=text.image_tokens,
    )


def reading_of(job: Job) -> ReadingThread:
    """Where the prompts of a run are read."""
    found = {"data.train": job.inputs.train, "cold_start.data": job.inputs.cold_start}
    streamed = {
        f"{key}[{index}]": rows
        for key, sources in found.items()
        for index, rows in enumerate(sources)
        if isinstance(rows, StreamedRows)
    }
    return ReadingThread(
        f"rows of {', '.join(streamed) or 'data.train'}",
        job.config.timeouts.stall_s,
        progress=lambda: files_sized() + sum(rows.rows_read for rows in streamed.values()),
        waits=job.waits,
    )


def cold_start_of(job: Job, text: Text, reading: ReadingThread) -> ColdStart | None:
    """The cold start of a run that begins at its start; None if it has none."""
    config, settings = job.config, job.config.cold_start
    if settings is None or job.start is not None:
        return None
    own = bool(settings.data)
    sources = settings.data if own else config.data.train
    prompts = PromptStream(
        job.inputs.cold_start if own else job.inputs.train,
        [source.weight for source in sources],
        text.encode,
        config.teacher_of if settings.answers == "teacher" else lambda _: NO_TEACHER,
        seed=config.seed,
        shuffle=config.data.shuffle,
        graded=True,
        limit=job.inputs.max_prompt_tokens,
        readers=teacher_readers(config, text) if settings.answers == "teacher" else None,
        truncate=config.data.overlong == "truncate_left",
        sized=text.image_tokens,
    )
    turn, ends = text.turn_end(), text.response_ends()
    return ColdStart(
        settings,
        config.train.batch_size,
        settings.lr or config.train.lr,
        prompts,
        GivenAnswers(text.plain, ends[0] if turn is None else turn, config.rollout.max_tokens),
        ModelSize.read(Path(config.student.model)).vocabulary,
        partial(teachers_s, config),
        job.log,
        reading,
    )
