"""``async_opd dashboard``: validated by wandb's library, saved on a loopback server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import AsyncOPDError
from async_opd.observability.metric_catalogue import panels
from async_opd.tools import dashboard as made
from tests.world.config import run_config

pytestmark = pytest.mark.slow

pytest.importorskip("wandb_workspaces")


def config() -> RunConfig:
    return run_config(teachers={"sort": {"model": "teacher"}}, log={"project": "our-project"})


def test_the_librarys_own_model_accepts_the_json_and_has_every_panel() -> None:
    from wandb_workspaces.workspaces.internal import WorkspaceViewspec

    text = made.spec(made.workspace("e", "p"))
    sections = WorkspaceViewspec.model_validate_json(text).section.panel_bank_config.sections
    shown = {one.name: [panel.config.chart_title for panel in one.panels] for one in sections}
    assert [title for own in shown.values() for title in own] == [one.title for one in panels()]
    assert {name for name, own in shown.items() if own} == {one.section for one in panels()}


def test_panels_of_names_select_metrics_by_expression_and_have_their_axis() -> None:
    sections = json.loads(made.spec(made.workspace("e", "p")))["section"]["panelBankConfig"]
    configs = {
        panel["config"]["chartTitle"]: panel["config"]
        for section in sections["sections"]
        for panel in section["panels"]
    }
    assert configs["Gap to the teacher"]["metricRegex"] == "^(teacher/.+/gap)$"
    assert configs["Duration of syncs"]["xAxis"] == "sync/version"
    assert configs["Loss"]["metrics"] == ["loss/total", "loss/distillation"]
    assert configs["Loss"]["xAxis"] == "step"


def test_without_the_library_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(made, "find_spec", lambda name: None)
    with pytest.raises(AsyncOPDError, match=r"pip install 'async-opd\[dashboard\]'"):
        made.workspace("e", "p")


def _write_config(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(dump_config(config()))


async def dashboard(run_dir: Path, *options: str, **environment: str) -> tuple[int, str]:
    """The command in a process of its own; exit code and output."""
    _write_config(run_dir)
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    own = {"HOME": str(run_dir), "NETRC": str(run_dir / "netrc"), **environment}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "async_opd", "dashboard", str(run_dir), *options),
        env=kept | own,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, output.decode()


async def test_without_a_login_the_json_is_written_and_the_command_printed(tmp_path: Path) -> None:
    code, output = await dashboard(tmp_path / "run", WANDB_MODE="offline")
    assert code == 0, output
    assert f"wandb login && async_opd dashboard {tmp_path / 'run'}" in output
    assert json.loads((tmp_path / "run" / "dashboard.json").read_text())["section"]


def test_the_printed_command_names_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    told = made.save(config(), tmp_path, "team", "my run.yaml")
    assert told.endswith(
        "wandb login && async_opd dashboard 'my run.yaml' --project our-project --entity team"
    )


@pytest.fixture
async def server() -> Any:
    """What of wandb's GraphQL a login and a saved view need; keeps the requests."""
    asked: list[dict[str, Any]] = []

    async def graphql(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        return web.json_response({"data": _answer(body["query"], body.get("variables") or {})})

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/graphql", graphql)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield f"http://127.0.0.1:{port}", asked
    await runner.cleanup()


def _answer(query: str, variables: Mapping[str, Any]) -> dict[str, Any]:
    if "upsertView" in query:
        return {"upsertView": {"view": {"id": "V1", "name": variables["name"]}, "inserted": True}}
    viewer = {"id": "U1", "entity": "our-team", "username": "me", "admin": False}
    empty: dict[str, Any] = {"edges": []}
    viewer |= {"flags": "{}", "email": "", "name": "me", "teams": empty, "apiKeys": empty}
    return {"viewer": viewer, "serverInfo": {"cliVersionInfo": {}}}


async def test_with_a_login_the_workspace_is_saved_on_the_server(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, asked = server
    code, output = await dashboard(
        *(tmp_path / "run", "--project", "our-project"), WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40
    )
    assert code == 0, output
    (saved,) = [one["variables"] for one in asked if "upsertView" in one["query"]]
    assert (saved["entityName"], saved["projectName"]) == ("our-team", "our-project")
    assert saved["displayName"] == made.NAME
    titles = [panel.title for panel in panels()]
    assert [title for title in titles if f'"{title}"' in saved["spec"]] == titles
    assert "the dashboard is saved: http" in output


async def test_a_run_directory_does_not_choose_a_project_of_the_users_account(
    server: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, asked = server
    code, output = await dashboard(tmp_path / "run", WANDB_BASE_URL=url, WANDB_API_KEY="k" * 40)
    assert code == 2
    assert "--project our-project" in output
    assert not [one for one in asked if "upsertView" in one["query"]]
