"""Bytes of rollouts and samples in the queue, from the config and the teachers' files alone.

    bytes of         prompt token   response token
    rollout          4              8, and 4·k with the student's own top-k
    sample           4              8, and its scores:
      sampled                       4
      teacher_topk                  8 + 8·k
      student_topk                  8 + 8·k
      hidden                        H · 2 or 4, by the engine's dtype

With ``train.routing: replay`` each token of both has k experts in each layer, of 1 or 2 bytes.

Upper bounds: every response has ``rollout.max_tokens``; an episode's has that in each turn, and
its observations are as prompt tokens, for the student and, by its view, for the teacher.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import ScoreKind, score_kind, scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher, EngineTeacher
from async_opd.core.batch import MESSAGE_BYTES, cut
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec
from async_opd.models.engine_args import Device

ITEM_BYTES = 1024
"""Of an item beside its tokens: uids, spans, versions, what pickle adds. Rounded up."""
NUMBER = 4
"""Bytes of a token id (int32), and of a log-probability (float32)."""


def rollout_bytes(kind: ScoreKind, top_k: int) -> int:
    """Bytes of a rollout per response token: id, log-probability, the student's top-k."""
    return 2 * NUMBER + (NUMBER * top_k if kind == "student_topk" else 0)


def score_bytes(kind: ScoreKind, top_k: int, hidden: int = 0, itemsize: int = 0) -> int:
    """Bytes of a teacher's scores per response token.

    ``hidden`` is the width of the hidden states, ``itemsize`` the bytes of one number of them.
    """
    if kind == "hidden":
        return hidden * itemsize
    return NUMBER if kind == "sampled" else 2 * NUMBER * (top_k + 1)  # + 1: the tail's mass


def sample_bytes(kind: ScoreKind, top_k: int, hidden: int = 0, itemsize: int = 0) -> int:
    """Bytes of a sample per response token: the rollout without its top-k, and the scores."""
    return 2 * NUMBER + score_bytes(kind, top_k, hidden, itemsize)


STORED_MESSAGES = 4
"""Times ``MESSAGE_BYTES`` that a call's samples have which stay on their node: the replica holds
them for a while, some of them twice."""


@dataclass(frozen=True)
class Payload:
    """Bytes for each response token of one teacher's rollouts and samples."""

    teacher: str
    kind: ScoreKind
    rollout: int
    sample: int

    def call_tokens(self, stored: bool = False) -> int:
        """Tokens of one call to a replica, so that its answer is one message; at least one.

        Of ``stored`` samples it has the rollouts; their own bytes are those of ``STORED_MESSAGES``.
        """
        most = MESSAGE_BYTES // self.sample
        if stored:
            most = min(
                STORED_MESSAGES * MESSAGE_BYTES // self.sample, MESSAGE_BYTES // self.rollout
            )
        return max(most, 1)


def payloads(config: RunConfig, device: Device) -> list[Payload]:
    """The payload of each teacher, but of those whose hidden states' width cannot be read here."""
    kind, top_k = score_kind(config.loss), scored_top_k(config.loss)
    found = []
    routing = routing_bytes(config)
    for name, teacher in config.teachers.items():
        hidden = itemsize = 0
        if kind == "hidden" and isinstance(teacher, EngineTeacher):
            width = _width(config.teacher_model(name))
            if width is None:
                continue
            hidden, itemsize = width, _itemsize(teacher, device)
        sample = sample_bytes(kind, top_k, hidden, itemsize) + routing
        found.append(Payload(name, kind, rollout_bytes(kind, top_k) + routing, sample))
    return found


STORED_FROM = 1 << 20
"""Bytes of a sample from which on it is stored: queue and scorer then need a sixth of the processor
time that it costs them by value, and less for larger ones (``python -m benchmarks.payloads``)."""


