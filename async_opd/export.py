"""``async_opd export RUN_DIR|CHECKPOINT OUT``: a trained student as a directory to give away.

checkpoint ──float32 masters──► dtype ──┐
run directory ──model/─────────────────┴─► OUT + README.md (the model card) ──► hub
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import ConfigError, Problem, StageError
from async_opd.core.printable import on_one_line

ABOUT = """\
Writes the student of a run directory (its model/) or of one of its checkpoints, with tokenizer,
chat template, generation config and a model card: student, teachers, data with digests, config,
versions. Adapters are merged; --adapter writes them alone, as a PEFT directory. --push uploads the
directory to a hub (HF_ENDPOINT, HF_TOKEN), into a repository that is private unless it exists.

  async_opd export runs/quickstart out
  async_opd export runs/quickstart/checkpoints/step_100 out --dtype bfloat16 --push me/student
  async_opd export s3://bucket/runs/a/step_100 out
"""
CARD, ADAPTER = "README.md", "adapter"


def add_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Adds the subcommand's parser."""
    parser = commands.add_parser("export", help="write a trained student", description=ABOUT)
    parser.add_argument("source", metavar="RUN_DIR|CHECKPOINT|URL", help="what a run wrote")
    parser.add_argument("out", metavar="OUT", help="directory to make")
    what = "precision of a checkpoint's model (default: train.export_dtype of the run)"
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help=what)
    what = "write the adapters alone, of a run with train.lora"
    parser.add_argument("--adapter", action="store_true", help=what)
    parser.add_argument("--push", metavar="REPO", help="upload OUT to this repository of a hub")
    parser.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    from async_opd.checkpoint.fetched_run import record_and_weights, run_at
    from async_opd.checkpoint.store import FOLDER
    from async_opd.config.paths import is_url
    from async_opd.files.safe_open import private_files

    out = Path(given.out).absolute()
    with private_files(), run_at(given.source, record_and_weights) as found:
        checkpoint = found / FOLDER / given.source.rstrip("/").rpartition("/")[2]
        source = checkpoint if is_url(given.source) and checkpoint.is_dir() else found
        export(source.resolve(), out, given.dtype, adapter=given.adapter)
    print(on_one_line(f"the student is in {out}"))
    if given.push:
        print(on_one_line(f"pushed to {push(out, given.push)}"))
    return 0


def export(source: Path, out: Path, dtype: str | None = None, *, adapter: bool = False) -> None:
    """Writes ``out`` completely or not at all. ConfigError for what cannot be exported.

    ``dtype`` None is that of the run's export. It takes host memory for the student's weights.
    """
    from async_opd.checkpoint.store import MANIFEST
    from async_opd.config.load import load_config
    from async_opd.files.run_format import refuse_other_formats
    from async_opd.files.safe_open import remove_tree

    if out.exists():
        raise _refused("OUT", f"{out} exists already", "name another directory")
    is_checkpoint = (source / MANIFEST).is_file()
    run_dir = source.parents[1] if is_checkpoint else source
    if not (run_dir / "config.yaml").is_file():
        message = f"{source} is neither a run directory nor one of its checkpoints"
        raise _refused("RUN_DIR|CHECKPOINT", message, "a checkpoint is named checkpoints/step_N")
    refuse_other_formats(run_dir)
    config = load_config(run_dir / "config.yaml")
    if adapter and config.train.lora is None:
        raise _refused("--adapter", "the run has no adapters", "leave --adapter out")
    made = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        if is_checkpoint:
            _of_checkpoint(source, made, dtype)
        else:
            _of_run(run_dir, made, dtype)
        written = made / ADAPTER if adapter else made
        (written / CARD).write_text(_card(config, run_dir, source, adapter), encoding="utf-8")
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


def _of_checkpoint(checkpoint: Path, target: Path, dtype: str | None) -> None:
    from trainer.saving.checkpoint_model import export_verified

    try:
        export_verified(checkpoint, target, dtype)
    except StageError as error:
        remedy = error.remedy or "name another checkpoint"
        raise _refused("CHECKPOINT", error.cause, remedy) from error


