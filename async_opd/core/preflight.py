"""Everything that can be wrong with the input, found before any engine starts, all at once.

Reads the files that a config names; imports neither torch, ray, vllm nor transformers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_opd.core.config import FileSource, RunConfig
from async_opd.core.devices import gpu_count, resolve_device
from async_opd.core.errors import Problem
from async_opd.core.graders import load_grader
from async_opd.core.sources import Row, SourceError, read_source
from async_opd.core.text import Text, eos_ids, read_json

HEAD_DIMS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's CPU attention has kernels for."""
HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")


@dataclass(frozen=True)
class Pool:
    """What a role takes of the machine."""

    name: str
    replicas: int
    gpus_per_replica: int
    model: str

    @property
    def gpus(self) -> int:
        """GPUs of the whole pool."""
        return self.replicas * self.gpus_per_replica


def pools(config: RunConfig) -> list[Pool]:
    """The pools of a run, as they would be on GPUs."""
    teachers = [
        Pool(f"teachers.{name}", teacher.replicas, teacher.tensor_parallel, teacher.model)
        for name, teacher in config.teachers.items()
    ]
    rollout = config.rollout
    return [
        Pool("rollout", rollout.replicas, rollout.tensor_parallel, config.student.model),
        *teachers,
        Pool("train", 1, 1, config.student.model),
    ]


@dataclass
class Inputs:
    """What preflight read, so that the run does not read it again."""

    train: list[list[Row]] = field(default_factory=list)
    eval: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def preflight(config: RunConfig, where: str, gpus: int | None = None) -> Inputs:
    """Reads the data and collects all problems. ``gpus`` overrides what the machine has."""
    inputs = Inputs()
    check = _Check(config, where, inputs.problems)
    check.models()
    check.hardware(gpu_count() if gpus is None else gpus)
    check.grader()
    inputs.train = check.sources("train")
    inputs.eval = [row for rows in check.sources("eval") for row in rows]
    check.routes([row for rows in inputs.train for row in rows], inputs.eval)
    check.lengths(inputs.train, inputs.eval)
    return inputs


