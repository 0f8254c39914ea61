"""A key of another framework in one of our files is answered by our name for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.config.foreign_keys import name_here, table
from async_opd.config.keys import keys_called
from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError
from async_opd.tools.importing.frameworks import FRAMEWORKS

OURS = "student: {model: s}\nteachers: {t: {model: t}}\ndata: {train: t.jsonl}\n"
KEYS = [(name, key, ours) for name, keys in table()["keys"].items() for key, ours in keys.items()]
NEAREST = [
    ("verl", "train_batch_size", "train.batch_size"),
    ("verl", "save_freq", "checkpoint.every_steps"),
    ("verl", "test_freq", "eval.every_steps"),
    ("NeMo-RL", "val_period", "eval.every_steps"),
    ("NeMo-RL", "save_period", "checkpoint.every_steps"),
]
"""A weight version's prompts, which are a batch where a version has one step; and periods in steps,
which ``async_opd import`` writes in versions."""


def of_table(name: str, key: str) -> set[str]:
    """Our keys for the last part of one of theirs in the table of ``async_opd import``."""
    return {
        ours
        for theirs, entry in FRAMEWORKS[name.lower()].table.items()
        if theirs.rpartition(".")[2].rstrip("*") == key
        for ours in entry.ours
    }


def test_every_name_is_one_of_our_keys_and_that_of_the_frameworks_table() -> None:
    wrong = [
        one
        for one in KEYS
        if not any(f"{ours}.".startswith(f"{one[2]}.") for ours in of_table(*one[:2]))
    ]
    assert wrong == NEAREST
    assert [ours for _, _, ours in KEYS if ours not in keys_called(ours.rpartition(".")[2])] == []


def test_no_name_is_one_of_our_own_keys() -> None:
    assert [key for _, key, _ in KEYS if keys_called(key)] == []
    assert [key for key in table()["sections"] if keys_called(key)] == []


def problem(text: str, folder: Path) -> str:
    file = folder / "config.yaml"
    file.write_text(OURS + text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (found,) = caught.value.problems
    return f"{found.message} → {found.remedy}"


def test_an_unknown_key_of_theirs_is_answered_with_ours(tmp_path: Path) -> None:
    assert problem("rollout: {max_response_length: 512}", tmp_path) == (
        "unknown key (value 512): verl's name for rollout.max_tokens → write rollout.max_tokens"
    )


def test_a_section_of_theirs_is_answered_with_the_command(tmp_path: Path) -> None:
    assert problem("actor_rollout_ref: {}", tmp_path) == (
        "is a section of verl → turn the file into a config: async_opd import"
    )


def test_another_unknown_key_has_no_name_here() -> None:
    assert name_here("train.batchsize") is None
