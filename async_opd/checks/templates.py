"""Checks of chat templates: that prompts can be rendered for each role, and turns for episodes."""

from __future__ import annotations

from collections.abc import Mapping

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.section import Rendering
from async_opd.config.sections.teachers import Teacher
from async_opd.core.errors import Findings
from async_opd.models.chat_template import RESERVED, ChatTemplate
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.models.turns import History, Turns


def check_templates(config: RunConfig, files: Mapping[str, ModelFiles], found: Findings) -> bool:
    """Whether prompts can be rendered; adds the problems if not. ``files``: models by key."""
    if "student.model" not in files:
        return True  # its tokenizer is missing too, which is reported
    count, text = len(found.problems), Text.of(config)
    _template(config, "student", config.student, text.chat, found)
    if len(found.problems) > count:
        return False
    for name, teacher in config.teachers.items():
        key = f"teachers.{name}"
        if not teacher.renders:
            continue
        if teacher.own_template and f"{key}.model" not in files:
            _without_model(key, teacher, found)
            continue
        before = len(found.problems)
        _template(config, key, teacher, text.chat_of_teacher(config, name), found)
        if len(found.problems) == before:
            _ending(config, name, text, found)
    good = len(found.problems) == count
    if good and (environment := config.environment) is not None:
        check_turns(config, environment.history, environment.has_tools, found)
    return good


def _without_model(key: str, teacher: Teacher, found: Findings) -> None:
    if getattr(teacher, "model", None) is None:
        message = "found true, but the teacher names no separate model with a chat template"
        remedy = f"set {key}.model, or give it a chat_template_file"
        found.add(f"{key}.own_template", message, remedy)
    else:
        found.notes.append(f"{key}: its chat template is not on this machine and is not checked")


def _template(
    config: RunConfig, key: str, section: Rendering, chat: ChatTemplate, found: Findings
) -> None:
    """Checks that a section's settings have a template that takes them."""
    given = [name for name in Rendering.model_fields if getattr(section, name) is not None]
    given += ["own_template"] * bool(getattr(section, "own_template", False))
    if not given:
        return
    named = f"{key}.{given[0]}"
    try:
        variables = chat.variables if chat.text is not None else None
    except (OSError, ValueError) as error:
        found.add(named, f"{chat.place} cannot be read: {error}", "check the file")
        return
    if variables is None or config.data.chat_template == "never":
        why = "data.chat_template is never" if variables is not None else f"{chat.folder} has none"
        message = f"found {getattr(section, given[0])!r}, but prompts have no chat template: {why}"
        found.add(named, message, f"remove it, or set {key}.chat_template_file")
        return
    for name in chat.values:
        if name in RESERVED:
            message = f"found {name}, which the run sets itself"
            found.add(f"{key}.chat_template_kwargs", message, "remove it")
        elif name not in variables:
            message = f"found {name}, which {chat.place} does not read: it would have no effect"
            known = ", ".join(sorted(variables & {"tools", "documents", *_settings(variables)}))
            remedy = f"it reads {known}" if known else "remove it"
            found.add(f"{key}.chat_template_kwargs", message, remedy)


def _settings(variables: frozenset[str]) -> set[str]:
    """Names that look like settings of a template: they are in two words."""
    return {name for name in variables if "_" in name} - {*RESERVED, "raise_exception"}


def _ending(config: RunConfig, name: str, text: Text, found: Findings) -> None:
    """Checks that responses follow the teacher's prompt as they follow the student's."""
    try:
        text.of_teacher(config, name)
    except (OSError, ValueError) as error:
        remedy = (
            "give both the same enable_thinking in chat_template_kwargs, or set "
            f"teachers.{name}.response_prefix"
        )
        found.add(f"teachers.{name}", str(error), remedy)


def check_turns(config: RunConfig, history: History, tools: bool, found: Findings) -> None:
    """Notes what each role's template does with turns, and adds why episodes cannot have it.

    ``history``: the key of the config's environment; ``tools``: the environment has tools. To be
    called for a config whose templates ``check_templates`` found good.
    """
    text = Text.of(config)
    fault = Turns(text, history).fault(tools)
    if fault is not None:
        found.add("environment", *fault)
    rendering = (name for name, teacher in config.teachers.items() if teacher.renders)
    roles = {f"teachers.{name}": text.of_teacher(config, name) for name in rendering}
    for role, one in {"student": text, **roles}.items() if text.chats else ():
        does = "; ".join(f"{name}: {case}" for name, case in Turns(one).cases(tools).items())
        found.notes.append(f"{role}: earlier tokens when turns follow, by its template: {does}")