@dataclass
class _Check:
    config: RunConfig
    where: str
    problems: list[Problem]

    def problem(self, key: str, message: str, remedy: str = "") -> None:
        self.problems.append(Problem(self.where, key, message, remedy))

    # ── models ─────────────────────────────────────────────────────────────────────────────────

    def models(self) -> None:
        """Models are there, and share one tokenizer."""
        student = self._model("student.model", self.config.student.model)
        for name, teacher in self.config.teachers.items():
            key = f"teachers.{name}.model"
            model = self._model(key, teacher.model)
            if student and model:
                self._same_tokenizer(key, student, model)
        if student:
            self._student(student)

    def _model(self, key: str, model: str) -> Path | None:
        path = Path(model)
        if not path.is_dir():
            if not HUB_ID.match(model):
                self.problem(key, f"no such directory: {model}", "check the path")
            return None
        needed = ("config.json", "tokenizer.json")
        missing = [name for name in needed if not (path / name).is_file()]
        if missing:
            self.problem(key, f"{model} has no {', '.join(missing)}", "save both there")
            return None
        if not list(path.glob("*.safetensors")):
            self.problem(key, f"{model} has no *.safetensors", "save the weights as safetensors")
        return path

    def _student(self, path: Path) -> None:
        if not eos_ids(path):
            self.problem(
                "student.model",
                f"{path} names no eos_token_id: every response would run to rollout.max_tokens",
                "set it in generation_config.json",
            )
        vocabulary = read_json(path / "config.json").get("vocab_size")
        top_k = getattr(self.config.loss, "top_k", 0)
        if vocabulary is not None and top_k > vocabulary:
            self.problem(
                "loss.top_k",
                f"{top_k} is more than the vocabulary of {vocabulary} tokens",
                f"at most {vocabulary}",
            )

    def _same_tokenizer(self, key: str, student: Path, teacher: Path) -> None:
        own, other = (read_json(path / "tokenizer.json") for path in (student, teacher))
        if own.get("model", {}).get("vocab") != other.get("model", {}).get("vocab") or own.get(
            "added_tokens"
        ) != other.get("added_tokens"):
            self.problem(
                key,
                f"{teacher} and the student have different tokenizers: token ids would mean "
                "different things to them",
                "teachers need the student's tokenizer",
            )
            return
        sizes = [read_json(path / "config.json").get("vocab_size") for path in (student, teacher)]
        needed = Text(student).size
        for path, size in zip((student, teacher), sizes, strict=True):
            if size is not None and size < needed:
                self.problem(
                    key, f"{path} has a vocabulary of {size}, its tokenizer {needed} tokens"
                )

    # ── hardware ───────────────────────────────────────────────────────────────────────────────

    def hardware(self, gpus: int) -> None:
        """The pools fit the machine."""
        device = resolve_device(self.config, gpus)
        if device == "cpu":
            self._head_sizes()
            return
        if self.config.cluster.address:
            return  # the cluster knows its own GPUs
        wanted = pools(self.config)
        total = sum(pool.gpus for pool in wanted)
        if total > gpus:
            sums = " + ".join(f"{p.name} {p.replicas}·{p.gpus_per_replica}" for p in wanted)
            self.problem(
                "cluster",
                f"the pools take {total} GPUs ({sums}), this machine has {gpus}",
                "take fewer replicas, or join a larger cluster with cluster.address",
            )

    def _head_sizes(self) -> None:
        models = {"student.model": self.config.student.model}
        models |= {f"teachers.{n}.model": t.model for n, t in self.config.teachers.items()}
        for key, model in models.items():
            config = read_json(Path(model) / "config.json")
            size = _head_dim(config)
            if size is not None and size not in HEAD_DIMS_ON_CPU:
                self.problem(
                    key,
                    f"head size {size} has no attention kernel on CPU",
                    f"possible: {', '.join(map(str, HEAD_DIMS_ON_CPU))}",
                )

    # ── data ───────────────────────────────────────────────────────────────────────────────────

    def grader(self) -> None:
        """The grader can be imported."""
        try:
            load_grader(self.config.eval.grader)
        except (ImportError, AttributeError, ValueError) as error:
            self.problem(
                "eval.grader", str(error), "exact, math_verify, or module:function on PYTHONPATH"
            )

    def sources(self, part: str) -> list[list[Row]]:
        """Reads ``data.train`` or ``data.eval``."""
        entries = getattr(self.config.data, part)
        if part == "train" and not entries:
            self.problem("data.train", "no source of prompts", "name a file")
        read = []
        for index, source in enumerate(entries):
            name = source.path if isinstance(source, FileSource) else source.task
            try:
                read.append(read_source(source, index, self.config.data))
            except SourceError as error:
                place = f"{name}" + ("" if error.row is None else f", row {error.row}")
                self.problems.append(Problem(place, f"data.{part}", error.message, "mend the data"))
            except ImportError as error:
                remedy = "pip install async-opd[data]"
                self.problem(f"data.{part}", f"{name} needs {error.name}", remedy)
        return read

    def routes(self, train: Sequence[Row], evaluation: Sequence[Row]) -> None:
        """Every data source has one teacher, every teacher a data source."""
        claimed: dict[str, str] = {}
        for name, teacher in self.config.teachers.items():
            for source in teacher.sources if teacher.sources is not None else [name]:
                if source in claimed:
                    self.problem(
                        f"teachers.{name}.sources",
                        f"{source!r} is {claimed[source]}'s already",
                        "a data source has one teacher",
                    )
                claimed.setdefault(source, name)
        found = {row.data_source for row in train}
        if not train:
            return
        for source in sorted(found | {row.data_source for row in evaluation}):
            if source not in claimed:
                self.problem(
                    "teachers",
                    f"no teacher for data source {source!r}",
                    f"add {source!r} to the sources of one of: {', '.join(self.config.teachers)}",
                )
        for name in self.config.teachers:
            own = {source for source, teacher in claimed.items() if teacher == name}
            if not own & found:
                self.problem(
                    f"teachers.{name}",
                    f"no prompt goes to it: its sources are {sorted(own)}, data.train has "
                    f"{sorted(found)}",
                    f"set teachers.{name}.sources, or remove the teacher",
                )

    def lengths(self, train: Sequence[Sequence[Row]], evaluation: Sequence[Row]) -> None:
        """Prompts and responses fit the models."""
        limit = self._prompt_limit()
        if limit is None or not (Path(self.config.student.model) / "tokenizer.json").is_file():
            return
        text = Text(self.config.student.model, self.config.data.chat_template)
        too_long: list[tuple[str, int]] = []
        for row in (*(row for rows in train for row in rows), *evaluation):
            try:
                length = len(text.encode(row.prompt))
            except (ValueError, TypeError) as error:
                self.problem("data", f"row {row.uid} cannot be tokenized: {error}", "mend the data")
                return
            if not 1 <= length <= limit:
                too_long.append((row.uid, length))
        if too_long:
            uid, length = too_long[0]
            self.problem(
                "data",
                f"{len(too_long)} prompts are empty or longer than {limit} tokens, the first is "
                f"row {uid} with {length}; limit = max_model_len - rollout.max_tokens - 1",
                "shorten or remove them, or lower rollout.max_tokens",
            )

    def _prompt_limit(self) -> int | None:
        """Tokens a prompt may have: the shortest model must hold prompt, response and one more."""
        config = self.config
        engines: list[tuple[str, int | None]] = [
            (config.student.model, config.rollout.engine.max_model_len),
            *((t.model, t.engine.max_model_len) for t in config.teachers.values()),
        ]
        limits = []
        for model, length in engines:
            known = length or read_json(Path(model) / "config.json").get("max_position_embeddings")
            if known:
                limits.append(int(known) - config.rollout.max_tokens - 1)
        if config.data.max_prompt_tokens:
            limits.append(config.data.max_prompt_tokens)
        if limits and min(limits) < 1:
            self.problem(
                "rollout.max_tokens",
                f"{config.rollout.max_tokens} leaves no room for a prompt: the shortest model has "
                f"{min(limits) + config.rollout.max_tokens + 1} positions",
                "lower it",
            )
            return None
        return min(limits) if limits else None


def _head_dim(config: dict[str, Any]) -> int | None:
    if "head_dim" in config:
        return int(config["head_dim"])
    if config.get("hidden_size") and config.get("num_attention_heads"):
        return int(config["hidden_size"]) // int(config["num_attention_heads"])
    return None
