"""``async_opd dashboard``: a wandb workspace, validated by ``wandb_workspaces``, then saved.

metrics.yaml ──► Workspace ──logged in──► save ──► its URL
                     └──not logged in──► dashboard.json, and the command that saves it
"""

from __future__ import annotations

import argparse
import os
import shlex
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import AsyncOPDError, ConfigError
from async_opd.core.printable import indented
from async_opd.files.absent import refuse_absent
from async_opd.files.foreign import foreign
from async_opd.files.safe_open import write_atomically
from async_opd.observability.metric_catalogue import STEP, Panel, panels
from async_opd.observability.wandb_sink import own_mode

if TYPE_CHECKING:
    from wandb_workspaces.reports.v2 import LinePlot
    from wandb_workspaces.workspaces import Workspace

NAME = "async_opd"
JSON = "dashboard.json"


def add_dashboard(parser: argparse.ArgumentParser) -> None:
    """Saves a wandb workspace for the runs of a project.

    Its sections are Learning, Staleness, Throughput, Teachers, Weight sync and Health;
    docs/dashboards.md says what each panel shows. Without a login it writes dashboard.json and
    prints the command that saves it. With a login a RUN_DIR, whose config may be of somebody else,
    needs --project.

      async_opd dashboard runs/quickstart --project my-project
      async_opd dashboard config.yaml --entity my-team
    """
    parser.add_argument("path", metavar="RUN_DIR|CONFIG", help="run directory or YAML file")
    what = "wandb project (default: log.project of the config)"
    parser.add_argument("--project", metavar="P", help=what)
    parser.add_argument("--entity", metavar="E", help="wandb user or team (default: your own)")
    parser.set_defaults(command=_dashboard)


def _dashboard(given: argparse.Namespace) -> int:
    path = Path(given.path)
    refuse_absent(path, "RUN_DIR|CONFIG")
    of_run = path.is_dir()
    folder = path if of_run else Path()
    config = load_config(foreign(path) / "config.yaml" if of_run else path, recorded=of_run)
    if given.project:
        config = config.model_copy(
            update={"log": config.log.model_copy(update={"project": given.project})}
        )
    elif of_run and own_mode() == "online":  # its author may be somebody else
        message = f"found {config.log.project!r}, named by {path}: a project in your own account"
        remedy = f"if it is the right one: --project {shlex.quote(config.log.project)}"
        raise ConfigError.of("--project", message, remedy)
    print(indented(save(config, folder, given.entity, given.path)))
    return 0


def workspace(entity: str, project: str, name: str = NAME) -> Workspace:
    """The workspace, not saved. AsyncOPDError if ``wandb_workspaces`` is not installed."""
    if find_spec("wandb_workspaces") is None:
        raise AsyncOPDError(
            "wandb-workspaces, which makes dashboards, is not installed: "
            "pip install 'async-opd[dashboard]'"
        )
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=section, panels=[_line_plot(one) for one in own], is_open=True)
        for section, own in groupby(panels(), key=lambda panel: panel.section)
    ]
    settings = ws.WorkspaceSettings(x_axis=STEP)
    return ws.Workspace(
        entity=entity, project=project, name=name, sections=sections, settings=settings
    )


def _line_plot(panel: Panel) -> LinePlot:
    from wandb_workspaces.reports.v2 import LinePlot

    keys = {"metric_regex": panel.regex} if panel.regex else {"y": list(panel.keys)}
    return LinePlot(title=panel.title, x=panel.x, **keys)


def spec(made: Workspace) -> str:
    """The workspace as the JSON that wandb's server is sent."""
    return str(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))


def save(config: RunConfig, folder: Path, entity: str | None = None, given: str = "") -> str:
    """Saves the workspace of a config's project; returns the message for the user.

    Without login it is only written to ``folder``, and the message has the command that saves it;
    that names ``given`` (default: the folder). AsyncOPDError if wandb refuses it or does not
    answer, after the JSON was written.
    """
    project, path = config.log.project, folder / JSON
    online = own_mode() == "online"
    named = f" --project {shlex.quote(project)}" + (f" --entity {entity}" if entity else "")
    entity = entity or os.environ.get("WANDB_ENTITY") or (_default_entity() if online else "entity")
    made = workspace(entity, project)
    write_atomically(path, spec(made) + "\n", durable=False)
    if not online:
        return (
            f"the dashboard is in {path}; wandb has no login here. This saves it in your account:\n"
            f"  wandb login && async_opd dashboard {shlex.quote(given or str(folder))}{named}"
        )
    try:
        return f"the dashboard is saved: {made.save().url}"
    except Exception as error:  # of wandb's client: of several packages, and with no common base
        raise AsyncOPDError(
            f"wandb did not save the dashboard in {entity}/{project}: {error}; its JSON is in "
            f"{path}; see WANDB_BASE_URL, and whether the project is there (a run makes it)"
        ) from error


def _default_entity() -> str:
    import wandb

    try:
        found = wandb.Api().default_entity
    except Exception as error:  # no common base either
        raise AsyncOPDError(f"wandb does not name your account: {error}; give --entity") from error
    if not found:
        raise AsyncOPDError("wandb names no default entity of this login: give --entity")
    return str(found)
