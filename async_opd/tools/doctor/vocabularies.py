"""Vocabularies, special tokens and end tokens of the student and the teachers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.tools.doctor.finding import Finding

TOPIC = "vocabulary"


def vocabularies(files: Mapping[str, ModelFiles], text: Text) -> Iterator[Finding]:
    """A line for each model. ``files``: by config key; ``text``: the student's tokenizer."""
    student = files["student.model"]
    for key, own in files.items():
        rows = "unknown" if own.vocabulary is None else str(own.vocabulary)
        ends = _named(text, own.eos)
        found = f"{key}: {own.tokens} tokens, {rows} embeddings, a response ends with {ends}"
        if key != "student.model" and own.same_tokenizer(student):
            found += ", the student's token ids"
        yield Finding(TOPIC, "ok", found)
    yield Finding(TOPIC, "ok", f"special tokens: {_listed(student)}")
    turn, own_ends = text.turn_end(), text.response_ends()
    if turn is not None and turn not in student.eos:
        named = _named(text, (turn,))
        message = f"the template ends a turn with {named}, which generation_config.json lacks"
        remedy = "add it to the eos_token_id there; the run ends responses with it in any case"
        yield Finding(TOPIC, "warning", message, remedy)
    yield Finding(TOPIC, "ok", f"rollouts end with {_named(text, own_ends)}")


def _named(text: Text, ids: tuple[int, ...]) -> str:
    """Tokens with their ids."""
    pieces = text.pieces(ids)
    return ", ".join(f"{piece!r} ({one})" for one, piece in zip(ids, pieces, strict=True)) or "none"


def _listed(student: ModelFiles, most: int = 8) -> str:
    added = student.tokenizer.get("added_tokens") or []
    names = [repr(one["content"]) for one in added if one.get("special")]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more
