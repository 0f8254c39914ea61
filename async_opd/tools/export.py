"""``async_opd export RUN_DIR|CHECKPOINT OUT``: a trained student as a directory to give away.

checkpoint ──float32 masters──► dtype ──┐
run directory ──model/─────────────────┴─► OUT + README.md (the model card) ──► hub
"""

from __future__ import annotations

import argparse
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from async_opd.config.overrides import add_trust
from async_opd.config.secrets import Redactor
from async_opd.core.errors import ConfigError, StageError
from async_opd.core.printable import on_one_line
from async_opd.files.foreign import ForeignPath
from async_opd.models.own_files import TEMPLATES, is_part

if TYPE_CHECKING:
    from async_opd.files.foreign import Place
    from async_opd.files.origin import Origin
    from async_opd.tools.given_run import GivenRun

CARD, ADAPTER = "README.md", "adapter"
FOLDERS = ("", ADAPTER, TEMPLATES)
"""Folders of a model with such files."""
CHUNK = 8 << 20
SHOWN = 10
LOADED = "`from_pretrained` of transformers loads the directory, and so does `vllm serve`."
_MARKS = re.compile(r"([\\`*_~\[\]<>|#@]|:(?=//)|(?<=www)\.)", re.IGNORECASE)
"""Characters that markdown takes for more than text."""


def add_export(parser: argparse.ArgumentParser) -> None:
    """Writes the student of a run directory (its model/) or of one of its checkpoints.

    With it come tokenizer, chat template, generation config and a model card: student, teachers,
    data with a digest, config, versions. Adapters are merged; --adapter writes them alone, as a
    PEFT directory. --push uploads the directory to a hub (HF_ENDPOINT, HF_TOKEN), into a repository
    that is private unless it exists.

      async_opd export runs/quickstart student
      async_opd export runs/quickstart/checkpoints/step_160 at-160 --dtype bfloat16 --push me/it
      async_opd export s3://bucket/runs/a/step_160 mirrored-160
    """
    parser.add_argument("source", metavar="RUN_DIR|CHECKPOINT|URL", help="what a run wrote")
    parser.add_argument("out", metavar="OUT", help="directory to make")
    what = "precision of a checkpoint's model (default: train.export_dtype of the run)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=what)
    what = "write the adapters alone, of a run with train.lora"
    parser.add_argument("--adapter", action="store_true", help=what)
    parser.add_argument("--push", metavar="REPO", help="upload OUT to this repository of a hub")
    add_trust(parser, "the run directory names")
    parser.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    from async_opd.checkpoint.run_copies import record_and_weights, run_at
    from async_opd.checkpoint.store import FOLDER
    from async_opd.config.paths import is_url
    from async_opd.files.safe_open import private_files

    out = Path(given.out).absolute()
    with private_files(), run_at(given.source, record_and_weights) as found:
        source = found
        if is_url(given.source):
            checkpoint = found / FOLDER / given.source.rstrip("/").rpartition("/")[2]
            source = checkpoint if checkpoint.is_dir() else found
        trusted = given.trust_remote_code
        export(source, out, given.dtype, adapter=given.adapter, trust_remote_code=trusted)
    print(on_one_line(f"the student is in {out}"))
    if given.push:
        print(on_one_line(f"pushed to {push(out, given.push)}"))
    return 0


def export(
    source: Place,
    out: Path,
    dtype: str | None = None,
    *,
    adapter: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Writes ``out`` completely or not at all. ConfigError for what cannot be exported.

    ``dtype`` None is that of the run's export. It takes host memory for the student's weights.
    ``trust_remote_code``: code that the run directory names may run.
    """
    from async_opd.files.safe_open import remove_tree
    from async_opd.tools.given_run import given_run

    if out.exists():
        raise _refused("OUT", f"{out} exists already", "name another directory")
    run = given_run(source, trust_remote_code)
    if adapter and run.config.train.lora is None:
        raise _refused("--adapter", "the run has no adapters", "leave --adapter out")
    made = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if run.checkpoint is not None:
            _of_checkpoint(run, run.checkpoint, made, dtype)
        else:
            _of_run(run, made, dtype)
        written = made / ADAPTER if adapter else made
        (written / CARD).write_text(_card(run, adapter), encoding="utf-8")
        written.rename(out)
    finally:
        remove_tree(made)


def push(folder: Path, repo: str) -> str:
    """Uploads the directory in one commit, and returns its URL. StageError with the hub's cause."""
    from huggingface_hub import HfApi

    try:
        hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        hub.create_repo(repo, private=True, exist_ok=True)
        words = "Export of a run of async_opd"
        done = hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=words)
    except Exception as error:  # of HTTP, of names, of files: the library has many kinds
        cause = f"{repo} was not pushed: {type(error).__name__}: {error}"
        remedy = (
            f"{folder} is complete; HF_TOKEN needs the right to write, then "
            f"hf upload {repo} {folder}"
        )
        raise StageError("export", cause, remedy) from error
    return str(done)


