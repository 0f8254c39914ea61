"""The format version of a run directory: what readers of this version may assume of its files.

a run begins ──write_run_format──► run.json ─┬─refuse_other_formats──► --resume
                                             └─refuse_no_run──► report, plan RUN_DIR, replay, …

``RUN_FORMAT`` grows with every change after which a reader would misread an older directory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from async_opd.core.errors import ConfigError, Problem
from async_opd.files.absent import refuse_absent
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import write_atomically

RUN_FORMAT = 1
FORMAT_FILE = "run.json"
KEY = "run_format"
SHOWN = 3
"""Run directories near a path that a remedy names."""

OLDER = "use the version of async_opd that made the run, or start another in a new --run-dir"
NEWER = "update async_opd to the version that made the run, or start another in a new --run-dir"
STRANGE = "check the path: this is not a run directory, or its run.json was changed"


def write_run_format(run_dir: Path) -> None:
    """Marks a run directory as one of this version's format. OSError."""
    write_atomically(run_dir / FORMAT_FILE, json.dumps({KEY: RUN_FORMAT}) + "\n")


def refuse_other_formats(run_dir: Place) -> None:
    """ConfigError for a run directory whose files have an older, a newer or no format version."""
    path = foreign(run_dir) / FORMAT_FILE
    try:
        found = json.loads(path.read())[KEY]
        if type(found) is not int:
            raise ValueError(f"{KEY} is {found!r}")
    except FileNotFoundError:
        problem = _problem(path, "no format version, as in runs of earlier versions", OLDER)
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        problem = _problem(path, f"no format version: {type(error).__name__}: {error}", STRANGE)
    else:
        if found == RUN_FORMAT:
            return
        problem = _problem(path, str(found), OLDER if found < RUN_FORMAT else NEWER)
    raise ConfigError([problem])


def refuse_no_run(run_dir: Place) -> None:
    """ConfigError for a path that does not exist, is not a run directory, or has another format."""
    place = foreign(run_dir)
    refuse_absent(place, "RUN_DIR")
    if not _has_files_of_a_run(place):
        near = [str(one) for one in _runs_near(place)]
        more = f" or {len(near) - SHOWN} more" if len(near) > SHOWN else ""
        remedy = f"did you mean {' or '.join(near[:SHOWN])}{more}?" if near else "check the path"
        message = f"{place} is not a run directory: it has neither {FORMAT_FILE} nor config.yaml"
        raise ConfigError([Problem("command line", "RUN_DIR", message, remedy)])
    refuse_other_formats(place)


def _has_files_of_a_run(place: ForeignPath) -> bool:
    """Whether there is a run's format or config; True for a folder that may not be read."""
    try:
        return any((place / name).exists() for name in (FORMAT_FILE, "config.yaml"))
    except OSError:  # reading the format says why
        return True


def _runs_near(place: ForeignPath) -> Iterator[Path | ForeignPath]:
    """Run directories that the place lies in, or that lie in it."""
    path = Path(str(place))
    yield from (folder for folder in path.parents if (folder / FORMAT_FILE).is_file())
    with suppress(OSError):  # a file, or a folder that may not be read
        yield from (one for one in place.entries() if (one / FORMAT_FILE).is_file())


def _problem(path: Place, found: str, remedy: str) -> Problem:
    return Problem(str(path), KEY, f"found {found}, expected {RUN_FORMAT}", remedy)
