"""What a user calls the place of an error."""

from __future__ import annotations

import pytest

from async_opd.config.keys import default_of, key_of, keys_below, keys_called


@pytest.mark.parametrize(
    ("loc", "key"),
    [
        (("loss", "k1", "clamp"), "loss.clamp"),
        (("loss", "k3", "clamp"), "loss.clamp"),
        (("data", "train", 0, "file", "pth"), "data.train.0.pth"),
        (("data", "train", 0, "file", "file"), "data.train.0.file"),
        (("teachers", "file", "modle"), "teachers.file.modle"),
        (("teachers", 1, "[key]"), "teachers.1"),
        (("async_", "x"), "async.x"),
    ],
)
def test_a_key_has_no_tags(loc: tuple[int | str, ...], key: str) -> None:
    assert key_of(loc) == key


def test_the_keys_of_a_named_teacher_are_known() -> None:
    assert "tensor_parallel" in keys_below("teachers.math")


def test_nothing_lies_below_a_plain_value() -> None:
    assert keys_below("train.lr") == []


def test_a_key_is_found_in_other_sections() -> None:
    assert keys_called("batch_size") == ["train.batch_size"]


def test_a_section_is_no_default_to_show() -> None:
    assert default_of("rollout") is None


def test_the_default_of_a_plain_key_is_known() -> None:
    assert default_of("async.sync_steps") == 4