def _of_checkpoint(run: GivenRun, checkpoint: Path, target: Path, dtype: str | None) -> None:
    from trainer.saving.export import export_checkpoint

    given = {} if dtype is None else {"export_dtype": dtype}
    train = run.config.train.model_copy(update=given)
    try:
        export_checkpoint(run.config.model_copy(update={"train": train}), checkpoint, target)
    except StageError as error:
        remedy = error.remedy or "name another checkpoint"
        raise _refused("CHECKPOINT", error.cause, remedy) from error


def _of_run(run: GivenRun, target: Path, dtype: str | None) -> None:
    """Copies ``model/``, whose dtype it has: files that may be parts of a model, others not.

    ConfigError for another dtype, without a model, or if the disk has no space for it.
    """
    from async_opd.files.durable import without_space
    from async_opd.files.safe_open import make_folder, regular_file

    model = run.run_dir / "model"
    try:
        if not (model / "config.json").exists():
            message = f"{run.run_dir} has no model/ yet: the run has not ended"
            raise _refused("RUN_DIR", message, "name a checkpoint: checkpoints/step_N")
        if (model / CARD).is_dir():
            raise _refused("RUN_DIR", f"{model / CARD} is a directory", "remove it")
        settings = json.loads((model / "config.json").read())
        found = settings.get("dtype") or settings.get("text_config", {}).get("dtype")
        if dtype not in (None, found):
            message = f"{model} is {found}"
            remedy = "name a checkpoint (checkpoints/step_N), which has the float32 masters"
            raise _refused("--dtype", message, remedy)
        sizes, others = _sizes(model)
        if figures := without_space(sum(sizes.values()), target):
            remedy = "make space there, or name a directory on another disk"
            raise _refused("OUT", f"{model} has {figures}", remedy)
        for file, size in sizes.items():
            copy = target.joinpath(*file.parts[1:])
            make_folder(copy.parent)
            with file.open("rb") as read, open(copy, "xb", opener=regular_file) as written:
                written.writelines(read.read(min(left, CHUNK)) for left in range(size, 0, -CHUNK))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        cause, remedy = f"its model/ cannot be copied: {error}", "restore it as the run wrote it"
        raise _refused("RUN_DIR", cause, remedy) from error
    if others:
        shown = ", ".join(map(repr, others[:SHOWN])) + " …" * (len(others) > SHOWN)
        warnings.warn(
            f"not copied, since no part of a model has such a name: {shown}", stacklevel=2
        )


def _sizes(model: ForeignPath) -> tuple[dict[ForeignPath, int], list[str]]:
    """Bytes of the files that may be parts of a model, and the names of all others.

    OSError if one of them all is a link, a pipe or a device.
    """
    sizes, others = dict[ForeignPath, int](), list[str]()
    for file in model.walk():
        folder = "/".join(file.parts[1:-1])
        with file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
        if folder in FOLDERS and is_part(file.name):
            sizes[file] = size
        else:
            others.append("/".join(file.parts[1:]))
    return sizes, others


