"""Everything that can be wrong with the input, found before any engine starts, all at once.

Reads the files that a config names; imports neither torch, ray, vllm nor transformers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from async_opd.core.config import EndpointTeacher, EngineTeacher, FileSource, RunConfig, SelfTeacher
from async_opd.core.devices import gpu_count, resolve_device
from async_opd.core.errors import Problem
from async_opd.core.graders import load_grader
from async_opd.core.head_files import HeadFiles
from async_opd.core.loss_config import ScoreKind, score_kind, scored_top_k
from async_opd.core.model_files import ModelError, ModelFiles
from async_opd.core.pools import Pool as Pool
from async_opd.core.pools import misplaced
from async_opd.core.pools import pools as pools
from async_opd.core.prompts import filled
from async_opd.core.sources import Row, SourceError, read_source
from async_opd.core.text import PromptText, Text

WORDS: dict[ScoreKind, str] = {
    "student_topk": "the teacher's log-probabilities of the student's own best tokens",
    "hidden": "the teacher's hidden states",
}
HEAD_DIMS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's CPU attention has kernels for."""


@dataclass
class Inputs:
    """What preflight read, so that the run does not read it again."""

    train: list[list[Row]] = field(default_factory=list)
    eval: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    max_prompt_tokens: int | None = None
    """What a training prompt may have so that it and its response fit every model."""


def preflight(config: RunConfig, where: str, gpus: int | None = None) -> Inputs:
    """Reads the data and collects all problems. ``gpus`` overrides what the machine has."""
    inputs = Inputs()
    check = _Check(config, where, inputs.problems)
    gpus = gpu_count() if gpus is None else gpus
    check.models()
    check.support()
    check.hardware(gpus)
    check.grader("eval.grader", config.eval.grader)
    if config.reward is not None:
        check.grader("reward.grader", config.reward.grader)
    inputs.train = check.sources("train")
    evaluation = check.sources("eval")
    inputs.eval = [row for rows in evaluation for row in rows]
    if not check.unreadable:
        check.routes([row for rows in inputs.train for row in rows], inputs.eval)
    check.answers("eval", inputs.eval, config.eval.grader)
    if config.reward is not None:
        train = [row for rows in inputs.train for row in rows]
        check.answers("train", train, config.reward.grader)
    inputs.max_prompt_tokens = check.lengths("train", inputs.train, config.rollout.max_tokens)
    check.lengths("eval", evaluation, config.eval.max_tokens or config.rollout.max_tokens)
    return inputs


