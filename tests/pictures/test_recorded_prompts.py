"""Prompts whose samples are recorded leave their images' thumbnails; others do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from async_opd.core.row import Row
from async_opd.core.samples import Prompt
from async_opd.core.uid import Uid
from async_opd.data.prompts import PromptStream
from async_opd.pictures import MEDIA, RecordedPrompts, Thumbnails
from tests.data.pictures import picture
from tests.pictures.test_folder import media

COLORS = ("red", "green", "blue", "black")


def stream() -> PromptStream:
    """Four prompts with an image each, and one without."""
    rows = []
    for number, color in enumerate(COLORS):
        encoded = picture(color=color)
        one = media(encoded)
        row = Row(f"0:{number}", "a", "x", None, {})
        rows.append(replace(row, images=(one,), encoded={one.sha256: encoded}))
    rows.append(Row("0:4", "a", "x", None, {}))
    return PromptStream([rows], [1.0], lambda _: [1], lambda s: s, seed=0, shuffle=False)


def recorded(kept: Thumbnails, share: float, notes: list[str] | None = None) -> RecordedPrompts:
    said = [] if notes is None else notes
    return RecordedPrompts(
        stream(), kept, seed=0, share=share, n=2, notify=lambda text, level: said.append(text)
    )


@pytest.mark.parametrize(("share", "count"), [(1.0, 4), (0.0, 0)])
def test_only_recorded_samples_have_thumbnails(tmp_path: Path, share: float, count: int) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    prompts = recorded(kept, share)
    found = prompts.next(5)
    assert [one.uid for one in found if isinstance(one, Prompt)] == [f"0:{i}#0" for i in range(5)]
    assert kept.close(30)
    assert len(list((tmp_path / MEDIA).glob("*.png"))) == count
    assert prompts.metrics.get("media/thumbnails", 0.0) == count


def test_a_prompt_that_is_found_again_leaves_its_thumbnail_too(tmp_path: Path) -> None:
    kept = Thumbnails(tmp_path / MEDIA, 1 << 20)
    recorded(kept, 1.0).find(Uid("0:1#0"))
    assert kept.close(30)
    (path,) = (tmp_path / MEDIA).iterdir()
    assert path.stem == media(picture(color="green")).sha256


def test_the_reason_of_an_image_without_thumbnail_is_a_message(tmp_path: Path) -> None:
    kept, notes = Thumbnails(tmp_path / MEDIA, 0), list[str]()
    prompts = recorded(kept, 1.0, notes)
    prompts.next(4)
    assert kept.close(30)
    assert prompts.metrics["media/left_out"] == 4
    (note,) = notes
    assert "log.thumbnails_mib is full" in note
