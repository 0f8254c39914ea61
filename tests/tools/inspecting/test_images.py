"""``async_opd inspect`` lists the images of a sample with their sizes and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.report.pages import pictured, write_full_run
from tests.world.cli import Cli


def test_a_sample_lists_its_images_with_size_and_file(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    folder = write_full_run(tmp_path / "run")
    one = pictured(folder, 2)
    lines = cli("inspect", folder, "0:2#0/0").out.splitlines()
    found = [line.rstrip() for line in lines if line.startswith("image")]
    kept = f"<image 320x200>, {one.nbytes} bytes, sha256 {one.sha256}: media/{one.sha256}.png"
    lacking = f"<image 640x480>, 9 bytes, sha256 {'0' * 64}: no thumbnail"
    assert found == [f"image    {kept}", f"image    {lacking}"]
