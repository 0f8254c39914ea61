"""The quickstart's files: in a wheel beside this package, in a checkout in ``examples``."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_opd.core.errors import ConfigError, Problem

NAME = "quickstart"
CONFIG, INPUTS = f"{NAME}.yaml", (f"{NAME}/models", f"{NAME}/data")


def packaged() -> Path:
    """The folder with the config and its inputs. ConfigError if the installation lacks them."""
    here = Path(__file__).resolve()
    places = (here.parents[2] / "examples", here.parents[3] / "examples")
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        message = f"the quickstart's {CONFIG} is in none of {', '.join(map(str, places))}"
        remedy = "install async_opd from its wheel, or run in a complete checkout"
        raise ConfigError([Problem("installation", "", message, remedy)])
    return found


def refuse_folder(folder: Path) -> None:
    """ConfigError for a file, and for a folder with inputs and without their config."""
    if folder.exists() and not folder.is_dir():
        message, remedy = f"{folder} is no directory", "name another one"
    elif not folder.exists() and "=" in folder.name:
        message, remedy = f"{folder} is taken for DIR", f"for a key of the config: --set {folder}"
    elif (folder / NAME).exists() and not (folder / CONFIG).exists():
        message = f"{folder / NAME} exists, but {CONFIG} beside it does not"
        remedy = f"remove {folder / NAME}, or name another directory: async_opd quickstart DIR"
    else:
        return
    raise ConfigError([Problem("command line", "DIR", message, remedy)])


def copy_to(folder: Path) -> list[Path]:
    """Copies what is not in the folder yet, the config last; returns what was written.

    ConfigError where ``refuse_folder`` raises it.
    """
    refuse_folder(folder)
    if (folder / CONFIG).exists():
        return []
    folder.mkdir(parents=True, exist_ok=True)
    source, partial = packaged(), folder / f".{NAME}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a copy that was interrupted
    for name in INPUTS:
        to = partial / Path(name).name
        shutil.copytree(source / name, to, copy_function=shutil.copyfile)
    partial.rename(folder / NAME)
    shutil.copyfile(source / CONFIG, folder / CONFIG)
    return [folder / CONFIG, folder / NAME]
