"""A step here of frameworks whose steps have several updates; NeMo-RL's two trainers."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.tools.importing.draft import Draft, Expression
from async_opd.tools.importing.frameworks import FRAMEWORKS
from async_opd.tools.importing.frameworks import drafted as of_framework

MEGATRON = "policy.megatron_cfg"


def drafted(name: str = "nemo-rl", **keys: Any) -> Draft:
    return of_framework(FRAMEWORKS[name], {k.replace("__", "."): v for k, v in keys.items()})


TWO_UPDATES = {"distillation.num_prompts_per_step": 128, "policy.train_global_batch_size": 64}


def test_a_step_with_two_updates_is_one_weight_version_in_all_periods() -> None:
    ours = drafted(
        **TWO_UPDATES,
        **{
            "distillation.val_period": 20,
            "checkpointing.save_period": 10,
            "policy.scheduler.0.name": "torch.optim.lr_scheduler.LinearLR",
            "policy.scheduler.0.kwargs.total_iters": 10,
        },
    ).ours
    assert (ours["async.sync_steps"], ours["eval.every"], ours["checkpoint.every"]) == (2, 20, 10)
    assert ours["train.warmup_steps"] == 20


def test_megatrons_own_rate_schedule_and_teacher_are_taken_where_it_trains() -> None:
    keys: dict[str, Any] = {
        f"{MEGATRON}.enabled": True,
        f"{MEGATRON}.optimizer.lr": 5e-6,
        f"{MEGATRON}.optimizer.weight_decay": 0.1,
        f"{MEGATRON}.optimizer.adam_beta2": 0.95,
        f"{MEGATRON}.scheduler.lr_warmup_iters": 7,
        f"{MEGATRON}.activation_checkpointing": True,
        "policy.optimizer.kwargs.lr": 2e-5,
        "policy.dtensor_cfg.activation_checkpointing": False,
        "teacher.dtensor_cfg.tensor_parallel_size": 4,
        "teacher.megatron_cfg.tensor_model_parallel_size": 2,
        "teacher.megatron_cfg.expert_tensor_parallel_size": 1,
    }
    ours = drafted(**keys).ours
    assert (ours["train.lr"], ours["train.weight_decay"]) == (5e-6, 0.1)
    assert ours["train.betas"] == [0.9, 0.95]
    assert ours["train.warmup_steps"] == 7
    assert ours["train.gradient_checkpointing"] == "full"
    assert ours["teachers.teacher.tensor_parallel"] == 2
    ours = drafted(**keys | {f"{MEGATRON}.enabled": False}).ours
    assert (ours["train.lr"], ours["teachers.teacher.tensor_parallel"]) == (2e-5, 4)
    assert ours["train.gradient_checkpointing"] == "none"


def test_text_that_is_added_to_each_prompt_there_is_named() -> None:
    draft = drafted(
        **{"data.default.prompt_file": "cot.txt", "data.default.system_prompt_file": None}
    )
    assert draft.fill_in["data.train"] == (
        "NeMo-RL puts each problem into the text of cot.txt (prompt_file): write a file whose "
        "prompts have it"
    )


def test_a_step_of_asyncopd_with_two_updates_is_one_weight_version_in_all_periods() -> None:
    sizes = {"trainer.batch_size": 256, "trainer.mini_batch_size": 128}
    ours = drafted("asyncopd", **sizes, **{"eval.freq": 5, "trainer.save_freq": 10}).ours
    assert (ours["async.sync_steps"], ours["eval.every"], ours["checkpoint.every"]) == (2, 5, 10)


def test_a_step_of_verl_with_two_updates_is_one_weight_version_in_all_periods() -> None:
    keys = {
        "data.train_batch_size": 512,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
        "trainer.total_training_steps": 100,
        "trainer.test_freq": 5,
        "trainer.save_freq": 10,
    }
    ours = drafted("verl", **keys).ours
    assert (ours["async.sync_steps"], ours["train.steps"]) == (2, 200)
    assert (ours["eval.every"], ours["checkpoint.every"]) == (5, 10)


def test_an_import_of_quantized_rollouts_says_that_their_weights_are_not_proved() -> None:
    draft = drafted("asyncopd", **{"rollout.quantization": "fp8"})
    assert draft.ours["rollout.engine.extra.quantization"] == "fp8"
    assert draft.ours["sync.verify_every"] == 0
    assert any("nothing proves" in line for line in draft.differs)
    plain = drafted("asyncopd", **{"rollout.quantization": None})
    assert "sync.verify_every" not in plain.ours


def test_verls_colocated_asynchronous_trainer_runs_ahead_by_its_first_batches() -> None:
    mode = {"trainer.v1.trainer_mode": "colocate_async"}
    ours = drafted("verl", **mode, **{"trainer.v1.colocate_async.num_warmup_batches": 2}).ours
    assert (ours["rollout.placement"], ours["async.staleness_threshold"]) == ("colocated", 2)
    assert ours["async.max_version_lag"] == 8


@pytest.mark.parametrize(
    ("name", "key", "value", "ours"),
    [
        ("verl", "trainer.v1.trainer_mode", "another", "async.staleness_threshold"),
        ("verl", "data.train_batch_size", "${BATCH}", "async.sync_steps"),
        ("verl", "actor_rollout_ref.actor.ppo_mini_batch_size", 0, "train.batch_size"),
        ("verl", "actor_rollout_ref.actor.optim.lr_scheduler_type", "linear", "train.schedule"),
        ("verl", "distillation.distillation_loss.loss_mode", "another", "loss.kind"),
        ("verl", "data.truncation", "middle", "data.overlong"),
        ("nemo-rl", "loss_fn.kl_type", "another", "loss.kind"),
        ("asyncopd", "algorithm.opd.kl_loss_mode", "another", "loss.kind"),
        ("trl", "save_strategy", "epoch", "checkpoint.every"),
        ("trl", "learning_rate", Expression("rate()"), "train.lr"),
        ("trl", "max_steps", Expression("steps()"), "train.steps"),
    ],
)
def test_a_value_that_has_no_counterpart_is_a_placeholder(
    name: str, key: str, value: Any, ours: str
) -> None:
    draft = drafted(name, **{key: value})
    assert draft.ours[ours] == "FILL_IN"
    assert key in draft.fill_in[ours]
    assert key in draft.unmapped


@pytest.mark.parametrize(
    ("name", "key"), [("trl", "lmbda"), ("trl", "use_uld_loss"), ("verl", "distillation.enabled")]
)
def test_a_value_that_decides_on_the_recipe_and_is_not_known_is_to_be_filled_in(
    name: str, key: str
) -> None:
    draft = drafted(name, **{key: Expression("$X")})
    assert draft.fill_in[key] == "it could not be read: its value is computed: $X"
    assert [line for line in draft.differs if key in line] == []


def test_a_teachers_name_with_a_dot_keeps_its_address_and_its_source() -> None:
    urls = {"qwen2.5": "http://a:1", "math": "http://a:2"}
    ours = drafted("trl", **{f"teacher_server_urls.{name}": url for name, url in urls.items()}).ours
    assert ours["teachers.qwen2-5.urls"] == ["http://a:1"]
    assert ours["teachers.qwen2-5.sources"] == ["qwen2.5"]


@pytest.mark.parametrize(
    ("kind", "differs"),
    [("ConstantLR", []), ("StepLR", ["policy.scheduler: constant is used, there is no {} here"])],
)
def test_a_schedule_of_torch_that_is_not_here_is_named(kind: str, differs: list[str]) -> None:
    name = f"torch.optim.lr_scheduler.{kind}"
    found = drafted(**{"policy.scheduler.0.name": name}).differs
    assert [line for line in found if "scheduler" in line] == [one.format(name) for one in differs]


@pytest.mark.parametrize(
    ("schedule", "steps", "named"),
    [("constant", 0, False), ("cosine", 7, False), ("linear", 7, True)],
)
def test_schedules_of_prime_rl_are_taken_or_named(schedule: str, steps: int, named: bool) -> None:
    keys = {"trainer.scheduler.type": schedule, "trainer.scheduler.warmup_steps": 7}
    draft = drafted("prime-rl", **keys)
    assert draft.ours["train.warmup_steps"] == steps
    assert any(line.startswith("trainer.scheduler.type") for line in draft.differs) is named


def test_an_engine_of_prime_rl_is_read_by_its_tag() -> None:
    keys = {
        "inference.0.tag": "student",
        "inference.0.parallel.tp": 4,
        "inference.0.vllm.gpu_memory_utilization": 0.5,
        "inference.1.tag": "teacher",
        "inference.1.parallel.tp": 2,
        "deployment.num_infer_gpus": 8,
        "deployment.num_teacher_gpus": 4,
        "trainer.loss.teacher_tau": 1.0,
    }
    draft = drafted("prime-rl", **keys)
    ours = draft.ours
    assert (ours["rollout.tensor_parallel"], ours["rollout.replicas"]) == (4, 2)
    assert ours["rollout.engine.gpu_memory_utilization"] == 0.5
    teacher = (ours["teachers.teacher.tensor_parallel"], ours["teachers.teacher.replicas"])
    assert teacher == (2, 2)
    assert "rollout.replicas" in draft.mapped["inference.0.parallel.tp"]


@pytest.mark.parametrize(
    ("name", "key", "ours"),
    [
        ("trl", "chat_template_kwargs.a.b", "student.chat_template_kwargs"),
        ("verl", "data.mm_processor_kwargs.size.height", "student.processor_kwargs"),
    ],
)
def test_a_section_inside_of_one_that_becomes_one_value_is_to_be_filled_in(
    name: str, key: str, ours: str
) -> None:
    assert key in drafted(name, **{key: 1}).fill_in[ours]


def test_variables_of_a_chat_template_that_are_nested_too_deeply_are_not_read() -> None:
    draft = drafted("trl", chat_template_kwargs="[" * 100_000)
    assert "student.chat_template_kwargs" in draft.fill_in


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_file_that_names_no_teacher_has_a_placeholder_for_it(name: str) -> None:
    draft = drafted(name, **{"model_name_or_path": "s", "model.name": "s", "seed": 1})
    assert draft.ours["teachers.teacher.model"] == "TEACHER"
    assert "teachers.teacher.model" in draft.fill_in
