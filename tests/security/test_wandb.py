"""wandb in folders of strangers: the receiver of the user's key, and code beside the run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.security.repositories import repository_with_code

pytestmark = pytest.mark.slow

KEY = "f" * 40
START = """
import os, sys
from pathlib import Path
from async_opd.observability import wandb_sink
from tests.observability.test_wandb_sink import config
wanted = config()
log = wanted.log.model_copy(update={"wandb": sys.argv[1]})
sink = wandb_sink.WandbSink(wanted.model_copy(update={"log": log}), Path(sys.argv[2]))
modes = []
opened = sink._open
sink._open = lambda mode: (modes.append(mode), opened(mode))
try:
    sink.start()
except Exception as error:  # nobody lets it in
    print(type(error).__name__, error)
print("modes", *modes, flush=True)
os._exit(0)
"""


@contextmanager
def server() -> Iterator[tuple[str, list[str | None]]]:
    """Its address, and the credentials that it was shown; it lets nobody in."""
    shown: list[str | None] = []

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            shown.append(self.headers.get("Authorization"))
            self.send_response(401)
            self.end_headers()

        do_GET = do_POST  # noqa: N815 - their names

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", shown
        listening.shutdown()


def started(tmp_path: Path, folder: str, wanted: str, said: str, **environment: str) -> str:
    """The output of a process with wandb where ``folder``/settings has the lines ``said``."""
    work = tmp_path / "work"
    (work / folder).mkdir(parents=True)
    (work / folder / "settings").write_text(f"[default]\n{said}\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB") and k != "NETRC"}
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path), **environment}
    done = subprocess.run(
        [sys.executable, "-c", START, wanted, str(tmp_path / "run")],
        cwd=work,
        env=kept,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout


def own_file(tmp_path: Path, address: str) -> None:
    """The user's own settings, as ``wandb login --host`` writes them."""
    folder = tmp_path / ".config" / "wandb"
    folder.mkdir(parents=True)
    (folder / "settings").write_text(f"[default]\nbase_url = {address}\n")


@pytest.mark.parametrize("wanted", ["auto", "online"])
@pytest.mark.parametrize("folder", ["wandb", ".wandb"])
def test_the_working_directory_does_not_choose_the_receiver_of_the_key(
    tmp_path: Path, folder: str, wanted: str
) -> None:
    with server() as (theirs, their_requests), server() as (mine, my_requests):
        own_file(tmp_path, mine)
        said = started(tmp_path, folder, wanted, f"base_url = {theirs}", WANDB_API_KEY=KEY)
    assert "modes online" in said
    assert their_requests == []
    assert any(my_requests), said


def test_the_working_directory_does_not_say_that_a_run_is_online(tmp_path: Path) -> None:
    with server() as (theirs, their_requests):
        said = started(tmp_path, "wandb", "auto", f"base_url = {theirs}\napi_key = {'a' * 40}")
    assert "modes offline" in said
    assert their_requests == []


def test_a_config_folder_of_the_environment_may_be_named_from_here(tmp_path: Path) -> None:
    with server() as (mine, _):
        said = started(
            tmp_path, "folder", "auto", f"base_url = {mine}\nmode = offline",
            WANDB_API_KEY=KEY, WANDB_CONFIG_DIR="folder",
        )  # fmt: skip
    assert "modes offline" in said


LOG = """
import sys
from pathlib import Path
from async_opd.observability.sinks import Summary
from async_opd.observability.wandb_sink import WandbSink
from tests.observability.test_wandb_sink import config
run_dir = Path(sys.argv[1])
sink = WandbSink(config(), run_dir)
sink.start()
sink.log(1, {"loss": 1.0})
sink.close(Summary("completed", None, 1, 1.0, run_dir, {}))
"""


def test_a_repository_around_the_run_directory_runs_no_code(tmp_path: Path) -> None:
    repository, ran = repository_with_code(tmp_path)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    kept |= {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", LOG, str(repository)],
        cwd=repository,
        env=kept | {"WANDB_SAVE_CODE": "true"},
        timeout=120,
        check=True,
    )
    assert list((repository / "wandb").glob("offline-run-*"))
    assert not ran.exists()
