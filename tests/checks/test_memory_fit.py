"""What a pool needs, against what its GPU has: faults, remedies and notes, for made-up sizes."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.checks.memory_fit import faults_of_memory, fewest_ranks, memory_rows, near
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import GIB, Machine
from async_opd.models.model_size import ModelSize

BILLION = 1_000_000_000


def sizes(model: str) -> ModelSize:
    """As many parameters as the model's name says, in the shape of Qwen3-4B."""
    entries = int(float(model) * BILLION)
    widths = {"query": 4096, "key": 1024, "heads": 32, "query_norms": True}
    return ModelSize(entries, 0, 2560, 9728, 36, 151_936, embeddings=151_936, **widths)


def config(student: str = "4", train: Any = None, **sections: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": student},
            "teachers": {"a": {"model": "1"}},
            "data": {"train": "prompts.jsonl"},
            "train": train or {},
            **sections,
        }
    )


def gpus(gib: float | None) -> Machine:
    return Machine("cuda", None if gib is None else int(gib * GIB), sizes)


def test_a_student_that_its_gpus_do_not_hold_is_refused_with_its_terms_by_size() -> None:
    ((key, fault, _),) = faults_of_memory(config("4"), gpus(70))
    assert key == "train"
    assert fault.startswith("a rank needs ")
    shown = fault[fault.index("(") :]
    assert shown.startswith("(moments 29.8 GiB, parameters 14.9 GiB, gradients 14.9 GiB, ")
    assert fault.endswith("its GPU has 70.0 GiB")


def test_the_remedies_name_what_each_leads_to_and_the_best_comes_first() -> None:
    ((_, _, remedy),) = faults_of_memory(config("4"), gpus(70))
    changes = remedy.split("; ")
    assert changes[0].startswith("train.offload: parameters (")
    needs = [float(change.split("(")[1].split()[0]) for change in changes]
    assert needs == sorted(needs)
    assert {change.split(":")[0] for change in changes} == {
        "train.ranks", "train.offload", "train.moments", "train.tokens_per_micro_batch",
    }  # fmt: skip


def test_with_enough_ranks_it_fits() -> None:
    assert fewest_ranks(config("4"), gpus(70)) == 2
    assert list(faults_of_memory(config("4", {"ranks": 2}), gpus(70))) == []


def test_no_number_of_ranks_holds_a_row_that_is_too_long() -> None:
    long = {"tokens_per_micro_batch": 4_000_000, "batch_size": 4096}
    assert fewest_ranks(config("4", long), gpus(70)) is None


def test_an_engine_that_its_gpu_does_not_hold_is_refused_with_the_gpus_that_do() -> None:
    small = config("1", {"ranks": 8}, teachers={"a": {"model": "40"}})
    ((key, fault, remedy),) = faults_of_memory(small, gpus(70))
    assert key == "teachers.a"
    assert "(weights 74.5 GiB" in fault
    assert remedy.startswith("teachers.a.tensor_parallel: 8 (")


def test_where_the_memory_is_not_known_nothing_is_refused() -> None:
    assert list(faults_of_memory(config("400"), gpus(None))) == []


def test_a_rank_that_nearly_fills_its_gpu_is_noted() -> None:
    two = config("4", {"ranks": 2})
    (needed,) = [row[3] for row in memory_rows(two, gpus(70)) if row[0] == "train"][:1]
    gib = float(needed.split()[0])
    assert list(near(two, gpus(2 * gib))) == []
    (note,) = near(two, gpus(gib + 1))
    assert note.startswith(f"train: a rank needs {needed} (")


def test_a_run_on_cpus_that_needs_more_than_the_host_has_is_refused() -> None:
    machine = Machine("cpu", 64 * GIB, sizes)
    ((key, fault, remedy),) = faults_of_memory(config("4"), machine)
    assert key == "train"
    assert "this machine has 64.0 GiB" in fault
    assert "train.moments: 8bit" in remedy
    assert list(faults_of_memory(config("0.1"), machine)) == []


def test_gradients_that_are_reduced_once_a_step_are_whole_on_every_rank() -> None:
    def gradients(when: str, total: float | None) -> str:
        made = config("4", {"ranks": 8, "reduce_gradients": when})
        (terms,) = [
            row[4] for row in memory_rows(made, gpus(total)) if row[:3:2] == ("train", "GPU")
        ]
        return next(one for one in terms.split(", ") if one.startswith("gradients"))

    assert gradients("step", 70) == "gradients 14.9 GiB"
    assert gradients("auto", 70) == gradients("micro_batch", 70) == "gradients 1.9 GiB"
    assert gradients("auto", 141) == "gradients 14.9 GiB"


@pytest.mark.parametrize(("gib", "tokens"), [(40, True), (None, False)])
def test_engines_say_what_is_left_for_their_kv_cache(gib: float | None, tokens: bool) -> None:
    (row,) = [one for one in memory_rows(config(), gpus(gib)) if one[:3:2] == ("rollout", "GPU")]
    assert ("; KV cache of at most " in row[4]) == tokens


def test_the_fewest_ranks_hold_whole_copies_and_whole_rows() -> None:
    shared = {"ranks": 12, "replicate": 2, "context_parallel": 3}
    assert fewest_ranks(config("4", shared), gpus(500)) == 6
