"""Shares of GPUs that several pools have, on models of made-up sizes."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.checks.gpu_memory import ASLEEP, GIB, beside, faults
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import COMMUNICATOR, CONTEXT, Machine, outside
from async_opd.models.engine_args import share_left
from async_opd.models.model_size import ModelSize
from tests.world.config import run_config

H100 = 80 * GIB
BILLION = 1_000_000_000


def sizes(model: str) -> ModelSize:
    """As many parameters as the model's name says, in the shape of a 4B model."""
    return ModelSize(int(float(model) * BILLION), 0, 2560, 9728, 36, 150_000)


def config(student: str = "4", train: Any = None, **teachers: Any) -> RunConfig:
    return run_config(student={"model": student}, teachers=teachers, train=train or {})


def guest(model: str, host: str = "rollout", share: Any = "auto", **settings: Any) -> Any:
    engine = {"gpu_memory_utilization": share}
    return {"model": model, "placement": "colocated", "with": host, "engine": engine, **settings}


def own(made: RunConfig, pool: str) -> int:
    """Bytes of an engine's or rank's GPU that are not of its tensors, nor in its share."""
    return sum(outside(made, pool, Machine("cuda", sizes=sizes)).values())


def share(made: RunConfig, pool: str) -> float:
    return share_left(H100, beside(made, pool, sizes))


def test_an_engine_that_is_alone_on_its_gpu_gets_the_most() -> None:
    assert share(config(a={"model": "8"}), "rollout") == 0.9


@pytest.mark.parametrize("pool", ["rollout", "teachers.a", "teachers.b"])
def test_a_gpus_context_and_the_others_that_sleep_there_are_not_an_engines_to_take(
    pool: str,
) -> None:
    made = config(a=guest("8"), b=guest("8"), c={"model": "8"})
    synced = COMMUNICATOR if pool != "rollout" else 0  # that of the student's engines
    assert beside(made, pool, sizes) == own(made, pool) + 2 * ASLEEP + synced


def test_a_teacher_beside_the_trainer_gets_what_weights_and_optimizer_leave() -> None:
    made = config("2", a=guest("4", "train"))
    trainer = CONTEXT + COMMUNICATOR + 12 * 2 * BILLION
    assert beside(made, "teachers.a", sizes) == CONTEXT + trainer
    left = H100 - 2 * CONTEXT - COMMUNICATOR - 24e9
    assert share(made, "teachers.a") == pytest.approx(left / H100, abs=0.01)
    assert beside(made, "rollout", sizes) == own(made, "rollout")


def colocated(**teachers: Any) -> RunConfig:
    settings = config("4", {"ranks": 2}, **teachers).model_dump(by_alias=True)
    settings["rollout"] |= {"placement": "colocated", "with": "train", "replicas": 2}
    return RunConfig.model_validate(settings)


def test_an_offloaded_trainer_leaves_an_engine_all_but_its_context_and_communicator() -> None:
    made = colocated(a={"model": "8"})
    rests = CONTEXT + COMMUNICATOR  # of two ranks
    assert beside(made, "rollout", sizes) == own(made, "rollout") + rests


def test_engine_teacher_and_trainer_on_one_gpu_leave_each_other_what_the_others_keep() -> None:
    made = colocated(a=guest("8"))
    rests = CONTEXT + COMMUNICATOR + ASLEEP
    assert beside(made, "rollout", sizes) == own(made, "rollout") + rests
    assert beside(made, "teachers.a", sizes) == CONTEXT + rests
    assert list(faults(made, H100, sizes)) == []


def test_the_heads_of_teachers_stay_beside_an_engine_on_the_trainers_gpu() -> None:
    plain = colocated(a={"model": "8"})
    full = plain.model_copy(
        update={"loss": plain.loss.model_copy(update={"support": "full_vocab"})}
    )
    heads = 150_000 * 2560 * 2
    assert beside(full, "rollout", sizes) - beside(plain, "rollout", sizes) == heads


