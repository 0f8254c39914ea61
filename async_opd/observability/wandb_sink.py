"""Metrics to Weights & Biases: online, or into ``run_dir/wandb`` for a later ``wandb sync``.

Answers and generations are tables of text and thumbnails:

evals/step_N.jsonl ──► an evaluation's first answers
microscope/step_N… ──► generations of a step that was trained (``log.microscope``)
"""

from __future__ import annotations

import json
import netrc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import psutil

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import without_secrets
from async_opd.core.distributions import environment
from async_opd.files.foreign import ForeignPath, foreign
from async_opd.files.safe_open import make_folder
from async_opd.microscope import MICROSCOPE, SampleRecord, files, records
from async_opd.observability.logged_run import LoggedRun, is_evaluation
from async_opd.observability.metric_catalogue import EVALUATION_STEP, STEP, VERSION
from async_opd.observability.sinks import LateSink, Summary
from async_opd.processes.background import BackgroundWorker

if TYPE_CHECKING:
    import wandb

Mode = Literal["online", "offline", "disabled"]

LOGIN = "wandb login, or export WANDB_API_KEY; or log.wandb: offline, and wandb sync later"
INIT_TIMEOUT_S = 30.0
SERVICE = "wandb-core"
"""The name of wandb's own process."""
NOT_SENT = "run.log has the message (log.samples is false)"
MAX_ROWS, MAX_ALERTS = 1000, 100
"""Rows that may wait for wandb's own process, and alerts besides."""

Row = tuple[int, dict[str, float]]
EVALUATION_SAMPLES, GENERATIONS = "evaluation/samples", "generations/samples"
"""Keys of the tables of an evaluation's answers, and of generations that were trained."""
AXES = {
    "*": STEP,
    "sync/*": VERSION,
    "eval/*": EVALUATION_STEP,
    "eval_initial/*": EVALUATION_STEP,
    "eval_teacher/*": EVALUATION_STEP,
    EVALUATION_SAMPLES: EVALUATION_STEP,
}
"""The x axis of each metric, by the longest name that fits."""
SAMPLES = 32
"""Rows of a table."""
EVERY = 25
"""Steps from one table of generations to the next."""


@dataclass(frozen=True)
class SampleTable:
    """Rows of text under columns, and the thumbnails of each row's images, in order.

    An image without a thumbnail is None.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    images: Sequence[Sequence[ForeignPath | None]] = ()


@dataclass
class SampleTables:
    """The tables of a run directory."""

    run_dir: Path
    _step: int = field(default=-EVERY, init=False)

    def answers(self, step: int, metrics: Mapping[str, float]) -> SampleTable | None:
        """The first answers of the evaluation that has these metrics; None without its file."""
        of_teachers = any(key.startswith("eval_teacher/") for key in metrics)
        name = "teachers" if of_teachers else f"step_{step}"
        path = foreign(self.run_dir) / "evals" / f"{name}.jsonl"
        if not path.exists():
            return None
        return self._table([json.loads(line) for line in islice(path.lines(), SAMPLES)])

    def generations(self, step: int) -> SampleTable | None:
        """Of the newest recorded step up to this one, at most once in ``EVERY`` steps; else None.

        Ranks write a step's records after the step: the newest ones may be some steps old.
        """
        if step < self._step + EVERY:
            return None
        steps = {of for of, _ in files(self.run_dir / MICROSCOPE) if self._step < of <= step}
        if not steps:
            return None
        self._step = max(steps)
        found = islice(records(self.run_dir, [self._step]), SAMPLES)
        return self._table([_generation(one) for one in found])

    def _table(self, entries: Sequence[dict[str, Any]]) -> SampleTable:
        """One column for each key; a table's columns hold one type: text."""
        from async_opd.pictures import thumbnail_file  # imports tokenizers

        given = [entry.pop("images", ()) for entry in entries]
        images = [[thumbnail_file(self.run_dir, one["sha256"]) for one in own] for own in given]
        columns = list(dict.fromkeys(key for entry in entries for key in entry))
        rows = [[_cell(entry.get(key)) for key in columns] for entry in entries]
        return SampleTable(columns, rows, images)


def _generation(record: SampleRecord) -> dict[str, Any]:
    """One row: the sample, its response, and means over the tokens of loss and gap, in nats."""
    versions = record["version"]
    return {
        "step": record.step,
        "uid": record.uid,
        "data source": record.data_source,
        "teacher": record.teacher,
        "images": [image._asdict() for image in record.images],
        "prompt": record.prompt,
        "response": "".join(map(record.text, record["token"])),
        "response tokens": record.response_tokens,
        "finish reason": record.finish_reason,
        "versions": sorted({int(version) for version in versions}),
        "reward": record.reward,
        "mean loss": _mean(record.loss),
        "mean gap": _mean(record.gap),
    }


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 6) if len(values) else None


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


