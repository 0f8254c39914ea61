"""The findings of ``doctor --engines``, on fake pools and teachers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.cli import main
from async_opd.cluster import launch, launch_parts
from async_opd.config.run_config import RunConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import EngineStartError
from async_opd.core.reports import SyncReport
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs, TopK
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.models.tokenizer import Text
from async_opd.tools.doctor.engines import examine_engines
from async_opd.tools.doctor.finding import Finding
from async_opd.tools.engines import ITSELF, ToolEngines
from async_opd.weight_sync.layout import HeldRow, Reference, WeightMeta
from tests.checks.inputs import EXAMPLE, FEW, config, model
from tests.world.cli import Cli

LIMIT = 1e-3
HELD = HeldRow(np.array([1, 2, 3], np.int32), 2)
PROMPTS = [
    Prompt(Uid("0:0"), "sort", "sort", np.array([5, 6], np.int32)),
    Prompt(Uid("0:1"), "reverse", "reverse", np.array([6, 5], np.int32)),
]


@dataclass
class Pools:
    """The stages of a launch. Log-probabilities of all tokens are -1 everywhere.

    ``syncs`` are the differences on held rows of the first sync and of the update.
    """

    syncs: list[float] = field(default_factory=lambda: [1e-4, 1e-4])
    answer: tuple[int, ...] = (7, 2)
    calls: list[str] = field(default_factory=list)

    @property
    def rollouter(self) -> Pools:
        return self

    @property
    def trainer(self) -> Pools:
        return self

    @property
    def queue(self) -> Pools:
        return self

    async def keep_media(
        self, owned: Any, complete: bool = False, encoded: Any = None
    ) -> list[str]:
        self.calls.append(f"images of {', '.join(owned)}")
        return []

    async def drop_media(self, owners: Sequence[str]) -> None:
        self.calls.append("no images")

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def snapshot(self, version: int, again: bool = False) -> WeightMeta:
        self.calls.append(f"snapshot {version}")
        reference = Reference((HELD,), (np.array([-1, -1], np.float32),), {"text": 1.0}, 1e-7)
        return WeightMeta((), (), (), (), reference=reference)

    async def push(self) -> SyncReport:
        found = self.syncs.pop(0)
        metrics = {"sync/freshness_nats": found, "sync/freshness_limit_nats": LIMIT}
        return SyncReport(0, metrics | {"sync/student/0/freshness_nats": found})

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
        ids = np.array(self.answer, np.int32)
        spans = (VersionSpan(0, 0, len(ids)),) if len(ids) else ()
        logprobs = np.full(len(ids), -1, np.float32)
        return [
            Rollout.plain(rollout_uid(one.uid, 0), one, ids, logprobs, spans, "stop")
            for one in prompts
        ]

    async def supervise(self, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        self.calls.append("update")
        return {}


@dataclass
class Replica:
    """Gives every token the log-probability ``value``, and with ``topk`` another one the rest.

    ``read`` gets the prompts that it reads.
    """

    value: float
    topk: bool = False
    read: list[tuple[int, ...]] = field(default_factory=list)

    async def score(self, batch: Batch) -> Batch:
        items = [one for one in batch.unpack() if isinstance(one, Rollout)]
        self.read += [tuple(one.for_teacher.prompt.token_ids.tolist()) for one in items]
        return Batch.pack([Sample(one, self._scores(len(one.rollout_logprobs))) for one in items])

    def _scores(self, length: int) -> SampledLogprobs | TopK:
        own = np.full(length, self.value, np.float32)
        if not self.topk:
            return SampledLogprobs(own)
        both = np.float32([self.value, np.log1p(-np.exp(self.value))])
        rest = np.full(length, -100, np.float32)
        return TopK(np.tile(np.int32([20, 21]), (length, 1)), np.tile(both, (length, 1)), own, rest)


@dataclass
class Cluster:
    """Fakes of what is launched; ``teachers`` has the values of each teacher's replicas."""

    pools: Pools = field(default_factory=Pools)
    teachers: dict[str, list[float]] = field(
        default_factory=lambda: {ITSELF: [-1.0], "sort": [-2.0], "reverse": [-2.0]}
    )
    launched: list[RunConfig] = field(default_factory=list)
    shown: dict[str, list[str]] = field(default_factory=dict)
    """Of each teacher the prompts whose images it was given."""
    read: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """Of each teacher the prompts that it read, of all its starts."""
    fails: bool = False

    @asynccontextmanager
    async def launch(self, config: RunConfig, **_: Any) -> AsyncIterator[Pools]:
        if self.fails:
            raise EngineStartError("student/0", "out of memory", "a smaller model")
        self.launched.append(config)
        yield self.pools

    @asynccontextmanager
    async def launch_teacher(
        self, config: RunConfig, name: str, prompts: Sequence[Prompt] = (), **_: Any
    ) -> AsyncIterator[list[Replica]]:
        self.launched.append(config)
        self.shown[name] = [one.uid for one in prompts]
        teacher = config.teachers[name]
        low = teacher.kind == "vllm" and teacher.engine.low_precision
        key = f"{'low' if low else teacher.kind} {name}"
        topk = config.loss.kind == "forward_kl"
        read, values = self.read.setdefault(name, []), self.teachers.get(key, self.teachers[name])
        yield [Replica(value, topk, read) for value in values]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(launch, "launch", made.launch)
    monkeypatch.setattr(launch_parts, "launch_teacher", made.launch_teacher)
    return made


