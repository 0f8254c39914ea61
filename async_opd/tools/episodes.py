"""``async_opd check --episodes N``: the first episodes of a run, turn by turn.

the first N rows of data.train ──student's engine, the environment──► episodes ──► their turns
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import uvloop

from async_opd.checks.memory_fit import with_defaults
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import ConfigError
from async_opd.core.printable import indented, on_one_line
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.data.prompts import to_prompt
from async_opd.models.engine_args import Device
from async_opd.models.tokenizer import Text
from async_opd.prepare import Prepared
from async_opd.processes.output import write_stderr
from async_opd.tools.engines import ToolEngines
from async_opd.tools.evaluated_model import evaluation_config

SHOWN = 1000
"""Characters of one part of an episode."""


def play(ready: Prepared, where: str, number: int, redacted: Redactor) -> None:
    """Plays and prints. ConfigError without an environment, StageError of an engine."""
    if ready.config.environment is None:
        message = f"found {number}, but the config has no environment"
        raise ConfigError.of("--episodes", message, "add it, or leave this out", where)
    config = with_defaults(evaluation_config(ready.config, None, None), ready.device)
    evaluation = config.eval.model_copy(update={"replicas": 1})
    config = config.model_copy(update={"eval": evaluation})
    text = Text.of(config)
    rows = islice(chain.from_iterable(ready.inputs.checked), number)
    prompts = [to_prompt(row, text.encode, config.teacher_of, graded=True) for row in rows]
    for rollout in uvloop.run(_played(config, ready.device, text, prompts)):
        for line in _lines(rollout, text, redacted):
            print(indented(line))


async def _played(
    config: RunConfig, device: Device, text: Text, prompts: list[Prompt]
) -> list[Rollout]:
    """An episode of each prompt, sampled as in a run. StageError."""
    rollout = config.rollout
    sampling = SamplingSpec(
        rollout.max_tokens, rollout.temperature, rollout.top_p, 1, rollout.top_k, rollout.min_p
    )
    engines = ToolEngines(device, text.response_ends(), lambda line: write_stderr(indented(line)))
    return await engines.of_student(
        config, "episodes", lambda stage: stage.generate(prompts, sampling), len(prompts)
    )


def _lines(rollout: Rollout, text: Text, redacted: Redactor) -> Iterator[str]:
    facts = rollout.episode
    if facts is None:
        yield f"episode {rollout.uid} could not be played"
        return
    reward = "none" if rollout.reward is None else f"{rollout.reward:g}"
    yield f"episode {rollout.uid}: {facts.turns} turns, end: {facts.end}, reward {reward}"
    calls = f"{facts.calls} calls, {facts.malformed} malformed, {facts.unknown} unknown"
    if rollout.fault is not None:
        yield redacted(f"  {on_one_line(str(rollout.fault))}")
        return
    yield f"  {calls}; {facts.tool_s:.2f} s in the environment, {facts.cut_tokens} tokens cut off"
    ids = rollout.token_ids.tolist()
    for span in rollout.spans:
        part = redacted(on_one_line(text.decode(ids[span.start : span.end], special=True)))
        more = f" … ({len(part)} characters)" if len(part) > SHOWN else ""
        yield f"  {span.origin:<8} {span.end - span.start:>5} tokens  {part[:SHOWN]}{more}"
