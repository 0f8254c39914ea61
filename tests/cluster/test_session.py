"""A local Ray cluster in a working directory that is not to be trusted."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from async_opd.cluster.host import Remote
from async_opd.cluster.session import ray_session
from async_opd.core.load import load_config

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.yaml"


class Process:
    """Tells of the process that it is in."""

    async def tell(self) -> tuple[list[str], str, dict[str, str]]:
        return sys.path, os.getcwd(), dict(os.environ)


@dataclass
class Seen:
    folder: Path
    path: list[str]
    directory: str
    environment: dict[str, str]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What an actor finds, started in a folder whose modules say that they ran."""
    config = load_config(EXAMPLE)
    folder = tmp_path_factory.mktemp("downloaded")
    for name in ("pydantic", "numpy", "aiohttp", "psutil", "async_opd"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")

    async def told() -> tuple[list[str], str, dict[str, str]]:
        async with ray_session(config):
            remote = Remote.create("process", timeout_s=60)
            await remote.build(f"{__name__}:Process", (), 60)
            found: tuple[list[str], str, dict[str, str]] = await remote.call("tell")
            return found

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setattr(sys, "path", [path for path in sys.path if path])
        return Seen(folder, *asyncio.run(told()))


def test_an_actor_imports_nothing_from_the_working_directory(seen: Seen) -> None:
    assert str(seen.folder) not in map(os.path.realpath, seen.path)
    assert not (seen.folder / "ran").exists()


def test_an_actor_works_in_the_working_directory(seen: Seen) -> None:
    assert seen.directory == str(seen.folder)


def test_an_actors_children_import_nothing_from_the_working_directory(seen: Seen) -> None:
    assert seen.environment["PYTHONSAFEPATH"] == "1"