def found(tmp_path: Path, *overrides: str, prompts: Sequence[Prompt] = PROMPTS) -> list[Finding]:
    engines = ToolEngines("cpu", (2,), [].append)
    work = examine_engines(config(*overrides), engines, prompts, tmp_path)
    return asyncio.run(work)


def test_engines_that_agree_are_ok(cluster: Cluster, tmp_path: Path) -> None:
    lines = found(tmp_path)
    assert {one.status for one in lines} == {"ok"}
    assert cluster.pools.calls == ["snapshot 0", "update", "snapshot 1"]
    assert [sorted(one.teachers) for one in cluster.launched[1:]] == [
        [ITSELF],
        ["sort"],
        ["reverse"],
    ]


def test_every_sync_is_proven_and_the_run_directory_is_left_alone(
    cluster: Cluster, tmp_path: Path
) -> None:
    found(tmp_path, "sync.verify_every=0", "run_dir=/elsewhere")
    assert cluster.launched[0].sync.verify_every == 1
    assert cluster.launched[0].run_dir == str(tmp_path)


def test_a_scoring_engine_that_is_off_is_a_floor_with_a_warning(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.teachers[ITSELF] = [-1.25]
    floors = [one for one in found(tmp_path) if "mismatch floor" in one.found]
    assert [one.status for one in floors] == ["warning", "warning"]
    assert "mean |Δ| 0.25, largest 0.25, bias +0.25 nats over 4 tokens" in floors[0].found
    assert "trainer against scoring engine" in floors[1].found
    assert all("head_dtype" in one.remedy for one in floors)


def test_an_update_that_a_replica_does_not_compute_with_is_an_error(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.pools.syncs = [1e-4, 0.5]
    (error,) = [one for one in found(tmp_path) if one.status == "error"]
    assert error.found.startswith("one update, rollout engines against trainer: mean |Δ| 0.5")


def test_a_comparison_with_quantized_engines_is_no_proof(cluster: Cluster, tmp_path: Path) -> None:
    lines = found(tmp_path, "rollout.engine.extra={quantization: fp8_per_block}")
    synced = [one for one in lines if "rollout engines against trainer" in one.found]
    assert [one.status for one in synced] == ["warning", "warning"]
    assert all("no proof: quantized engines (rollout.engine.extra)" in one.found for one in synced)


def test_what_was_compared_on_no_token_is_no_agreement(cluster: Cluster, tmp_path: Path) -> None:
    cluster.pools.answer = ()
    cluster.teachers["sort"] = [-2.0, -2.0]
    lines = [one.found for one in found(tmp_path) if one.status == "warning"]
    assert any("its responses" in line and "not measured" in line for line in lines)
    for name in ("sort", "reverse"):
        assert f"teachers.{name}: no token to compare, of 1 prompt of its sources" in lines


def test_a_teacher_without_a_prompt_of_its_sources_is_not_compared(
    cluster: Cluster, tmp_path: Path
) -> None:
    (line,) = [one for one in found(tmp_path, prompts=PROMPTS[:1]) if one.status == "warning"]
    assert line.found == "teachers.reverse: no token to compare, of 0 prompts of its sources"
    assert "reverse" not in cluster.read


def test_the_replicas_that_are_farthest_apart_are_named(cluster: Cluster, tmp_path: Path) -> None:
    cluster.teachers["sort"] = [-2.0, -2.0, -2.5]
    (line,) = [one for one in found(tmp_path) if one.status == "warning"]
    assert "teachers.sort: the two of its 3 replicas that are farthest apart" in line.found
    assert "mean |Δ| 0.5" in line.found
    assert "from the student it is 1 nats" in line.found


def test_a_server_is_compared_with_its_weights(cluster: Cluster, tmp_path: Path) -> None:
    cluster.teachers |= {"endpoint sort": [-2.0], "vllm sort": [-2.5]}
    model = EXAMPLE.parent / "quickstart" / "models" / "teacher-sort"
    served = f"{{kind: endpoint, urls: ['http://127.0.0.1:9'], served_model: s, model: {model}}}"
    (line,) = [one for one in found(tmp_path, f"teachers.sort={served}") if one.status != "ok"]
    assert line.found.startswith("teachers.sort: its server and its weights: mean |Δ| 0.5")


QUANTIZED = "teachers.sort.engine.quantization=fp8_per_channel"


def biases(lines: Sequence[Finding]) -> list[Finding]:
    return [one for one in lines if "precision" in one.found]


def test_a_teacher_of_low_precision_has_its_bias_as_a_share_of_its_signal(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.teachers["low sort"] = [-2.1]
    (line,) = biases(found(tmp_path, QUANTIZED))
    whole, low, student = np.exp([-2.0, -2.1, -1.0])
    bias, signal = divergence(whole, low), divergence(whole, student)
    assert line.status == "ok"
    assert f"bias of {bias:.2g} nats a token: {bias / signal:.1%} of the signal" in line.found
    assert f"{signal:.2g}, over 2 tokens" in line.found


def divergence(p: float, q: float) -> float:
    return float(p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)))


def test_a_bias_above_its_bound_is_an_error_unless_the_config_allows_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.teachers["low sort"] = [-3.0]
    (line,) = biases(found(tmp_path, QUANTIZED))
    assert line.status == "error"
    assert line.found.startswith("teachers.sort.max_bias: ")
    assert line.remedy.endswith("or raise teachers.sort.max_bias")
    cluster.pools = Pools()
    (line,) = biases(found(tmp_path, QUANTIZED, "teachers.sort.max_bias=10"))
    assert line.status == "ok"


def test_no_bias_is_measured_of_a_teacher_in_the_precision_of_its_files(
    cluster: Cluster, tmp_path: Path
) -> None:
    assert biases(found(tmp_path)) == []


def test_the_student_by_itself_and_the_reference_are_not_quantized(
    cluster: Cluster, tmp_path: Path
) -> None:
    quantized = QUANTIZED.replace("sort", "reverse")
    found(tmp_path, QUANTIZED, quantized, "teachers.sort.engine.kv_cache_dtype=fp8")
    alone = [(name, one.teachers[name]) for one in cluster.launched[1:] for name in one.teachers]
    low = [(name, one.engine.low_precision) for name, one in alone if one.kind != "endpoint"]
    assert low == [
        (ITSELF, False),
        *(("sort", low) for low in (True, False, True)),
        (ITSELF, False),
        *(("reverse", low) for low in (True, False, True)),
        (ITSELF, False),
    ]


def test_a_reference_that_does_not_start_is_a_warning(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = cluster.launch_teacher

    def too_large(config: RunConfig, name: str, **given: Any) -> Any:
        if config.loss.kind == "forward_kl" and name == "sort":
            raise EngineStartError("teachers.sort", "out of memory", "a larger GPU")
        return started(config, name, **given)

    monkeypatch.setattr(launch_parts, "launch_teacher", too_large)
    (line,) = biases(found(tmp_path, QUANTIZED))
    assert (line.status, line.remedy) == ("warning", "a larger GPU")
    assert "could not be measured: teachers.sort: out of memory" in line.found


def test_teachers_read_their_own_prompts_of_their_sources_and_the_student_its_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    prompts = [
        replace(one, teacher_ids=np.array([8, at], np.int32)) for at, one in enumerate(PROMPTS)
    ]
    found(tmp_path, QUANTIZED, prompts=prompts)
    assert set(cluster.read["sort"]) == {(8, 0)}
    assert set(cluster.read["reverse"]) == {(8, 1)}
    assert set(cluster.read[ITSELF]) == {(5, 6), (6, 5), tuple(HELD.ids[:-2].tolist())}


def test_the_command_gives_a_teacher_the_prompt_that_it_reads_in_a_run(cluster: Cluster) -> None:
    given = [*FEW, "log.wandb=off", QUANTIZED, "teachers.sort.prompt_template='{prompt} 12'"]
    main(["doctor", str(EXAMPLE), *given, "--engines"])
    text = Text.of(config())
    assert {text.decode(ids)[-3:] for ids in cluster.read["sort"]} == {" 12"}
    assert {text.decode(ids)[-3:] for ids in cluster.read[ITSELF]}.isdisjoint({" 12"})


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_bias_of_files_that_are_quantized_is_unknown(
    cluster: Cluster, tmp_path: Path, cache: str
) -> None:
    own = model(tmp_path, "teacher-sort", quantization_config={"quant_method": "awq"})
    asked = [f"teachers.sort.model={own}", f"teachers.sort.engine.kv_cache_dtype={cache}"]
    line, *others = biases(found(tmp_path, *asked))
    assert line.status == "warning"
    assert "its files are quantized" in line.found
    assert len(others) == (cache == "fp8")


def test_pools_that_do_not_start_are_an_error_with_the_cause(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.fails = True
    (error,) = found(tmp_path)
    assert (error.status, error.remedy) == ("error", "a smaller model")
    assert "student/0: out of memory" in error.found


def test_what_was_measured_stays_when_a_later_start_fails(cluster: Cluster, tmp_path: Path) -> None:
    del cluster.teachers["sort"]
    lines = found(tmp_path)
    assert [one.status for one in lines] == ["ok"] * 4 + ["error", "ok"]
    assert lines[4].found == "teachers.sort could not be measured: 'sort'"


def test_the_command_starts_engines_when_asked(cluster: Cluster, cli: Cli) -> None:
    command = ["doctor", str(EXAMPLE), *FEW, "log.wandb=off"]
    assert "ok      engines      mismatch floor" in cli(*command, "--engines").out
    started = len(cluster.launched)
    assert main(command) == 0
    assert len(cluster.launched) == started


def test_engines_are_not_started_after_an_error(cluster: Cluster, cli: Cli) -> None:
    printed = cli("doctor", EXAMPLE, *FEW, "student.model=/no", "--engines", code=2)
    assert "engines      not started" in printed.out
    assert cluster.launched == []


def with_image(prompt: Prompt) -> Prompt:
    media = Media(prompt.uid[-1] * 64, 3, 8, 8)
    return replace(prompt, media=(media,), encoded={media.sha256: b"png"})


def test_images_of_prompts_are_there_while_the_student_answers_and_is_trained(
    cluster: Cluster, tmp_path: Path
) -> None:
    prompts = [with_image(PROMPTS[0]), *PROMPTS[1:]]
    found(tmp_path, prompts=prompts)
    assert cluster.pools.calls == [
        "snapshot 0", "images of doctor", "update", "no images", "snapshot 1"
    ]  # fmt: skip


def test_a_teacher_scores_images_of_its_own_sources_only(cluster: Cluster, tmp_path: Path) -> None:
    prompts = [with_image(one) for one in PROMPTS]
    found(tmp_path, prompts=prompts)
    everything = {one.uid for one in prompts}
    assert set(cluster.shown[ITSELF]) == everything
    for name in ("sort", "reverse"):
        assert set(cluster.shown[name]) == {p.uid for p in prompts if p.data_source == name}