@dataclass(frozen=True)
class Alert:
    """``title`` is of a kind of message, ``text`` is the message."""

    title: str
    text: str
    level: Literal["WARN", "ERROR"]


KINDS: tuple[tuple[re.Pattern[str], str, Literal["WARN", "ERROR"]], ...] = (
    (re.compile(r"^failed\b|^the run has failed"), "the run has failed", "ERROR"),
    (re.compile(r"\(guardrail: |^rollback \d"), "guardrail", "WARN"),
    (re.compile(r" is (ejected|gone for good)\b"), "a replica failed", "WARN"),
)


def alert_of(message: str) -> Alert | None:
    """The alert of a line of ``run.log``; None for most lines."""
    for pattern, title, level in KINDS:
        if pattern.search(message.partition("\n")[0]):
            return Alert(title, message, level)
    return None


class WandbSink(LateSink):
    """One wandb run. ``start`` and ``close`` are bounded; ``log`` passes rows to a thread.

    Only that thread waits when wandb's own process accepts no rows. ``resumed`` continues the wandb
    run of the run directory.
    """

    name = "wandb"

    def __init__(self, config: RunConfig, run_dir: Path, resumed: bool = False) -> None:
        self._config = config
        self.longest_s = max(4 * INIT_TIMEOUT_S, 2 * config.timeouts.shutdown_s)
        self._run_dir = run_dir
        self._run: wandb.Run | None = None
        self._at = LoggedRun.of(run_dir, self.name) if resumed else LoggedRun.new()
        self._known = self._at
        self._tables = SampleTables(run_dir)
        self._dropped = 0
        self._writer = BackgroundWorker[Row | Alert]("wandb", self._give, MAX_ROWS + MAX_ALERTS)

    def start(self) -> str | None:
        """Opens the wandb run; if its server cannot be reached, offline, and returns a message.

        Raises what ``wandb.init`` raises, after its time limit at most.
        """
        wanted = self._config.log.wandb
        own = _own_settings()
        mode = _auto_mode(own) if wanted == "auto" else _MODES[wanted]
        try:
            self._open(mode)
        except Exception as error:
            if mode != "online" or not _end_failed_run():
                raise
            self._open("offline")
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            return (
                f"wandb cannot be reached ({reason}): this run is logged offline; wandb sync "
                "uploads its directory later"
            )
        return None

    def _open(self, mode: Mode) -> None:
        import wandb

        make_folder(self._run_dir / "wandb")  # raises if it is a link
        self._run = wandb.init(
            project=self._config.log.project,
            name=self._config.name,
            id=self._at.id,
            resume="allow",
            reinit="create_new",  # by default, a run that this process has not finished is returned
            allow_val_change=True,
            dir=str(self._run_dir),
            mode=mode,
            config={
                **without_secrets(self._config.model_dump(mode="json", by_alias=True)),
                "environment": environment(),
            },
            settings=wandb.Settings(
                disable_git=True,  # a repository there may be of others: its settings name programs
                silent=True,
                console="off",
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=self._config.timeouts.shutdown_s,
                finish_timeout_raises=True,
            ),
        )
        for axis in (STEP, VERSION, EVALUATION_STEP):
            self._run.define_metric(axis)
        for name, axis in AXES.items():
            self._run.define_metric(name, step_metric=axis)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs one row; ``step`` is a column, because a step may come several times.

        wandb's own step counts rows. Steps that were logged before the run went back to a
        checkpoint are not logged again. Raises the error of an earlier row.
        """
        evaluation = is_evaluation(metrics)
        if self._run is None or self._known.has(step, evaluation=evaluation):
            return
        if self._writer.waiting >= MAX_ROWS:
            self._dropped += 1
            return
        row, self._at = self._at.rows, self._at.after(step, evaluation=evaluation)
        self._at.write(self._run_dir, self.name)
        axis = {EVALUATION_STEP: float(step)} if evaluation else {}
        self._writer.put((row, {STEP: step, **axis, **metrics}))
        self._raise()

    def message(self, text: str) -> None:
        """Sends an alert if the message needs an action of the user."""
        alert = alert_of(text)
        if alert is not None and self._run is not None:
            shown = alert if self._config.log.samples else replace(alert, text=NOT_SENT)
            self._dropped += not self._writer.put(shown)

    def _give(self, items: list[Row | Alert]) -> None:
        for item in items:
            try:
                if self._run is None:
                    continue
                if isinstance(item, Alert):
                    self._run.alert(title=item.title, text=item.text, level=item.level)
                    continue
                row, metrics = item
                tables = self._sampled(metrics) if self._config.log.samples else {}
                self._run.log({**metrics, **tables}, step=row)
            except Exception as error:
                self._failure = error

    def _sampled(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """As ``_samples``; a table that cannot be made is a failure, and the row comes without."""
        try:
            return self._samples(metrics)
        except Exception as error:
            self._failure = error
            return {}

    def _samples(self, metrics: Mapping[str, float]) -> dict[str, Any]:
        """The table of the row's evaluation or generations; nothing if there is none."""
        step = int(metrics[STEP])
        if EVALUATION_STEP in metrics:
            key, found = EVALUATION_SAMPLES, self._tables.answers(step, metrics)
        else:
            key, found = GENERATIONS, self._tables.generations(step)
        if found is None:
            return {}
        return {key: _wandb_table(found)}

    def rewind(self) -> None:
        """Keeps the rows that wandb has: ``log`` skips their steps from now on."""
        self._known = self._at

    def close(self, summary: Summary) -> str | None:
        """Sets wandb's summary and ends the wandb run, as failed unless the run completed.

        It takes at most twice ``timeouts.shutdown_s``. Raises the error of the last rows. wandb's
        own process is killed if it hangs, because this process would wait for it at its exit.
        """
        bound_s = self._config.timeouts.shutdown_s
        if not self._writer.close(bound_s):
            _end_service()
            return f"wandb did not take {self._writer.waiting} rows within {bound_s:g} s"
        run, self._run = self._run, None
        if run is not None:
            run.summary.update({**summary.metrics, "status": summary.status})
            run.finish(exit_code=0 if summary.status == "completed" else 1)
        self._raise()
        lacking = f"wandb lacks {self._dropped} rows or alerts: it was behind"
        return lacking if self._dropped else None


