"""Tokenizers of student and teachers: chat templates, vocabularies, special tokens and end tokens.

A teacher's prompts are compared with the student's, token by token. A teacher reads the student's
prompt unless its section says otherwise. If the template beside its weights would give other
tokens, it scores responses after prompts that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from async_opd.config.run_config import RunConfig
from async_opd.core.row import Row
from async_opd.data.teacher_prompts import Difference, first_difference, prompts_as_read
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.tools.doctor.finding import Finding

TOPIC = "templates"


def templates(
    config: RunConfig, files: Mapping[str, ModelFiles], text: Text, rows: Sequence[Row]
) -> Iterator[Finding]:
    """A line for the student, and one for each teacher with a row among ``rows``."""
    applied = text.template is not None and config.data.chat_template != "never"
    what = text.chat.place if applied else "none: prompts are text as it stands in the data"
    yield Finding(TOPIC, "ok", f"student: {what}")
    for name in config.teachers:
        row = next((one for one in rows if config.teacher_of(one.data_source) == name), None)
        if row is None:
            remedy = f"give it data, or remove it: see teachers.{name}.sources"
            yield Finding(TOPIC, "warning", f"teachers.{name}: no prompt of its sources", remedy)
            continue
        yield _as_configured(config, name, text, row)
        if has_unused_template(config, files, name):
            yield _as_trained(config, name, text, row)


def _as_configured(config: RunConfig, name: str, text: Text, row: Row) -> Finding:
    """Whether the teacher reads the student's prompt, as its section says."""
    found = first_difference(*prompts_as_read(config, text, row))
    if found is None:
        return Finding(TOPIC, "ok", f"teachers.{name}: reads the student's prompts")
    message = f"teachers.{name}: reads another prompt, as its section says: {_difference(found)}"
    if found.end:
        return Finding(TOPIC, "ok", message)
    remedy = f"the response follows other tokens: see teachers.{name}.response_prefix"
    return Finding(TOPIC, "warning", message, remedy)


def has_unused_template(config: RunConfig, files: Mapping[str, ModelFiles], name: str) -> bool:
    """Whether a template lies beside the teacher's weights that the run does not use.

    ``files``: those of the models by config key.
    """
    own = files.get(f"teachers.{name}.model")
    if own is None or config.teachers[name].own_template or config.data.chat_template == "never":
        return False
    asked = {"teachers": {name: config.teachers[name].model_copy(update={"own_template": True})}}
    return Text.of(config).chat_of_teacher(config.model_copy(update=asked), name).text is not None


def _as_trained(config: RunConfig, name: str, text: Text, row: Row) -> Finding:
    """Whether the template beside the teacher's weights would give it another prompt."""
    teacher = config.teachers[name].model_copy(update={"own_template": True})
    asked = config.model_copy(update={"teachers": {**config.teachers, name: teacher}})
    remedy = (
        f"set teachers.{name}.own_template to true if it was trained with that template: after "
        "other prompts it may teach worse than it can"
    )
    try:
        own = prompts_as_read(asked, text, row)[1]
    except ValueError as error:
        message = f"teachers.{name}: the template beside its weights refuses the prompt: {error}"
        return Finding(TOPIC, "warning", message, remedy)
    found = first_difference(prompts_as_read(config, text, row)[1], own)
    if found is None:
        return Finding(TOPIC, "ok", f"teachers.{name}: its own template gives the same tokens")
    message = (
        f"teachers.{name}: its own template gives other tokens: {_difference(found, 'the run has')}"
    )
    return Finding(TOPIC, "warning", message, remedy)


def _difference(found: Difference, first: str = "the student has") -> str:
    """The first difference in words."""
    one, other = ("no more token" if p is None else repr(p) for p in (found.student, found.teacher))
    return f"from token {found.at + 1} on {first} {one}, it has {other}; equal end: {found.end}"


VOCABULARY = "vocabulary"


def vocabularies(files: Mapping[str, ModelFiles], text: Text) -> Iterator[Finding]:
    """A line for each model. ``files``: by config key; ``text``: the student's tokenizer."""
    student = files["student.model"]
    for key, own in files.items():
        rows = "unknown" if own.vocabulary is None else str(own.vocabulary)
        ends = _named(text, own.eos)
        found = f"{key}: {own.tokens} tokens, {rows} embeddings, a response ends with {ends}"
        if key != "student.model" and own.same_tokenizer(student):
            found += ", the student's token ids"
        yield Finding(VOCABULARY, "ok", found)
    yield Finding(VOCABULARY, "ok", f"special tokens: {_listed(student)}")
    turn, own_ends = text.turn_end(), text.response_ends()
    if turn is not None and turn not in student.eos:
        named = _named(text, (turn,))
        message = f"the template ends a turn with {named}, which generation_config.json lacks"
        remedy = "add it to the eos_token_id there; the run ends responses with it in any case"
        yield Finding(VOCABULARY, "warning", message, remedy)
    yield Finding(VOCABULARY, "ok", f"rollouts end with {_named(text, own_ends)}")


def _named(text: Text, ids: tuple[int, ...]) -> str:
    """Tokens with their ids."""
    pieces = text.pieces(ids)
    return ", ".join(f"{piece!r} ({one})" for one, piece in zip(ids, pieces, strict=True)) or "none"


def _listed(student: ModelFiles, most: int = 8) -> str:
    added = student.tokenizer.get("added_tokens") or []
    names = [repr(one["content"]) for one in added if one.get("special")]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
