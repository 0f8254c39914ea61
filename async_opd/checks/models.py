"""Checks of the models: each alone, all together, for the objective."""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property

from async_opd.config.precision import SCHEMES
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import looks_like_a_variable
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.loss import ScoreKind, cuts, score_kind, scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher, EngineTeacher, SelfTeacher
from async_opd.core.errors import Findings
from async_opd.models.hub import named_models
from async_opd.models.lm_head import HeadFiles, LogitShape
from async_opd.models.model_files import QUANTIZATIONS, QUANTIZED, ModelError, ModelFiles
from async_opd.models.model_size import ModelSize
from async_opd.models.own_files import foreign
from async_opd.models.rope import Positions, max_model_len
from async_opd.models.tokenizer import Text

UNAVAILABLE: dict[ScoreKind, str] = {
    "student_topk": "the teacher's log-probabilities of the student's own best tokens",
    "hidden": "the teacher's hidden states",
}
"""Scores that no server's API returns."""
HEAD_DIMS_ON_CPU = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's CPU attention has kernels for."""

OVERRIDES = {"head_dtype", "architectures", *QUANTIZED}
"""Keys of a model's configuration that engines may override: they change no result but by rounding,
which is the purpose of the last two (see ``ModelChecks.quantized``)."""


def _shown(variable: str) -> str:
    """The variable's name, or a description of it if it may be the key itself."""
    if looks_like_a_variable(variable):
        return variable
    return "variable of the given name, which is not shown, for it may be the key itself"


def quantization(config: RunConfig, student: ModelFiles | None) -> str:
    """The config's key by which the student's engines are quantized; empty if by none."""
    if config.rollout.engine.quantization is not None:
        return "rollout.engine.quantization"
    extra = config.rollout.engine.extra
    overrides = extra.get("hf_overrides")
    given = extra | (overrides if isinstance(overrides, dict) else {})
    if any(given.get(key) is not None for key in ("quantization", *QUANTIZED)):
        return "rollout.engine.extra"
    if student is not None and student.quantized:
        return "student.model"
    return "" if config.sync.fake_quantization is None else "sync.fake_quantization"


def unproved(config: RunConfig, student: ModelFiles | None) -> str:
    """Why quantized student engines are not proved to have the trainer's weights, or nothing.

    The proof covers matrices that the trainer rounds by the same arithmetic as the engines.
    """
    name, lora = config.rollout.engine.quantization, config.train.lora
    if student is not None and ModelSize.of(student.config, ()).experts:
        return "rounded experts of a mixture are not compared"
    if name is not None and student is not None and "vision_config" in student.config:
        return "engines of a VLM student join matrices under other names than the trainer sends"
    if config.sync.fake_quantization is not None and lora is not None:
        return "the trainer does not compute held rows with adapters and rounded matrices"
    if quantization(config, student) == "sync.fake_quantization":
        return ""
    if name is None or not SCHEMES[name].known:
        known = " or ".join(one for one, scheme in SCHEMES.items() if scheme.known)
        by = f"by rollout.engine.quantization: {known} only"
        return f"the trainer can quantize its own weights as engines do {by}"
    if config.rollout.tensor_parallel > 1:
        return "engines with rollout.tensor_parallel above 1 divide the matrices that are compared"
    if lora is not None and lora.sync == "adapter":
        return "with train.lora.sync: adapter the matrices that engines quantize are not sent"
    return ""