@dataclass
class _Check:
    config: RunConfig
    where: str
    problems: list[Problem]
    files: dict[str, ModelFiles] = field(default_factory=dict)  # by config key
    unreadable: bool = False

    def problem(self, key: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(self.where, key, message, remedy))

    # ── models ─────────────────────────────────────────────────────────────────────────────────

    def models(self) -> None:
        """Models are there, and share one tokenizer."""
        for key, model in self._model_keys().items():
            try:
                files = ModelFiles.read(model)
            except ModelError as error:
                self.problem(key, error.message, error.remedy)
                continue
            if files is not None:
                self.files[key] = files
                self._vocabulary(key, files)
        student = self.files.get("student.model")
        if student is None:
            return
        self._student(student)
        for key, files in self.files.items():
            if not files.same_tokenizer(student):
                self.problem(
                    key,
                    f"{files.path} and the student have different tokenizers: token ids would "
                    "mean different things to them",
                    "teachers need the student's tokenizer",
                )
            elif student.eos and files.eos and not set(student.eos) & set(files.eos):
                self.problem(
                    key,
                    f"{files.path} ends a response with token {list(files.eos)}, the student with "
                    f"{list(student.eos)}: the student would be taught never to stop",
                    "give both generation_config.json a common eos_token_id",
                )

    def _model_keys(self) -> dict[str, str]:
        teachers = self.config.teachers.items()
        return {"student.model": self.config.student.model} | {
            f"teachers.{name}.model": teacher.model
            for name, teacher in teachers
            if not isinstance(teacher, SelfTeacher) and teacher.model is not None
        }

    def _engine_keys(self) -> set[str]:
        """Keys of models that this run loads itself."""
        teachers = self.config.teachers.items()
        own = {f"teachers.{name}.model" for name, t in teachers if isinstance(t, EngineTeacher)}
        return own | {"student.model"}

    def _vocabulary(self, key: str, files: ModelFiles) -> None:
        if files.vocabulary is not None and files.vocabulary < files.tokens:
            self.problem(
                key,
                f"{files.path} has a vocabulary of {files.vocabulary}, its tokenizer "
                f"{files.tokens} tokens",
                "resize its embeddings, or give it the tokenizer it was trained with",
            )

    def support(self) -> None:
        """What the objective asks of the models: enough tokens, heads that can be loaded."""
        config = self.config
        kind, top_k = score_kind(config.loss), scored_top_k(config.loss)
        smallest = min((f.vocabulary for f in self.files.values() if f.vocabulary), default=top_k)
        if top_k > smallest:
            self.problem(
                "loss.top_k",
                f"{top_k} is more than the vocabulary of {smallest} tokens",
                f"at most {smallest}",
            )
        if kind == "student_topk" and config.rollout.top_p < 1:
            self.problem(
                "rollout.top_p",
                f"{config.rollout.top_p:g} leaves the student's tokens outside of the nucleus "
                "without an order, and loss.support student_topk takes its best "
                f"{top_k}",
                "1, or another loss.support",
            )
        self._endpoints(kind)
        self._refreshed(kind)
        if kind == "hidden":
            self._heads()

    def _refreshed(self, kind: ScoreKind) -> None:
        """The trainer's copy of a head would stay the initial one; who sleeps takes no weights."""
        for name, teacher in self.config.teachers.items():
            if not isinstance(teacher, SelfTeacher) or not teacher.refresh_every:
                continue
            if teacher.host is not None:
                self.problem(
                    f"teachers.{name}.refresh_every",
                    f"found {teacher.refresh_every}, but it is colocated, and sleeps when its "
                    "weights come",
                    "0, or placement dedicated",
                )
            if kind == "hidden":
                self.problem(
                    f"teachers.{name}.refresh_every",
                    f"found {teacher.refresh_every}, but with full_vocab its head is the "
                    "trainer's, and stays the initial one",
                    "0, or another loss.support",
                )

    def _endpoints(self, kind: ScoreKind) -> None:
        """What servers can return for the objective, and whether there is a key."""
        for name, teacher in self.config.teachers.items():
            if not isinstance(teacher, EndpointTeacher):
                continue
            if kind not in ("sampled", "teacher_topk"):
                self.problem(
                    f"teachers.{name}.kind",
                    f"the objective needs {WORDS[kind]}, which no server returns: their APIs give "
                    "the log-probabilities of the sampled token and of the teacher's best",
                    "kind vllm, or a loss of sampled tokens or with support teacher_topk",
                )
            if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
                self.problem(
                    f"teachers.{name}.api_key_env",
                    f"the environment has no {teacher.api_key_env}",
                    f"export {teacher.api_key_env}=…",
                )

    def _heads(self) -> None:
        for key, files in self.files.items():
            try:
                if key != "student.model":
                    HeadFiles.read(files.path)
            except ModelError as error:
                self.problem(key, error.message, error.remedy)

    def _student(self, files: ModelFiles) -> None:
        if not files.eos:
            self.problem(
                "student.model",
                f"{files.path} names no eos_token_id: every response would run to "
                "rollout.max_tokens",
                "set it in generation_config.json",
            )

    # ── hardware ───────────────────────────────────────────────────────────────────────────────

    def hardware(self, gpus: int) -> None:
        """The pools fit the machine."""
        for key, fault, remedy in misplaced(self.config):
            self.problem(key, f"found {fault}", remedy)
        device = resolve_device(self.config, gpus)
        if device == "cpu":
            self._head_sizes()
            return
        if self.config.cluster.address:
            return  # the cluster knows its own GPUs
        wanted = pools(self.config)
        total = sum(pool.gpus for pool in wanted)
        if total > gpus:
            sums = " + ".join(pool.words for pool in wanted)
            self.problem(
                "cluster",
                f"the pools take {total} GPUs ({sums}), this machine has {gpus}",
                "take fewer replicas, or join a larger cluster with cluster.address",
            )

    def _head_sizes(self) -> None:
        for key, files in self.files.items():
            if key not in self._engine_keys():
                continue
            if files.head_size is not None and files.head_size not in HEAD_DIMS_ON_CPU:
                self.problem(
                    key,
                    f"head size {files.head_size} has no attention kernel on CPU",
                    f"possible: {', '.join(map(str, HEAD_DIMS_ON_CPU))}",
                )

    # ── data ───────────────────────────────────────────────────────────────────────────────────

    def grader(self, key: str, name: str) -> None:
        """The grader can be imported."""
        try:
            load_grader(name)
        except Exception as error:  # a user's module can raise anything while it is imported
            self.problem(
                key,
                f"{name} cannot be loaded: {type(error).__name__}: {error}",
                "exact, math_verify, or module:function on PYTHONPATH",
            )

    def sources(self, part: str) -> list[list[Row]]:
        """Reads ``data.train`` or ``data.eval``."""
        entries = getattr(self.config.data, part)
        if part == "train" and not entries:
            self.problem("data.train", "no source of prompts", "name a file")
        read: list[list[Row]] = []
        for index, source in enumerate(entries):
            name = source.path if isinstance(source, FileSource) else source.task
            rows: list[Row] = []
            try:
                rows = read_source(source, index, self.config.data)
            except SourceError as error:
                place = f"{name}" + ("" if error.row is None else f", row {error.row}")
                remedy = "check the path" if "exist" in error.message else "mend the data"
                self.problems.append(Problem(place, f"data.{part}", error.message, remedy))
            except ImportError as error:
                remedy = "pip install async-opd[data]"
                self.problem(f"data.{part}", f"{name} needs {error.name}", remedy)
            self.unreadable |= not rows
            read.append(rows)
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

    def answers(self, part: str, rows: Sequence[Row], grader: str) -> None:
        """Rows to grade have an answer; a user's own grader and reasoning-gym may need none."""
        without = [r for r in rows if r.answer is None and "reasoning_gym" not in r.fields]
        if without and ":" not in grader:
            self.problem(
                f"data.{part}",
                f"{len(without)} rows have no {self.config.data.answer!r}, the first is "
                f"{without[0].uid}: {grader} would grade every response 0",
                "add the answers, or name their field in data.answer",
            )

    def lengths(self, part: str, sources: Sequence[Sequence[Row]], response: int) -> int | None:
        """Prompts and responses of so many tokens fit the models. Returns the prompts' limit."""
        if "student.model" not in self.files or not any(sources):
            return None
        own = part == "eval" and self.config.eval.max_tokens is not None
        key = "eval.max_tokens" if own else "rollout.max_tokens"
        limit = self._prompt_limit(key, response)
        if limit is None:
            return None
        text = Text(self.config.student.model, self.config.data.chat_template)
        for source, rows in zip(getattr(self.config.data, part), sources, strict=True):
            name = source.path if isinstance(source, FileSource) else source.task
            try:
                found = [
                    (row.uid, *_length_and_largest(text.encode(seen)))
                    for row in rows
                    for seen in self._seen(row)
                ]
            except Exception as error:  # a chat template can raise anything
                self.problems.append(
                    Problem(
                        name,
                        f"data.{part}",
                        f"a prompt cannot be tokenized: {type(error).__name__}: {error}",
                        "mend the prompt or the chat template, or set data.chat_template",
                    )
                )
                continue
            self._foreign(part, name, [(uid, largest) for uid, _, largest in found])
            wrong = [(uid, length) for uid, length, _ in found if not 1 <= length <= limit]
            if wrong:
                uid, length = wrong[0]
                self.problems.append(
                    Problem(
                        name,
                        f"data.{part}",
                        f"{len(wrong)} prompts are empty or longer than {limit} tokens, the first "
                        f"is row {int(uid.rpartition(':')[2]) + 1} with {length}",
                        f"shorten or remove them, or lower {key}: prompt, response and one more "
                        "token must fit the shortest model",
                    )
                )
        return limit

    def _foreign(self, part: str, name: str, largest: list[tuple[str, int]]) -> None:
        """A tokenizer's ids may have gaps, and end beyond the rows of a model that has enough.

        Its engine would die of one.
        """
        sizes = (f.vocabulary for f in self.files.values() if (f.vocabulary or 0) >= f.tokens)
        rows = min((size for size in sizes if size), default=None)
        foreign = [(uid, token) for uid, token in largest if rows is not None and token >= rows]
        if foreign:
            uid, token = foreign[0]
            message = (
                f"{len(foreign)} prompts have tokens beyond the {rows} of the smallest model, the "
                f"first is row {int(uid.rpartition(':')[2]) + 1} with token {token}"
            )
            remedy = "mend the prompts, or resize the model's embeddings"
            self.problems.append(Problem(name, f"data.{part}", message, remedy))

    def _seen(self, row: Row) -> list[PromptText]:
        """A row's prompt as the student sees it, and as its teacher does where that is another."""
        teacher = self.config.teacher_of(row.data_source)
        template = self.config.prompt_templates.get(teacher or "")
        return [row.prompt] if template is None else [row.prompt, filled(template, row)]

    def _prompt_limit(self, key: str, response: int) -> int | None:
        """Tokens a prompt may have: the shortest model must hold prompt, response and one more."""
        config = self.config
        lengths = {"student.model": config.rollout.engine.max_model_len}
        for name, teacher in config.teachers.items():
            if isinstance(teacher, EngineTeacher):
                lengths[f"teachers.{name}.model"] = teacher.engine.max_model_len
        positions = [lengths.get(name) or files.positions for name, files in self.files.items()]
        known = [value for value in positions if value]
        known += [
            teacher.engine.max_model_len
            for teacher in config.teachers.values()
            if isinstance(teacher, SelfTeacher) and teacher.engine.max_model_len
        ]
        limits = [value - response - 1 for value in known]
        if config.data.max_prompt_tokens:
            limits.append(config.data.max_prompt_tokens)
        if limits and min(limits) < 1:
            if any(problem.key == key for problem in self.problems):
                return None  # data.train and data.eval share the bound: said already
            self.problem(
                key,
                f"{response} leaves no room for a prompt: the shortest model has {min(known)} "
                "positions",
                "lower it",
            )
            return None
        return min(limits) if limits else None


def _length_and_largest(ids: list[int]) -> tuple[int, int]:
    return len(ids), max(ids, default=0)