def _card(run: GivenRun, adapter: bool) -> str:
    """The model card. Of paths it has the last part only, and no secret.

    The config may be a stranger's, and the card is published: nothing that the config names is
    opened for it, and no text of it is read as markdown.
    """
    from async_opd.config.yaml_text import dump_yaml
    from async_opd.files.origin import read_origins

    config = run.config
    tree = config.model_dump(mode="json", by_alias=True)
    origins = read_origins(run.run_dir)
    name = run.checkpoint and run.checkpoint.name
    of = "model/ of the run" if name is None else f"checkpoint {name} of the run"
    versions = {**origins[-1].versions, **_commit(origins[-1])} if origins else {}
    teachers = [
        (f"teacher {name}", getattr(teacher, "model", None) or "the student itself")
        for name, teacher in config.teachers.items()
    ]
    front = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["async_opd", "on-policy-distillation"],
    }
    shown = dump_yaml(without_folders(tree)).strip()
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    lines = [
        "---",
        dump_yaml(front).strip(),
        "---",
        f"# {_plain(config.name)}",
        f"Trained by on-policy distillation with async_opd; {of}.",
        "peft and vLLM load the adapters." if adapter else LOADED,
        "## Lineage",
        "| what | which |\n|---|---|",
        _row("student", config.student.model),
        *(_row(*one) for one in teachers),
        *(_row("data", source.label) for source in config.data.train),
        *(
            _row("data", f"SHA-256 of all training prompts and answers: {one}")
            for one in _data(run)
        ),
        "## Results",
        "| metric | value |\n|---|---|",
        *(_row(key, f"{value:.4g}") for key, value in _results(run)),
        "## Versions",
        "| package | version |\n|---|---|",
        *(_row(name, version) for name, version in versions.items()),
        "## Config\n<details><summary>all keys</summary>\n",
        f"{fence}yaml\n{shown}\n{fence}\n\n</details>",
    ]
    card = "\n".join(lines) + "\n"
    hide = Redactor(tree)
    if hide.quotes(card):
        message = "a text of the run has the value of a secret variable of your environment"
        remedy = "unset the variables that its config names (*_env): a card with a hidden text"
        raise _refused("RUN_DIR", message, f"{remedy} would confirm the value to its author")
    return hide(card)


def _commit(origin: Origin) -> dict[str, str]:
    """The commit as ``async_opd@…``, which looks like no key and is not hidden; {} without one."""
    return {"commit": f"async_opd@{origin.commit}"} if origin.commit else {}


def _data(run: GivenRun) -> Iterator[str]:
    """The digest of all training rows that the run noted in its newest checkpoint."""
    from async_opd.checkpoint.store import CONFIG, FOLDER, steps_in

    folder = run.run_dir / FOLDER
    for step in steps_in(folder)[-1:]:
        try:
            identity = json.loads((folder / f"step_{step}/{CONFIG}").read())
            yield str(identity["data"])
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue


def _results(run: GivenRun) -> Iterator[tuple[str, float]]:
    """The last evaluation's metrics in ``summary.json``; none of a run that has not ended.

    Of those at n answers that equal the accuracy only that one.
    """
    try:
        summary = json.loads((run.run_dir / "summary.json").read())
    except (OSError, ValueError, RecursionError):
        return
    for key, value in summary.items() if isinstance(summary, dict) else ():
        again = "@" in key and value == summary.get(f"{key.rpartition('/')[0]}/accuracy")
        if key.startswith(("eval/", "eval_initial/")) and isinstance(value, float) and not again:
            yield key, value


def _row(what: str, value: str) -> str:
    """A row of a table."""
    return f"| {_plain(what)} | {_plain(_without_place(value))} |"


def _plain(text: str) -> str:
    """A text on one line, of which markdown takes nothing for more than text."""
    return _MARKS.sub(r"\\\1", on_one_line(text))


def _without_place(text: str) -> str:
    """The last part of a path or URL, without folders and hosts; any other text as it is.

    A copy in the hub's cache is named by id and revision.
    """
    from async_opd.models.json_files import hub_id

    if (cached := hub_id(text)) is not None:
        return "@".join(cached)
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        text = urlsplit(text).path or "/"
    return Path(text).name or "…" if text.startswith(("/", "~")) else text


def without_folders(value: Any) -> Any:
    """The tree with ``_without_place`` applied to all texts."""
    if isinstance(value, dict):
        return {key: without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_folders(one) for one in value]
    return _without_place(value) if isinstance(value, str) else value


def _refused(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError.of(key, message, remedy)
