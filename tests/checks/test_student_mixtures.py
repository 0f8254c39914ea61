"""Checks of routing replay: where engines return no experts, it is refused before the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from async_opd.checks.student import check_routing
from async_opd.core.errors import Findings
from async_opd.models.engine_args import Device
from async_opd.models.model_files import ModelFiles
from async_opd.queue.sizes import payloads, routing_bytes, traffic
from tests.checks.inputs import MODELS, config, found
from tests.trainer.test_named_weights import corrected_mixture, mixture

REPLAY = "train.routing=replay"


def messages(path: Path, device: Device, *overrides: str) -> list[str]:
    shutil.copy(MODELS / "student" / "tokenizer.json", path)
    problems, files = Findings("c.yaml"), ModelFiles.read(str(path), weights=True)
    check_routing(config(REPLAY, *overrides), device, files, problems)
    assert all(problem.key == "train.routing" for problem in problems.problems)
    return [problem.message for problem in problems.problems]


def test_a_qwen3_mixture_on_gpus_can_replay(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    assert messages(tmp_path, "cuda") == []


def test_on_a_cpu_it_is_refused(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    (message,) = messages(tmp_path, "cpu")
    assert "on GPUs only" in message


def test_without_the_prefix_cache_it_is_refused(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    (message,) = messages(tmp_path, "cuda", "rollout.engine.extra={enable_prefix_caching: false}")
    assert "prefix cache" in message


def test_another_mixture_is_refused(tmp_path: Path) -> None:
    corrected_mixture().save_pretrained(tmp_path)
    (message,) = messages(tmp_path, "cuda")
    assert "type glm4_moe has no router" in message


def test_a_mixture_is_not_compiled(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)
    shutil.copy(MODELS / "student" / "tokenizer.json", tmp_path)
    problems, files = Findings("c.yaml"), ModelFiles.read(str(tmp_path), weights=True)
    check_routing(config("train.compile=true"), "cuda", files, problems)
    assert [problem.key for problem in problems.problems] == ["train.compile"]


def test_a_dense_student_may_be_compiled() -> None:
    assert found("train.compile=true") == []


def test_a_dense_student_is_refused_by_check() -> None:
    assert {problem.key for problem in found(REPLAY)} == {"train.routing"}


def test_experts_are_counted_in_the_bytes_of_the_queue(tmp_path: Path) -> None:
    mixture().save_pretrained(tmp_path)  # one layer, one expert of two for each token
    own, replay = (config(f"student.model={tmp_path}", f"train.routing={one}") for one in KINDS)
    assert (routing_bytes(own), routing_bytes(replay)) == (0, 1)
    one, other = (traffic(made, payloads(made, "cpu"), 100) for made in (own, replay))
    assert other.rollout - one.rollout == 100 + own.rollout.max_tokens
    assert other.sample - one.sample == 100 + own.rollout.max_tokens


KINDS = ("own", "replay")
