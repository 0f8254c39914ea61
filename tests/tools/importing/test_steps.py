"""A step here of frameworks whose steps have several updates; NeMo-RL's two trainers."""

from __future__ import annotations

from typing import Any

from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.frameworks import FRAMEWORKS

MEGATRON = "policy.megatron_cfg"


def drafted(name: str = "nemo-rl", **keys: Any) -> Draft:
    draft = Draft({key.replace("__", "."): value for key, value in keys.items()})
    draft.apply(FRAMEWORKS[name].table)
    FRAMEWORKS[name].together(draft)
    draft.finish(FRAMEWORKS[name].table)
    return draft


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
    assert [line for line in draft.fill_in if "prompt_file" in line] == [
        "data.train: NeMo-RL puts each problem into the text of cot.txt (prompt_file): your "
        "prompts have to have it"
    ]


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