def stored_from(config: RunConfig, device: Device) -> int | None:
    """Bytes from which on a sample's payload is stored on its node; None if none can be."""
    found = payloads(config, device)
    if config.queue.payloads == "value" or not found:
        return None
    if config.queue.payloads == "reference":
        return 0
    most = config.response_tokens * max(one.sample for one in found)
    return STORED_FROM if most >= STORED_FROM else None


def call_tokens(config: RunConfig, device: Device) -> dict[str, int]:
    """See Payload.call_tokens, of each teacher; the samples of servers are not stored."""
    stored = stored_from(config, device) is not None
    return {
        one.teacher: one.call_tokens(
            stored and not isinstance(config.teachers[one.teacher], EndpointTeacher)
        )
        for one in payloads(config, device)
    }


def routing_bytes(config: RunConfig) -> int:
    """Bytes of the experts of one token; 0 if they are not sent, or the student cannot be read."""
    if config.train.routing == "own":
        return 0
    from async_opd.models.json_files import read_json
    from async_opd.models.tokenizer import text_settings  # imports tokenizers

    settings = text_settings(read_json(Path(config.student.model) / "config.json"))
    entries = settings.get("num_hidden_layers", 0) * settings.get("num_experts_per_tok", 0)
    return int(entries) * (1 if settings.get("num_experts", 0) <= 256 else 2)


def _width(model: str) -> int | None:
    from async_opd.models.lm_head import HeadFiles  # imports tokenizers, only needed here
    from async_opd.models.model_files import ModelError

    try:
        return HeadFiles.read(model).hidden
    except ModelError:
        return None


def _itemsize(teacher: EngineTeacher, device: Device) -> int:
    dtype = teacher.engine.extra.get("dtype", teacher.engine.dtype)
    if dtype == "auto":
        return 4 if device == "cpu" else 2
    return 4 if dtype in ("float32", "float") else 2


@dataclass(frozen=True)
class Traffic:
    """Upper bounds of what a run moves and holds, in bytes.

    ``rollout``, ``sample``: the longest of each. ``step_rollouts``, ``step_samples``: those of one
    optimizer step, once into the queue and once out of it. ``queue``: all the queue's samples,
    leased ones included, without temporary copies.
    """

    rollout: int
    sample: int
    step_rollouts: int
    step_samples: int
    queue: int


def traffic(config: RunConfig, found: list[Payload], prompt_tokens: int) -> Traffic:
    """The traffic with the largest payload of all teachers; prompts have up to ``prompt_tokens``.

    The queue holds at most the (1 + s) · K · B samples of the staleness budget, and each topic at
    most queue.max_mib, or one message. Topic ``scored`` may also hold two batches, which the
    trainer takes however large they are (``Topic._has_room``).
    """
    response, batch = config.response_tokens, config.train.batch_size
    rest = ITEM_BYTES + (NUMBER + routing_bytes(config)) * prompt_tokens
    if config.environment is not None:
        rest += NUMBER * (2 * config.context_tokens + prompt_tokens + response)
    rollout = rest + response * max((one.rollout for one in found), default=0)
    sample = rest + response * max((one.sample for one in found), default=0)
    most, samples = config.queue.max_mib << 20, config.queue.max_samples
    topic = min(samples * rollout, max(most, rollout, MESSAGE_BYTES))
    scored = min(samples * sample, max(most, sample, MESSAGE_BYTES))
    topics = (len(config.teachers) + 1) * topic + max(scored, 2 * batch * sample)
    queue = min(topics, config.max_in_flight * max(rollout, sample))
    return Traffic(rollout, sample, batch * rollout, batch * sample, queue)


def image_copies(config: RunConfig, teacher: str) -> float:
    """How often a prompt's images cross a process border for each of its samples, at most.

    To the queue, to one replica of the student, and to those replicas of its teacher and those
    ranks that get any of its ``rollout.n`` rollouts, as long as their caches hold them. A server
    gets them with every request, in base64: 4 bytes of 3.
    """
    n, ranks = config.rollout.n, config.train.ranks // config.train.context_parallel
    scores = config.teachers[teacher]
    sent = 4 / 3 if isinstance(scores, EndpointTeacher) else 0.0
    return (2 + min(n, scores.max_replicas) + min(n, ranks)) / n + sent