def test_a_trainer_that_does_not_fit_beside_sleeping_engines_is_a_fault() -> None:
    made = colocated(a={"model": "8"})
    assert list(faults(made, H100, sizes)) == []
    (fault,) = faults(made, 24 * GIB, sizes)
    assert fault[0] == "train"


def test_the_different_heads_that_ranks_keep_for_the_full_vocabulary_are_not_a_teachers() -> None:
    teachers = {"a": guest("4", "train"), "b": {"model": "8"}, "c": {"model": "8"}}
    plain = config("2", **teachers)
    full = plain.model_copy(
        update={"loss": plain.loss.model_copy(update={"support": "full_vocab"})}
    )
    heads = 2 * 150_000 * 2560 * 2  # of the models 4 and 8, in bfloat16
    assert beside(full, "teachers.a", sizes) - beside(plain, "teachers.a", sizes) == heads


def test_more_ranks_leave_their_teachers_more() -> None:
    one, four = (
        beside(config("2", {"ranks": ranks}, a=guest("4", "train")), "teachers.a", sizes)
        for ranks in (1, 4)
    )
    assert one - four == 12 * 2 * BILLION * 3 // 4 - COMMUNICATOR


def test_a_share_among_the_engines_further_arguments_is_a_configured_one_too() -> None:
    extra = {"gpu_memory_utilization": 0.97}
    ((key, fault, _),) = found(config(a={**guest("8"), "engine": {"extra": extra}}))
    assert key == "teachers.a.engine.gpu_memory_utilization"
    assert fault.startswith("found 0.97")


def found(made: RunConfig) -> list[tuple[str, str, str]]:
    return list(faults(made, H100, sizes))


def test_what_fits_is_no_fault() -> None:
    assert found(config(a=guest("8"), b=guest("30"))) == []


def test_a_fixed_share_beside_others_that_leave_less_is_refused_with_all_terms() -> None:
    ((key, fault, remedy),) = found(config(a=guest("8", share=0.97), b=guest("4")))
    assert key == "teachers.a.engine.gpu_memory_utilization"
    assert fault.splitlines() == [
        "found 0.97, of a GPU that has at most 0.9 beside the others on it",
        "      GiB of the GPU's 80.0  works with  rests with  share",
        "      rollout                      10.7         2.5   auto",
        "      teachers.a                   16.9         2.0   0.97",
        "      teachers.b                    9.5         2.0   auto",
    ]
    assert "auto" in remedy


def test_a_teacher_whose_weights_do_not_fit_beside_the_others_is_refused() -> None:
    ((key, fault, _),) = found(config(a=guest("40")))
    assert key == "teachers.a.engine.gpu_memory_utilization"
    assert fault.startswith("teachers.a needs 76.5 GiB of a GPU while it works, and gets 73.0")


def test_a_share_that_is_too_small_for_the_weights_is_refused() -> None:
    ((key, fault, _),) = found(config(a=guest("8", share=0.1)))
    assert key == "teachers.a.engine.gpu_memory_utilization"
    assert "and gets 9.0" in fault


def test_a_trainer_whose_states_do_not_fit_beside_its_teachers_is_refused() -> None:
    recomputes = {"gradient_checkpointing": True}
    assert found(config("3", recomputes, a=guest("4", "train"))) == []
    (first, *_) = found(config("4", recomputes, a=guest("4", "train")))
    assert first[0] == "train"
    assert first[1].startswith("train needs ")


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_recomputed_activations_take_less(kind: str) -> None:
    kept, recomputed = (
        found(
            config(
                "3",
                {"gradient_checkpointing": on, "tokens_per_micro_batch": 8192},
                a=guest("4", "train"),
            )
        )
        for on in ("none", kind)
    )
    assert ([key for key, *_ in kept], recomputed) == (["train"], [])