def _wandb_table(found: SampleTable) -> wandb.Table:
    """The rows, with a column of pictures for each image that a row may have."""
    import wandb

    most = max(map(len, found.images), default=0)
    titles = ["image"] if most == 1 else [f"image {number + 1}" for number in range(most)]
    data: list[list[Any]] = []
    for row, shown in zip_longest(found.rows, found.images, fillvalue=()):
        pictures = [None if file is None else wandb.Image(str(file.as_path())) for file in shown]
        data.append([*row, *pictures, *[None] * (most - len(shown))])
    return wandb.Table(columns=[*found.columns, *titles], data=data)


def _end_failed_run() -> bool:
    """Ends wandb's own process, where the run that was not opened keeps its id. Whether it may.

    It may not if this process has a run of the user's there.
    """
    import wandb

    if wandb.run is not None or wandb.setup().most_recent_active_run is not None:
        return False

    def end() -> None:
        with suppress(SystemExit):  # of a service that failed
            wandb.teardown()

    ending = Thread(target=end, name="end of wandb", daemon=True)
    ending.start()
    ending.join(INIT_TIMEOUT_S)
    if ending.is_alive():
        _end_service()  # of which the thread waits for the end
        ending.join(INIT_TIMEOUT_S)
    _own_settings()
    return True


def _end_service() -> None:
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if process.name() == SERVICE:
                process.kill()


_MODES: dict[str, Mode] = {"online": "online", "offline": "offline", "off": "disabled"}


def own_mode() -> Mode:
    """The mode of ``log.wandb: auto`` for this user: online with credentials."""
    return _auto_mode(_own_settings())


def has_login() -> bool:
    """Whether wandb has credentials of this user. No server is asked."""
    return _has_login(_own_settings())


def _own_settings() -> wandb.Settings:
    """wandb's settings from the environment and the user's own file.

    wandb would also read ``wandb/settings`` or ``.wandb/settings`` of the working directory, once
    per process. A file there may be downloaded, and must not choose the server that gets the user's
    key: the settings are loaded in the root directory.
    """
    import wandb

    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb").expanduser()
    own = wandb.Settings(settings_system=str(folder.absolute() / "settings"), silent=True)
    with chdir("/"):
        return wandb.setup(own).settings


def _auto_mode(settings: wandb.Settings) -> Mode:
    """Online if wandb has credentials, unless WANDB_MODE says otherwise."""
    if settings.mode in ("offline", "dryrun"):
        return "offline"
    if settings.mode == "disabled":
        return "disabled"
    return "online" if _has_login(settings) else "offline"


def _has_login(settings: wandb.Settings) -> bool:
    return (
        any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"))
        or bool(settings.api_key)
        or _in_netrc(urlsplit(settings.base_url).hostname or "")
    )


def _in_netrc(host: str) -> bool:
    """Whether the netrc file that ``wandb login`` writes has an entry for the server.

    A file that cannot be read has none.
    """
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return path.exists() and host in netrc.netrc(path).hosts
    except (netrc.NetrcParseError, OSError):
        return False
