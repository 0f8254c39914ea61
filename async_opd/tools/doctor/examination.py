"""All that the doctor examines without an engine, topic by topic.

Problems and notes of preflight come first into the topics that their keys belong to. A topic that
cannot be examined because of them says so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from async_opd.checks.memory_fit import with_defaults
from async_opd.checks.preflight import Inputs
from async_opd.checks.resources import gpu_count, resolve_device
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.row import Row
from async_opd.data.hub import with_cached_data
from async_opd.models.hub import named_models, with_cached, without_code
from async_opd.models.model_files import ModelError, ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.prepare import Prepared, check_inputs
from async_opd.tools.doctor.environment import environment
from async_opd.tools.doctor.finding import Finding
from async_opd.tools.doctor.machine import devices, disk, memory, network, wandb_login
from async_opd.tools.doctor.prompts import RenderedPrompt, lengths, rendered, sampled
from async_opd.tools.doctor.templates import templates, vocabularies

Servers = Callable[[RunConfig, str], list[Problem]]
"""Finds the problems of teachers' servers."""
ORDER = (
    *("config", "environment", "devices", "models", "vocabulary", "templates", "data", "prompts"),
    *("lengths", "teachers", "memory", "network", "disk", "wandb", "engines"),
)
TOPIC_OF_KEY = {
    r".*(template|system_prompt|response_prefix)": "templates",
    r"student|teachers\..*\.(model|revision|trust_remote_code|processor_kwargs)": "models",
    r"data|eval|reward|cold_start|grading": "data",
    r"cluster|.*\.(placement|replicas|tensor_parallel)$": "devices",
    r"(rollout|train)$": "memory",
    r"teachers": "teachers",
    r"log": "wandb",
}
"""Expressions for the beginning of a config's key; ``config`` where none matches."""


@dataclass
class Examination:
    """The findings, and the sampled prompts as the models read them."""

    findings: list[Finding] = field(default_factory=list)
    prompts: list[RenderedPrompt] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether nothing was found that keeps a run from working."""
        return all(one.status != "error" for one in self.findings)

    def add(self, topic: str, examine: Callable[[], Iterable[Finding]]) -> None:
        """Adds what a topic finds; a topic that fails becomes an error, the others go on."""
        try:
            self.findings.extend(examine())
        except ConfigError as error:
            self.findings.extend(map(of_problem, error.problems))
        except Exception as error:  # a user's template, tokenizer or driver can raise anything
            found = f"cannot be examined: {type(error).__name__}: {error}"
            remedy = "if no other line names the cause, report it with this text"
            self.findings.append(Finding(topic, "error", found, remedy))

    def sort(self) -> None:
        """Brings the findings of a topic together, in ``ORDER``."""
        self.findings.sort(key=lambda one: ORDER.index(one.topic))


def of_problem(problem: Problem) -> Finding:
    """A problem of the input as an error of its key's topic."""
    key = problem.key
    topics = (topic for form, topic in TOPIC_OF_KEY.items() if re.match(form, key))
    place = f"{key}: " if key else f"{problem.where}: "
    return Finding(next(topics, "config"), "error", place + problem.message, problem.remedy)


def examine(
    config: RunConfig,
    where: str,
    count: int,
    environment: Callable[[], Iterable[Finding]] = environment,
    endpoints: Servers | None = None,
) -> Examination:
    """Examines a config that could be loaded, on this machine. ``count``: prompts to show.

    ``endpoints`` finds the problems of teachers' servers; by default it asks them.
    """
    found = Examination()
    found.add("environment", environment)
    try:
        gpus = gpu_count()
    except ConfigError as error:  # the driver does not answer
        found.findings += map(of_problem, error.problems)
        return found
    ready = Prepared(config, Inputs(), resolve_device(config, gpus))

    def checked() -> Iterator[Finding]:
        nonlocal ready
        ready = check_inputs(config, where, gpus=gpus)
        yield from map(of_problem, ready.inputs.problems)
        yield from (Finding(_topic_of_note(note), "warning", note) for note in ready.inputs.notes)

    found.add("config", checked)
    local, _ = with_cached_data(with_cached(without_code(config), [])[0], where, [])
    device = ready.device
    set_up = with_defaults(local, device)
    found.add("devices", lambda: devices(set_up, device, gpus))
    found.add("memory", lambda: memory(set_up, device, gpus))
    found.add("network", lambda: network(set_up, device))
    found.add("disk", lambda: disk(set_up))
    found.add("wandb", lambda: wandb_login(set_up))
    _read(set_up, ready.inputs, count, found)
    found.add("teachers", lambda: _servers(set_up, where, endpoints))
    _without_fault(config, found)
    found.sort()
    return found


def _topic_of_note(note: str) -> str:
    return of_problem(Problem("", note.partition(":")[0], "", "")).topic


def _read(config: RunConfig, inputs: Inputs, count: int, found: Examination) -> None:
    """Adds what needs the student's tokenizer, and the prompts."""
    files = _files(config)
    if "student.model" not in files:
        message = "not examined: the student's files are not on this machine, or cannot be read"
        remedy = "download the model, or see the errors above"
        found.findings.append(Finding("vocabulary", "warning", message, remedy))
        return
    text, rows = Text.of(config), list[Row]()
    rows += sampled(config, inputs.checked, count)
    found.add("vocabulary", lambda: vocabularies(files, text))
    each = sampled(config, inputs.checked, len({r.data_source for s in inputs.checked for r in s}))
    found.add("templates", lambda: templates(config, files, text, each))

    def show() -> Iterator[Finding]:
        found.prompts += rendered(config, text, rows)
        yield Finding("prompts", "ok", f"{len(rows)} of the training prompts are shown below")

    found.add("prompts", show)
    found.add("lengths", lambda: lengths(config, text, inputs))


def _files(config: RunConfig) -> dict[str, ModelFiles]:
    """The files of the models on this machine; unreadable ones are problems already."""
    files: dict[str, ModelFiles] = {}
    for named in named_models(config):
        try:
            read = ModelFiles.read(named.model, weights=False)
        except ModelError:
            continue
        files |= {} if read is None else {f"{named.key}.model": read}
    return files


def _servers(config: RunConfig, where: str, endpoints: Servers | None) -> Iterator[Finding]:
    """Whether the teachers' servers answer, serve the model, and have the student's tokens.

    Of those that need a key the notes of preflight say that they are not asked.
    """
    urls = {
        name: teacher.urls
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EndpointTeacher) and teacher.api_key_env is None
    }
    if not urls:
        return
    from teachers.endpoint.check import check_endpoints

    problems = (endpoints or partial(check_endpoints, keys=False))(config, where)
    yield from map(of_problem, problems)
    wrong = {problem.key for problem in problems}
    for name, own in urls.items():
        if f"teachers.{name}" not in wrong:
            message = f"teachers.{name}: {len(own)} servers answer with the student's tokens"
            yield Finding("teachers", "ok", message)


def _without_fault(config: RunConfig, found: Examination) -> None:
    """A line for those parts of preflight that found nothing wrong."""
    faulty = {one.topic for one in found.findings if one.status == "error"}
    passed = {
        "config": "all keys are valid",
        "models": f"the student's and {len(config.teachers)} teachers' files, heads and positions",
        "data": "sources and graders were found, and each source that can be read has a teacher",
    }
    for topic, text in passed.items():
        if topic not in faulty:
            found.findings.append(Finding(topic, "ok", text))
