"""The ``teachers`` section: kinds of teacher, and bounds of calls to their replicas."""

from __future__ import annotations

from abc import abstractmethod
from ipaddress import ip_address
from string import Formatter
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_validator, model_validator

from async_opd.config.sections.elastic import Pooled, Replicas
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.section import Count, ModelSection, Name, Rendering, Section

CALL_SAMPLES = 64
"""Most rollouts in one call to a replica of a teacher: with larger calls one replica would have all
that is ready, and the others nothing."""


RESPONSES = 40
"""Lowest speed of a replica over that of one of the responses that it generates side by side."""


class CallHealth(Section):
    """Timeouts and tries of calls to a teacher."""

    timeout_s: float = Field(default=60, gt=0)
    """Timeout of a call, to which the time of the tokens outstanding on its replica is added."""
    min_tokens_per_s: float = Field(default=200, gt=0)
    """Lowest assumed speed of a replica, which gives the time of its outstanding tokens. One
    response of the teacher itself (``eval.teachers``) may be forty times as slow, which gives the
    timeout of its ``max_tokens``."""
    tries: int = Field(default=4, ge=2)
    """Calls with a rollout before it is dead-lettered: half of them with its whole batch, the
    others alone."""

    @property
    def min_response_tokens_per_s(self) -> float:
        """Lowest assumed speed of one response."""
        return self.min_tokens_per_s / RESPONSES

    def response_s(self, tokens: int) -> float:
        """Timeout in seconds of one response of ``tokens``, which are generated one by one."""
        return self.timeout_s + tokens / self.min_response_tokens_per_s


class HealthConfig(CallHealth):
    """Bounds after which a teacher's replica counts as broken."""

    probes: Count = 5
    """Probes of a replica that failed, at the times of ``supervision.delay_s``: it must score a
    rollout that was scored before. After the last one it is rebuilt; a dead replica at once."""


class EndpointHealth(CallHealth):
    """Bounds after which a server counts as gone. The run cannot restart a server."""

    patience_s: float = Field(default=600, gt=0)
    """A server that fails is probed for this time, at most 30 s apart, and then removed. Without
    any server left the run fails."""


class Teacher(Pooled, Rendering):
    """Settings of every kind of teacher.

    It reads prompts as the student does, but for its own ``chat_template_file``,
    ``chat_template_kwargs``, ``system_prompt`` and ``response_prefix``.
    """

    sources: list[Name] | None = None
    """Values of ``data.route_by`` whose rows this teacher scores; by default its own name, and all
    rows if it is the only teacher."""
    weight: PositiveFloat | Literal["auto"] = 1.0
    """Factor of its samples in the distillation loss, beside those of other teachers: the loss is a
    weighted mean, so that only ratios between teachers matter. ``auto``, of all teachers: computed
    before each step from their gaps and tokens, so that no teacher starves the others
    (docs/objectives.md)."""
    temperature: float = Field(default=1.0, ge=0.01, le=100)
    """The teacher's scores are those of softmax(logits / temperature): above 1 unlikely tokens get
    more weight, below 1 less. Its own answers (``eval.teachers``) do not use it."""
    max_dead_letter_share: float = Field(default=0.01, ge=0, le=1)
    """Share of this teacher's rollouts that may be dead-lettered before the run stops, with exit
    code 1. It is taken of at least 1000 rollouts: by default the first ten are always allowed.
    Streamed rows that cannot be read or have no teacher count against the smallest share, taken of
    all rollouts."""
    prompt_template: str | None = Field(default=None, min_length=1)
    """The teacher's prompt, if it differs from the student's: a text with fields of the data row in
    braces, as in ``"{prompt} Hint: {answer}"``. A single field in braces is used unchanged, so that
    it may hold chat messages. The result is then rendered with a chat template as any prompt.
    Scores still cover the student's response."""

    own_template: bool = False
    """Renders its prompts with its model's chat template, where others take the
    student's. The response's tokens stay the same, and follow a thought that is as open as in the
    student's prompt (docs/data.md)."""

    @property
    def renders(self) -> bool:
        """Whether its prompts are rendered otherwise than the student's."""
        settings = (self.chat_template_file, self.system_prompt, self.response_prefix)
        return (
            self.own_template
            or self.chat_template_kwargs is not None
            or any(one is not None for one in settings)
        )

    @field_validator("prompt_template")
    @classmethod
    def _has_fields(cls, template: str | None) -> str | None:
        if template is not None and not any(name for _, name, _, _ in Formatter().parse(template)):
            raise ValueError("a template with at least one {field} of the data row")
        return template

    @property
    @abstractmethod
    def gpus(self) -> int:
        """GPUs of each replica."""

    @property
    def host(self) -> Literal["rollout", "train"] | None:
        """The pool whose GPUs the teacher shares, if any."""
        return None

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Maximum number of rollouts in one call to a replica."""


class EngineTeacher(Teacher):
    """A teacher in the run's own vLLM engines."""

    replicas: Replicas = 1
    """Independent engines of this teacher, or ``{min: 1, max: 4}`` of them, as of ``rollout``."""
    tensor_parallel: Count = 1
    """GPUs of each engine."""
    engine: EngineConfig = EngineConfig()
    """Settings of each engine."""
    health: HealthConfig = HealthConfig()
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """``dedicated``: on separate GPUs. ``colocated``: on the GPUs of another pool, alternating
    with it: the teacher sleeps, wakes when a batch of rollouts waits for teachers or the pool is
    idle, scores all waiting rollouts, and sleeps again."""
    with_: Literal["rollout", "train"] | None = Field(default=None, alias="with")
    """The pool whose GPUs a colocated teacher shares: each replica those of one engine or rank, or
    of as many as have its ``tensor_parallel`` GPUs."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel

    @property
    def host(self) -> Literal["rollout", "train"] | None:
        """The pool whose GPUs it shares, if it is colocated."""
        return self.with_ if self.placement == "colocated" else None

    @model_validator(mode="after")
    def _colocated_has_a_pool(self) -> Self:
        if (self.placement == "colocated") != (self.with_ is not None):
            raise ValueError("'placement: colocated' and 'with: rollout' or 'with: train' together")
        return self

    @property
    def batch_size(self) -> int:
        size = self.engine.max_num_seqs
        return CALL_SAMPLES if size == "auto" else min(size, CALL_SAMPLES)


class VllmTeacher(EngineTeacher, ModelSection):
    """A model in the run's own vLLM engines."""

    kind: Literal["vllm"] = "vllm"
    max_bias: float = Field(default=0.1, ge=0)
    """Of a teacher whose engine quantizes weights or KV cache: the largest bias as a share of its
    signal KL(teacher ‖ student). ``doctor --engines`` and ``probe`` measure it against the weights
    of its files, and refuse a larger one (docs/doctor.md)."""