def _of_run(run_dir: Path, target: Path, dtype: str | None) -> None:
    """Copies ``model/``, whose dtype it has. ConfigError for another one, or without a model."""
    model = run_dir / "model"
    if not (model / "config.json").is_file():
        message = f"{run_dir} has no model/ yet: the run has not ended"
        raise _refused("RUN_DIR", message, "name a checkpoint: checkpoints/step_N")
    settings = json.loads((model / "config.json").read_text(encoding="utf-8"))
    found = settings.get("dtype") or settings.get("text_config", {}).get("dtype")
    if dtype not in (None, found):
        message = f"{model} is {found}"
        remedy = "name a checkpoint (checkpoints/step_N), which has the float32 masters"
        raise _refused("--dtype", message, remedy)
    shutil.copytree(model, target)


def _card(config: RunConfig, run_dir: Path, source: Path, adapter: bool) -> str:
    """The model card. Of paths it has the last part only, and no secret."""
    from async_opd.config.yaml_text import dump_yaml
    from async_opd.files.origin import read_origins

    tree = config.model_dump(mode="json", by_alias=True)
    origins = read_origins(run_dir)
    of = "model/ of the run" if source == run_dir else f"checkpoint {source.name} of the run"
    versions = {**origins[-1].versions, "commit": origins[-1].commit} if origins else {}
    teachers = [
        f"| teacher {name} | {_named(getattr(teacher, 'model', None) or 'the student itself')} |"
        for name, teacher in config.teachers.items()
    ]
    front = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["async_opd", "on-policy-distillation"],
    }
    lines = [
        "---",
        dump_yaml(front).strip(),
        "---",
        f"# {config.name}",
        f"Trained by on-policy distillation with async_opd; {of}.",
        "## Lineage",
        "| what | which |\n|---|---|",
        f"| student | {_named(config.student.model)} |",
        *teachers,
        *(f"| data | {one} |" for one in _data(config, run_dir)),
        "## Results",
        "| metric | value |\n|---|---|",
        *(f"| {key} | {value:.4g} |" for key, value in _results(run_dir)),
        "## Versions",
        "| package | version |\n|---|---|",
        *(f"| {name} | {value} |" for name, value in versions.items()),
        f"## Config\n```yaml\n{dump_yaml(_without_folders(tree)).strip()}\n```",
    ]
    return Redactor(tree)("\n".join(lines)) + "\n"


def _data(config: RunConfig, run_dir: Path) -> Iterator[str]:
    """Each training source, with a file's SHA-256; then the digest of all training rows."""
    from async_opd.checkpoint.store import CONFIG, FOLDER, Checkpoints

    for source in config.data.train:
        file, digest = Path(source.label), ""
        if file.is_file():
            with file.open("rb") as opened:
                digest = f", SHA-256 {hashlib.file_digest(opened, 'sha256').hexdigest()}"
        yield _named(source.label) + digest
    for step in Checkpoints(run_dir / FOLDER, 1).steps()[-1:]:
        identity = json.loads((run_dir / FOLDER / f"step_{step}" / CONFIG).read_text())
        yield f"SHA-256 of all training prompts and answers: {identity['data']}"


def _results(run_dir: Path) -> Iterator[tuple[str, float]]:
    """The last evaluation's metrics in ``summary.json``; none of a run that has not ended."""
    try:
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    for key, value in summary.items():
        if key.startswith(("eval/", "eval_initial/")) and isinstance(value, float):
            yield on_one_line(key), value


def _named(name: str) -> str:
    return on_one_line(_without_place(name))


def _without_place(text: str) -> str:
    """The last part of a path or URL, without folders and hosts; any other text as it is.

    A copy in the hub's cache is named by id and revision.
    """
    from async_opd.files.hub_snapshot import hub_id

    if (cached := hub_id(text)) is not None:
        return "@".join(cached)
    if re.match(r"[a-z][a-z0-9+.-]*://", text):
        text = urlsplit(text).path or "/"
    return Path(text).name or "…" if text.startswith(("/", "~")) else text


def _without_folders(value: Any) -> Any:
    """The tree with ``_without_place`` applied to all texts."""
    if isinstance(value, dict):
        return {key: _without_folders(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_folders(one) for one in value]
    return _without_place(value) if isinstance(value, str) else value


def _refused(key: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([Problem("command line", key, message, remedy)])