@dataclass
class ModelChecks:
    """Reads every model's files once, into ``files`` by config key.

    ``partial``: keys of models whose files may be incomplete, as in the hub's cache.
    """

    config: RunConfig
    found: Findings
    partial: Set[str] = frozenset()
    files: dict[str, ModelFiles] = field(default_factory=dict)

    def models(self) -> None:
        """Checks that models can be read, and share the student's tokenizer."""
        for key, model in self._model_keys().items():
            try:
                files = ModelFiles.read(model, weights=key not in self.partial)
            except ModelError as error:
                self.found.add(key, error.message, error.remedy)
                continue
            if files is not None:
                self.files[key] = files
                self._vocabulary(key, files)
                self._own_code(key, files)
                self._redirected(key, files)
                self._quantization(key, files)
                self._links(key, files)
        student = self.files.get("student.model")
        if student is None:
            return
        self._student(student)
        for key, files in self.files.items():
            if not files.same_tokenizer(student):
                token = files.differing_token(student)
                self.found.add(
                    key,
                    f"{files.path} and the student have different tokenizers: token ids would "
                    f"mean different things to them{f' (token {token})' * bool(token)}",
                    "take a teacher with the student's tokenizer",
                )
            elif student.eos and files.eos:
                self._ends(key, files, student)

    def _ends(self, key: str, files: ModelFiles, student: ModelFiles) -> None:
        """Checks that a model ends responses with the same token as the student.

        That is the end of a turn in the student's template, or without one a common eos token.
        """
        end = self._turn_end
        if files is student and end is not None:
            return  # Text.response_ends adds this token to those of the student's files
        if end is None and not set(student.eos) & set(files.eos):
            self.found.add(
                key,
                f"{files.path} ends a response with token {list(files.eos)}, the student with "
                f"{list(student.eos)}: the student would be taught never to stop",
                "give both generation_config.json a common eos_token_id",
            )
        elif end is not None and end not in files.eos:
            self.found.add(
                key,
                f"the student's chat template ends an assistant's turn with token {end}, "
                f"{files.path} ends a response with {list(files.eos)}: the student would be taught "
                "never to end a turn",
                f"add {end} to its eos_token_id in generation_config.json, or set "
                "data.chat_template to never",
            )

    @cached_property
    def _turn_end(self) -> int | None:
        return Text.of(self.config).turn_end()

    def _model_keys(self) -> dict[str, str]:
        teachers = self.config.teachers.items()
        return {"student.model": self.config.student.model} | {
            f"teachers.{name}.model": teacher.model
            for name, teacher in teachers
            if not isinstance(teacher, SelfTeacher) and teacher.model is not None
        }

    def _engine_keys(self) -> set[str]:
        """Keys of the models that the run loads into its own engines."""
        teachers = self.config.teachers.items()
        own = {f"teachers.{name}.model" for name, t in teachers if isinstance(t, EngineTeacher)}
        return own | {"student.model"}

    def _vocabulary(self, key: str, files: ModelFiles) -> None:
        if files.vocabulary is not None and files.vocabulary < files.tokens:
            sizes = f"a vocabulary of {files.vocabulary}, its tokenizer {files.tokens} tokens"
            remedy = "resize its embeddings, or give it the tokenizer it was trained with"
            self.found.add(key, f"{files.path} has {sizes}", remedy)

    def _redirected(self, key: str, files: ModelFiles) -> None:
        """Checks that engines load the files that were checked, not another model's."""
        if files.redirects:
            effect = "other files would be loaded, or saved, in its place"
            message = f"{files.path} has {', '.join(files.redirects)}: {effect}"
            self.found.add(key, message, "name the model itself, without these")

    def _quantization(self, key: str, files: ModelFiles) -> None:
        """Checks that an engine runs no function that a model's quantization settings name."""
        unknown = files.unknown_quantization if key in self._engine_keys() else ""
        if unknown and not self._is_trusted(key):
            known = ", ".join(sorted(QUANTIZATIONS))
            message = f"{files.path} has {unknown}, whose settings may run code in an engine"
            remedy = f"take a model without it, or of one of these methods: {known}; or read its "
            remedy += f"files, then set {key.removesuffix('.model')}.trust_remote_code: true"
            self.found.add(key, message, remedy)

    def _is_trusted(self, key: str) -> bool:
        named = {named.key for named in named_models(self.config) if named.trusted}
        return key.removesuffix(".model") in named

    def _links(self, key: str, files: ModelFiles) -> None:
        """Checks that a model's files are its own: links lead to no other file of the user's."""
        for file in foreign(files.path):
            effect = "out of the model: its contents would get into the trained model, or into "
            effect += "prompts that a server is sent"
            if os.path.isdir(file):
                effect = "a folder, whose files are not checked and which engines would open"
            message = f"{file} is a link to {os.path.realpath(file)}, {effect}"
            self.found.add(key, message, "put the file itself there, or remove the link")

    def _own_code(self, key: str, files: ModelFiles) -> None:
        """Checks that code is trusted, and lies in the pinned repository, not in another one."""
        section = key.removesuffix(".model")
        if not self._is_trusted(key):
            needed = [one for one in files.code if not one.unused]
            if needed and key in self._engine_keys():
                message = f"{files.path}/{needed[0].place} names code of the model, "
                message += f"{needed[0].name[:80]!r}, which is not trusted"
                remedy = f"remove it from the file, or read the code, then set {section}."
                self.found.add(key, message, f"{remedy}trust_remote_code: true")
            return
        classes = sorted((one for one in files.code if "--" in one.name), key=lambda one: one.name)
        if classes:
            self.found.add(
                f"{section}.trust_remote_code",
                f"{files.path}/{classes[0].place} takes {classes[0].name[:80]!r}: code of "
                "another repository, of no revision",
                "copy the code beside the model and name it there without the repository",
            )

    def support(self) -> None:
        """Checks the objective's needs: enough tokens, an order of tokens, loadable heads."""
        config = self.config
        kind, top_k = score_kind(config.loss), scored_top_k(config.loss)
        smallest = min((f.vocabulary for f in self.files.values() if f.vocabulary), default=top_k)
        if top_k > smallest:
            message = f"{top_k} is more than the vocabulary of {smallest} tokens"
            self.found.add("loss.top_k", message, f"at most {smallest}")
        rollout = config.rollout
        if kind == "student_topk":
            for key, value, neutral in cuts(rollout.top_p, rollout.top_k, rollout.min_p):
                self.found.add(
                    key,
                    f"{value} leaves the tokens that the student does not sample from without an "
                    f"order, and loss.support student_topk takes its best {top_k}",
                    f"{neutral}, or another loss.support",
                )
        self._endpoints(kind)
        self._refreshed(kind)
        if kind == "hidden":
            self._heads()

    def _refreshed(self, kind: ScoreKind) -> None:
        """Checks that a refreshed teacher is awake for its weights, and has a separate head."""
        for name, teacher in self.config.teachers.items():
            if not isinstance(teacher, SelfTeacher) or not teacher.refresh_every:
                continue
            key, found = f"teachers.{name}.refresh_every", f"found {teacher.refresh_every}, but"
            if teacher.host is not None:
                message = f"{found} the teacher is colocated, and asleep when its weights come"
                self.found.add(key, message, "0, or placement dedicated")
            if kind == "hidden":
                message = f"{found} with full_vocab the trainer applies the teacher's initial head"
                self.found.add(key, message, "0, or another loss.support")

    def _endpoints(self, kind: ScoreKind) -> None:
        """Checks that servers can return the objective's scores, and that their keys are set."""
        for name, teacher in self.config.teachers.items():
            if not isinstance(teacher, EndpointTeacher):
                continue
            if kind in UNAVAILABLE:
                self.found.add(
                    f"teachers.{name}.kind",
                    f"the objective needs {UNAVAILABLE[kind]}, which no server returns: their APIs "
                    "give the log-probabilities of the sampled token and of the teacher's best",
                    "kind vllm, or a loss of sampled tokens or with support teacher_topk",
                )
            if teacher.api_key_env is not None and not os.environ.get(teacher.api_key_env):
                self.found.add(
                    f"teachers.{name}.api_key_env",
                    f"the environment has no {_shown(teacher.api_key_env)}",
                    "export it; never write the key itself into a config",
                )

    def _heads(self) -> None:
        for key, files in self.files.items():
            try:
                if key != "student.model" and key not in self.partial:
                    HeadFiles.read(files.path)
            except ModelError as error:
                self.found.add(key, error.message, error.remedy)

    def _student(self, files: ModelFiles) -> None:
        if files.untrainable:
            remedy = "a causal language model of text"
            self.found.add("student.model", f"{files.path} {files.untrainable}", remedy)
        try:
            LogitShape.of(files.config, str(files.path))
        except ModelError as error:
            self.found.add("student.model", error.message, "another student")
        if not files.eos and "student.model" not in self.partial:
            effect = "every response would run to rollout.max_tokens"
            message = f"{files.path} names no eos_token_id: {effect}"
            self.found.add("student.model", message, "set it in generation_config.json")

    def head_sizes(self) -> None:
        """Checks that vLLM has attention kernels on the CPU for the engines' models."""
        for key in sorted(self._engine_keys() & self.files.keys()):
            for size in sorted(self.files[key].head_sizes - set(HEAD_DIMS_ON_CPU)):
                possible = ", ".join(map(str, HEAD_DIMS_ON_CPU))
                message = f"head size {size} has no attention kernel on CPU"
                self.found.add(key, message, f"possible: {possible}")

    @property
    def rows(self) -> int | None:
        """Embedding rows of the smallest model that has one for each token of its tokenizer."""
        sizes = (f.vocabulary for f in self.files.values() if (f.vocabulary or 0) >= f.tokens)
        return min((size for size in sizes if size), default=None)

    def prompt_limit(self, key: str, response: int) -> tuple[int, str] | None:
        """The most tokens of a prompt, and the config's key that sets this limit.

        The shortest model must hold prompt, response and one more token;
        ``data.max_prompt_tokens`` may be lower. None if there is no limit, or no room for a prompt.
        """
        known = [value for value in self._lengths() if value]
        if known and min(known) - response - 1 < 1:
            if not self.found.has(key):  # data.train and data.eval share the bound
                room = f"the shortest model has {min(known)} positions"
                message = f"{response} leaves no room for a prompt: {room}"
                most = f"at most {min(known) - 1} less the tokens of the longest prompt"
                self.found.add(key, message, most if min(known) > 2 else "take another model")
            return None
        limits = [(value - response - 1, key) for value in known]
        if self.config.data.max_prompt_tokens:
            limits.append((self.config.data.max_prompt_tokens, "data.max_prompt_tokens"))
        return min(limits, default=None)

    def _lengths(self) -> Iterator[int | None]:
        """Tokens of the longest sequence of each engine and server; None if unknown."""
        for _, engine, files in self.engines():
            given = max_model_len(engine)
            yield given if files is None else Positions.of(files.config, given).longest
        for key in self.files.keys() - self._engine_keys():
            yield self.files[key].positions

    def engines(self) -> Iterator[tuple[str, EngineConfig, ModelFiles | None]]:
        """The config's sections of the run's own engines, their settings and models' files."""
        student = self.files.get("student.model")
        yield "rollout", self.config.rollout.engine, student
        for name, teacher in self.config.teachers.items():
            if isinstance(teacher, SelfTeacher):
                yield f"teachers.{name}", teacher.engine, student
            elif isinstance(teacher, EngineTeacher):
                key = f"teachers.{name}"
                yield key, teacher.engine, self.files.get(f"{key}.model")

    def heads(self) -> None:
        """Checks that no quantized head is to compute float32: vLLM refuses its first logits."""
        for section, engine, files in self.engines():
            quantization = files and files.config.get("quantization_config")
            quantized = isinstance(quantization, dict) and quantization.get("lm_head") is True
            if quantized and engine.head_dtype == "float32":
                message = "the head of this model is quantized: its engine computes no float32"
                self.found.add(f"{section}.engine.head_dtype", message, "set it to model")

    def quantized(self) -> None:
        """Checks that no proof of freshness is asked of engines of which there is none (ADR 13)."""
        student = self.files.get("student.model")
        key, every = quantization(self.config, student), self.config.sync.verify_every
        if not key:
            return
        reason = unproved(self.config, student)
        blind = "the student's engines are quantized, and their rounding hides outdated weights"
        if every and reason:
            message = f"{blind} from the proof that sync.verify_every: {every} asks for: {reason}"
            remedy = (
                "set sync.verify_every: 0, to train on samples of weights that are not proved to "
                "be the trainer's, or do not quantize the student's engines"
            )
            self.found.add(key, message, remedy)
        elif not every:
            nothing = (
                "with sync.verify_every: 0 nothing proves that they have the trainer's weights"
            )
            proof = "" if reason else "; sync.verify_every above 0 would prove it by digests"
            self.found.notes.append(f"{key}: {blind}: {nothing}{proof}")

    def positions(self) -> None:
        """Checks that engines stay within their models' positions, and do not alter the student."""
        for section, engine, files in self.engines():
            found = files and Positions.of(files.config, max_model_len(engine))
            if found and found.fault:
                most = f"at most {found.original}"
                self.found.add(f"{section}.engine.max_model_len", found.fault, most)
        changed = self.config.rollout.engine.extra.get("hf_overrides")
        others = sorted(changed.keys() - OVERRIDES) if isinstance(changed, dict) else []
        if others:
            message = f"hf_overrides changes {', '.join(others)} of the student in its engines only"
            remedy = "change the student's config.json, which the trainer reads too"
            self.found.add("rollout.engine.extra", message, remedy)