def images_in_words(config: RunConfig, shown: Sequence[tuple[str, int]]) -> str:
    """Bytes of prompts' images, moved and held; ``shown``: teacher and bytes of each of these."""
    nbytes = [each for _, each in shown]
    mean, most = sum(nbytes) / len(nbytes), max(nbytes)
    copies = max(image_copies(config, teacher) for teacher in {name for name, _ in shown})
    return (
        f"images: {in_mib(round(mean))} a prompt that has some, {in_mib(most)} at most; for each "
        f"sample they cross process borders {copies:.2g} times at most, and the queue holds those "
        f"in flight, up to {in_mib(config.queue.max_image_mib << 20)}"
    )


def kept_steps(config: RunConfig) -> int:
    """Steps that ``log.replay`` keeps: those since the oldest checkpoint that is kept.

    A best one (``checkpoint.keep_best``) may be older; without checkpoints there are all steps.
    """
    between = config.steps_between(config.checkpoint)
    steps = config.train.steps
    return min(config.checkpoint.keep * between, steps) if between else steps


def kept_in_words(config: RunConfig, traffic: Traffic) -> str:
    """Bytes that ``log.replay`` writes to the disk, at most."""
    steps, step = kept_steps(config), traffic.step_samples
    all_ = min(steps * step, int(config.log.replay_gib * (1 << 30)))
    beyond = ""
    if all_ < steps * step:
        beyond = f", which log.replay_gib cuts from {in_mib(steps * step)}: oldest steps first"
    return (
        f"log.replay: at most {in_mib(step)} a step in the run directory, of {steps} steps since "
        f"the oldest checkpoint {in_mib(all_)}{beyond}"
    )


def refused(config: RunConfig, traffic: Traffic) -> tuple[str, str, str] | None:
    """(key, what is wrong, remedy) if the largest sample exceeds ``queue.max_mib``, else None."""
    longest, mib = max(traffic.rollout, traffic.sample), config.queue.max_mib
    if longest <= mib << 20:
        return None
    least = -(-longest // (1 << 20))
    return (
        "queue.max_mib",
        f"found {mib}, but a single sample of {config.response_tokens} response tokens may have "
        f"{in_mib(longest)}",
        f"at least {least}, a smaller rollout.max_tokens, or a loss.support with a smaller payload",
    )


@dataclass(frozen=True)
class EpisodeBounds:
    """The bounds of a run's episodes.

    The most ``tokens`` after the prompt of one, the ``seconds`` that it may take, and how many a
    replica plays at the same time.
    """

    tokens: int
    seconds: float
    concurrency: int

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Those of a run; None without an environment."""
        played = config.environment
        if played is None:
            return None
        tokens = config.answer_tokens + config.context_tokens
        return cls(tokens, played.timeouts.episode_s, played.concurrency)


def calls(
    prompts: Sequence[Prompt], sampling: SamplingSpec, episodes: EpisodeBounds | None = None
) -> Iterator[list[Prompt]]:
    """The prompts in parts; the answers to a part, ``sampling.n`` per prompt, fit one message.

    An episode may have its teacher's view of all tokens, too.
    """
    answer, views = ITEM_BYTES + rollout_bytes("sampled", 0) * sampling.max_tokens, 1
    if episodes is not None:
        views = 2
        answer = ITEM_BYTES + (rollout_bytes("sampled", 0) + NUMBER) * episodes.tokens
    return cut(prompts, lambda p: sampling.n * (answer + views * NUMBER * len(p.token_ids)))


def in_mib(nbytes: int) -> str:
    """Bytes in the largest unit that is at most their number: ``16.0 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):.1f} {unit}"
    return f"{nbytes} B"