class SelfTeacher(EngineTeacher):
    """The student itself, with its initial weights or those of an earlier weight version."""

    kind: Literal["self"]
    refresh_every: int = Field(default=0, ge=0)
    """Weight versions after which the teacher takes the student's newest weights, through a copy in
    the run directory; 0: it keeps the initial ones."""


class EndpointTeacher(Teacher):
    """A model on external servers."""

    kind: Literal["endpoint"]
    urls: list[str] = Field(min_length=1)
    """Servers of the same model, as ``http://host:port``, with the load balanced over them."""
    api: Literal["vllm", "sglang"] = "vllm"
    """``vllm``: an OpenAI-compatible vLLM server (``/v1/completions``); ``sglang``: an SGLang
    server (``/generate``)."""
    served_model: str = Field(min_length=1)
    """The model's name on the servers; checked before any engine starts."""
    model: str | None = Field(default=None, min_length=1)
    """Directory or hub id of the same model, whose tokenizer, vocabulary and length are compared
    with the student's. By default only the servers' answers are."""
    revision: str | None = Field(default=None, pattern=r"^[\w./-]+$", max_length=200)
    """Commit, tag or branch of a hub id; by default the newest."""
    api_key_env: Name | None = None
    """Environment variable with the servers' key, sent as a bearer token. The key itself is in no
    file and no log. Every process that calls the servers reads it from its own environment: in a
    joined cluster from that of its node."""
    allow_http_key: bool = False
    """Allows sending the key to ``http://`` servers of other machines, unencrypted."""
    concurrency: Count = 32
    """Requests in flight at each server."""
    health: EndpointHealth = EndpointHealth()

    @field_validator("temperature")
    @classmethod
    def _servers_score_at_one(cls, temperature: float) -> float:
        if temperature != 1:
            raise ValueError("1, at which servers score; another one needs kind: vllm")
        return temperature

    @property
    def replicas(self) -> int:
        """Number of servers."""
        return len(self.urls)

    @property
    def gpus(self) -> int:
        return 0

    @property
    def batch_size(self) -> int:
        return self.concurrency

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, name: str | None) -> str | None:
        if name is not None and not name.isidentifier():
            raise ValueError("the name of an environment variable, not the key")
        return name

    @field_validator("urls")
    @classmethod
    def _are_servers(cls, urls: list[str]) -> list[str]:
        """Without trailing slashes, and without ``/v1``, which users copy along."""
        servers = [url.rstrip("/").removesuffix("/v1") for url in urls]
        for url in servers:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"http://host:port, not {url!r}")
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError("URLs without credentials or ?…: the key belongs in api_key_env")
        if len(set(servers)) < len(servers):
            raise ValueError("each server once")
        return servers

    @model_validator(mode="after")
    def _keys_travel_encrypted(self) -> Self:
        plain = [url for url in self.urls if not _is_private(url)]
        if plain and self.api_key_env and not self.allow_http_key:
            raise ValueError(
                f"https for {plain[0]}, which gets a key, or 'allow_http_key: true' if the network "
                "between is private"
            )
        return self


def _is_private(url: str) -> bool:
    """Whether requests to the server are encrypted or stay on this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        local = ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    return local or parts.scheme == "https"


TeacherConfig = Annotated[VllmTeacher | EndpointTeacher | SelfTeacher, Field(discriminator="kind")]
