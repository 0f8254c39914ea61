"""Paths of the hub's local cache, and the ids that they are of."""

from __future__ import annotations

import pytest

from async_opd.models.json_files import hub_id


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/c/models--Qwen--Qwen3-8B/snapshots/0f1e", ("Qwen/Qwen3-8B", "0f1e")),
        ("/c/models--gpt2/snapshots/0f1e/model.safetensors", ("gpt2", "0f1e")),
        ("/c/datasets--openai--gsm8k/snapshots/main/a.parquet", ("openai/gsm8k", "main")),
        ("/home/me/models--x", None),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_a_snapshot_is_named_by_its_id_and_revision(
    path: str, found: tuple[str, str] | None
) -> None:
    assert hub_id(path) == found
