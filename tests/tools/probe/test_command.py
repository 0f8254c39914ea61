"""``async_opd probe`` on fake engines: its starts, its text, its refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.cli import main
from async_opd.cluster import launch_parts
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import VllmTeacher
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import EngineStartError, Problem, StageError
from async_opd.core.reports import Progress
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import rollout_uid
from async_opd.models.tokenizer import Text
from async_opd.tools.engines import ITSELF
from async_opd.tools.probe import engines
from tests.checks.inputs import EXAMPLE, FEW, model
from tests.tools.doctor.test_templates import PLAIN, with_template
from tests.world.cli import Cli

COMMAND = ["probe", str(EXAMPLE), *FEW]


@dataclass
class Replica:
    """Answers ``sort`` rightly if it is ``good``, with two tokens of nearly all mass."""

    text: Text
    good: bool
    fails: bool = False
    first: float = 0.6
    read: list[tuple[int, ...]] = field(default_factory=list)
    """The prompts whose responses it scored."""

    async def run(self) -> None:
        if self.fails:
            raise StageError("eval/0", "its process died")
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        return Progress(0)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        if self.fails:
            await asyncio.Event().wait()
        made = []
        for one in prompts:
            word = self.text.decode(one.token_ids.tolist()).partition(" ")[2].strip("=")
            answer = "".join(sorted(word)) if self.good else "?"
            ids = np.array(self.text.plain(answer), np.int32)
            spans, logprobs = (VersionSpan(0, 0, len(ids)),), np.full(len(ids), -1, np.float32)
            uid = rollout_uid(one.uid, 0)
            made.append(Rollout.plain(uid, one, ids, logprobs, spans, "stop"))
        return made

    async def score(self, batch: Batch) -> Batch:
        logs, ids = (
            np.log([self.first, 1 - self.first]).astype(np.float32),
            np.array([20, 21], np.int32),
        )
        found = []
        for one in unpack(Rollout, [batch]):
            self.read.append(tuple(one.for_teacher.prompt.token_ids.tolist()))
            length = len(one.rollout_logprobs)
            own, rest = np.full(length, -1.0, np.float32), np.full(length, -100.0, np.float32)
            scores = TopK(np.tile(ids, (length, 1)), np.tile(logs, (length, 1)), own, rest)
            found.append(Sample(one, scores))
        return Batch.pack(found)


@dataclass
class Cluster:
    """Fakes of what is launched, in order."""

    text: Text = field(default_factory=lambda: Text.of(load_config(EXAMPLE, FEW)))
    launched: list[str] = field(default_factory=list)
    configs: list[RunConfig] = field(default_factory=list)
    read: dict[str, list[tuple[int, ...]]] = field(default_factory=dict)
    """Of each teacher the prompts whose responses it scored."""
    fails: str = ""
    rounded: float = 0.9
    """What a quantized teacher gives the first token; ``sort`` gives it 0.9, the student 0.6."""

    @asynccontextmanager
    async def evaluators(self, config: RunConfig, **_: Any) -> AsyncIterator[Replica]:
        self.launched.append("rollout engine")
        self.configs.append(config)
        yield Replica(self.text, good=False, fails=self.fails == "student")

    @asynccontextmanager
    async def teacher(self, config: RunConfig, name: str, **_: Any) -> AsyncIterator[list[Replica]]:
        if self.fails == name:
            raise EngineStartError(f"teachers.{name}", "out of memory", "a smaller model")
        self.launched.append(name)
        self.configs.append(config)
        teacher = config.teachers[name]
        low = isinstance(teacher, VllmTeacher) and teacher.engine.low_precision
        first = self.rounded if low else 0.9 if name == "sort" else 0.6
        read = self.read.setdefault(name, [])
        yield [Replica(self.text, good=True, first=first, read=read) for _ in range(2)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(launch_parts, "launch_evaluators", made.evaluators)
    monkeypatch.setattr(launch_parts, "launch_teacher", made.teacher)
    return made


def documents(cli: Cli, *arguments: str) -> dict[str, dict[str, Any]]:
    return {
        one["source"]: one for one in json.loads(cli(*COMMAND, *arguments, "--json").out)["pairs"]
    }


def test_engines_are_started_one_after_the_other(cluster: Cluster, cli: Cli) -> None:
    found = documents(cli)
    assert cluster.launched == ["rollout engine", ITSELF, "reverse", "sort"]
    assert sorted(found) == ["reverse", "sort"]


def test_a_source_has_the_accuracy_of_both_models(cluster: Cluster, cli: Cli) -> None:
    found = documents(cli)["sort"]
    assert found["student_accuracy"]["mean"] == 0
    assert found["teacher_accuracy"]["mean"] == 1
    assert found["verdict"]["kind"] == "will_teach"
    assert found["verdict"]["score"] == pytest.approx(1)


def test_the_text_names_verdict_figures_and_suggestion(cluster: Cluster, cli: Cli) -> None:
    printed = cli(*COMMAND).out
    assert "sort, teacher sort: will teach: the teacher is better (+100.0% ± 0.0%)" in printed
    assert "accuracy     student 0.0% ± 0.0%, teacher 100.0% ± 0.0%" in printed
    assert "the teacher's log-probability is -1.00 nats of their first token" in printed
    assert "suggestion   loss.kind=forward_kl loss.top_k=2 teachers.sort.weight=" in printed


def test_what_the_teachers_own_template_changes_is_shown(
    cluster: Cluster, cli: Cli, tmp_path: Path
) -> None:
    student = with_template(tmp_path, "student", PLAIN)
    teacher = with_template(tmp_path, "teacher-sort", "x" + PLAIN)
    paths = [f"student.model={student}", f"teachers.sort.model={teacher}"]
    printed = cli(*COMMAND, *paths)
    assert "own template changes the teacher's accuracy by +0.0% ± 0.0%" in printed.out


def test_every_engine_scores_the_same_top_k_on_its_own_devices(cluster: Cluster, cli: Cli) -> None:
    documents(cli, "loss={kind: k1}")
    for config in cluster.configs[1:]:
        assert (config.loss.kind, getattr(config.loss, "top_k", 0)) == ("forward_kl", 64)
        assert len(config.teachers) == 1
    assert cluster.configs[0].eval.replicas == cluster.configs[0].rollout.replicas


SERVED = "teachers.sort={kind: endpoint, urls: ['http://127.0.0.1:9'], served_model: s}"


@pytest.mark.parametrize(("loss", "k"), [("{kind: jsd, top_k: 8}", 8), ("{kind: k1}", 20)])
def test_a_server_is_asked_for_no_more_tokens_than_the_run_or_its_default(
    cluster: Cluster, cli: Cli, monkeypatch: pytest.MonkeyPatch, loss: str, k: int
) -> None:
    checked: list[RunConfig] = []

    def nothing_wrong(config: RunConfig, where: str, shown: Any) -> list[Problem]:
        checked.append(config)
        return []

    monkeypatch.setattr(engines, "check_endpoints", nothing_wrong)
    documents(cli, SERVED, f"loss={loss}")
    assert {getattr(one.loss, "top_k", 0) for one in (*checked, *cluster.configs[1:])} == {k}


def test_a_server_that_does_not_answer_is_a_problem_before_any_start(
    cluster: Cluster, cli: Cli
) -> None:
    assert "teachers.sort" in cli(*COMMAND, SERVED, "teachers.sort.health.timeout_s=5", code=2).err
    assert cluster.launched == []


def test_at_most_so_many_prompts_of_each_source_are_asked(cluster: Cluster, cli: Cli) -> None:
    assert {one["prompts"] for one in documents(cli, "--prompts", "1").values()} == {1}


def without_answers(tmp_path: Path) -> str:
    rows = [{"prompt": f"{task} 21=", "data_source": task} for task in ("sort", "reverse")]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    return f"data.train=[{data}]"


def test_without_answers_in_the_data_nobody_is_graded_and_the_words_say_so(
    cluster: Cluster, cli: Cli, tmp_path: Path
) -> None:
    data = without_answers(tmp_path)
    found = documents(cli, data, "data.eval=[]")["sort"]
    assert found["headroom"] is None
    assert found["verdict"]["score"] is None
    assert "unknown (no grader)" in cli(*COMMAND, data, "data.eval=[]").out


def test_evaluation_prompts_are_asked_where_only_they_have_answers(
    cluster: Cluster, cli: Cli, tmp_path: Path
) -> None:
    found = documents(cli, without_answers(tmp_path))["sort"]
    assert found["teacher_accuracy"]["mean"] == 1


QUANTIZED = "teachers.sort.engine.quantization=fp8_per_channel"


def test_a_quantized_teacher_is_asked_again_with_the_weights_of_its_files(
    cluster: Cluster, cli: Cli
) -> None:
    cluster.rounded = 0.89
    found = documents(cli, QUANTIZED)
    assert cluster.launched == ["rollout engine", ITSELF, "reverse", "sort", "sort"]
    assert found["reverse"]["precision"] is None
    p, low, q = (np.array([first, 1 - first]) for first in (0.9, 0.89, 0.6))
    share = (p * np.log(p / low)).sum() / (p * np.log(p / q)).sum()
    assert found["sort"]["precision"]["share"] == pytest.approx(share, rel=1e-3)


def test_a_quantized_teacher_with_a_large_bias_is_refused_after_its_figures(
    cluster: Cluster, cli: Cli
) -> None:
    cluster.rounded = 0.6
    printed = cli(*COMMAND, QUANTIZED, code=2)
    assert "precision    its precision has a bias of 0.23 nats a token: 100.0%" in printed.out
    assert "teachers.sort.max_bias" in printed.err
    assert main([*COMMAND, QUANTIZED, "teachers.sort.max_bias=1.01"]) == 0


def test_a_reference_that_does_not_start_leaves_the_other_figures(
    cluster: Cluster, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = cluster.teacher

    def too_large(config: RunConfig, name: str, **given: Any) -> Any:
        if cluster.launched[-1] == "sort":
            raise EngineStartError("teachers.sort", "out of memory", "a larger GPU")
        return started(config, name, **given)

    monkeypatch.setattr(launch_parts, "launch_teacher", too_large)
    printed = cli(*COMMAND, QUANTIZED)
    assert "sort, teacher sort: will teach" in printed.out
    assert "the bias of its precision was not measured: teachers.sort: out of memory" in printed.err


def test_the_student_scores_its_own_prompt_and_the_teacher_the_teachers(
    cluster: Cluster, cli: Cli
) -> None:
    documents(cli, QUANTIZED, "teachers.sort.prompt_template='{prompt} 12'")
    assert {cluster.text.decode(ids)[-3:] for ids in cluster.read["sort"]} == {" 12"}
    assert {cluster.text.decode(ids)[-3:] for ids in cluster.read[ITSELF]}.isdisjoint({" 12"})


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_the_bias_of_files_that_are_quantized_is_printed_as_unknown(
    cluster: Cluster, cli: Cli, tmp_path: Path, cache: str
) -> None:
    own = model(tmp_path, "teacher-sort", quantization_config={"quant_method": "awq"})
    asked = [f"teachers.sort.model={own}", f"teachers.sort.engine.kv_cache_dtype={cache}"]
    printed = cli(*COMMAND, *asked).err
    assert "teachers.sort: the bias of its precision is unknown: its files are quantized" in printed


def test_an_engine_that_does_not_start_is_a_failure_with_its_remedy(
    cluster: Cluster, cli: Cli
) -> None:
    cluster.fails = "sort"
    assert "out of memory" in cli(*COMMAND, code=1).err


def test_a_student_that_dies_ends_the_probe(cluster: Cluster, cli: Cli) -> None:
    cluster.fails = "student"
    assert "its process died" in cli(*COMMAND, code=1).err


def test_no_engine_is_started_for_a_wrong_config(cluster: Cluster, cli: Cli) -> None:
    cli(*COMMAND, "student.model=/no", code=2)
    cli(*COMMAND, "--prompts", "0", code=2)
    assert cluster.launched == []
