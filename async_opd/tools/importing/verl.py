"""verl's on-policy distillation: Hydra overrides of ``main_ppo`` and of ``fully_async_main``.

Facts: ``docs/algo/opd.md``, ``verl/trainer/config`` and
``examples/on_policy_distillation_trainer`` of github.com/verl-project/verl, read in November 2026.
"""

from __future__ import annotations

from typing import Any

from async_opd.tools.importing.common import (
    FROZEN,
    batches,
    epochs,
    evaluation_every,
    importable,
    joined_files,
    log_to,
)
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.entries import (
    ABSENT,
)
from async_opd.tools.importing.tables.verl import ACTOR, LOSS, MODEL, ROLLOUT, TEACHERS

ENGINE = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "dtype": "dtype",
    "enforce_eager": "extra.enforce_eager",
}
ESTIMATORS = {
    "k1": "k1",
    "kl": "k1",
    "k2": "k2",
    "mse": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
    "abs": "abs",
}
TOP_K = {
    "forward_kl_topk": ("forward_kl", "teacher_topk", "ignore"),
    "forward_kl_topk_tail": ("forward_kl", "teacher_topk", "bucket"),
    "reverse_kl_topk": ("reverse_kl", "student_topk", "ignore"),
}


def together(draft: Draft) -> None:
    """Sets what several keys say together."""
    if draft.take("distillation.enabled", default=True) is False:
        draft.differs.append("distillation is off there: without a teacher there is no run here")
    sync = _sizes(draft)
    joined_files(draft)
    _pools(draft)
    _teachers(draft)
    _loss(draft)
    _reward(draft)
    _lora(draft)
    _images(draft)
    _evaluation(draft, sync)
    log_to(draft, draft.take("trainer.logger", default=["console", "wandb"]))
    draft.put("data.answer", "reward_model.ground_truth")
    overlong = draft.take("data.filter_overlong_prompts", default=False)
    cut = draft.take("data.truncation", default="error")
    names = {"error": "refuse", "left": "truncate_left"}
    draft.put(
        "data.overlong", importable("data.overlong", "filter" if overlong else names.get(str(cut)))
    )
    for key in (f"{ACTOR}.use_kl_loss", f"{ACTOR}.entropy_coeff", "algorithm.use_kl_in_reward"):
        if draft.take(key):
            draft.differs.append(f"{key}: there is no such term in the loss here")


def _sizes(draft: Draft) -> int:
    """Batch and staleness; returns the optimizer steps of a weight version."""
    n = draft.whole(f"{ROLLOUT}.n", default=1)
    mini = draft.count(f"{ACTOR}.ppo_mini_batch_size", default=256)
    whole = draft.whole("data.train_batch_size", default=1024)
    trigger = draft.given("async_training.trigger_parameter_sync_step")
    threshold = draft.number("async_training.staleness_threshold")
    partial = draft.take("async_training.partial_rollout")
    require = draft.whole("async_training.require_batches", default=1)
    sync = max(int(trigger or 1) * require if trigger else whole // mini, 1)
    batches(draft, mini * n, sync, threshold)
    if partial is False:
        draft.put("async.on_sync", "finish")
    if require > 1:
        draft.differs.append(
            "async_training.require_batches: each mini-batch is a separate optimizer step here"
        )
    tokens = draft.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384)
    parallel = draft.whole(f"{ACTOR}.ulysses_sequence_parallel_size", default=1)
    draft.put("train.tokens_per_micro_batch", tokens * parallel)
    steps = draft.given("trainer.total_training_steps")
    epochs(
        draft,
        steps and int(steps) * (1 if trigger else sync),  # a step there has several updates
        draft.number("trainer.total_epochs", "rollout.total_epochs", default=30),
    )
    rollouts = draft.given("rollout.total_rollout_steps")
    if rollouts:
        draft.ours.pop("train.epochs", None)
        draft.put("train.steps", max(int(rollouts) // mini, 1))
    return sync


def _pools(draft: Draft) -> None:
    ranks = draft.whole("trainer.n_gpus_per_node", default=8) * draft.whole(
        "trainer.nnodes", default=1
    )
    draft.put("train.ranks", ranks)
    parallel = draft.count(f"{ROLLOUT}.tensor_model_parallel_size", default=2)
    own = draft.given("rollout.n_gpus_per_node")
    if draft.take("actor_rollout_ref.hybrid_engine", default=True) is False or own:
        gpus = int(own or ranks) * draft.whole("rollout.nnodes", default=1)
        draft.put("rollout.replicas", max(gpus // parallel, 1))
        return
    draft.ours.update({"rollout.placement": "colocated", "rollout.with": "train"})
    draft.put("rollout.replicas", max(ranks // parallel, 1))


def _teachers(draft: Draft) -> None:
    names = draft.below(TEACHERS)
    several = [name for name in names if name != "teacher_model"]
    if several and len(names) > len(several):
        draft.differs.append(
            "teacher_model: verl leaves it out beside named teachers; so does this"
        )
    pool = draft.whole("distillation.n_gpus_per_node", "distillation.teacher_model.n_gpus_per_node")
    nodes = draft.whole("distillation.nnodes", "distillation.teacher_model.nnodes", default=1)
    if draft.has("distillation.teacher_model.model_path"):  # before verl had several teachers
        _teacher(draft, "distillation.teacher_model", "teacher", pool * nodes)
        draft.take("distillation.teacher_model.enable_resource_pool")
    for name in several or names:
        alone = len(several) <= 1 and not several
        _teacher(draft, f"{TEACHERS}.{name}", "teacher" if alone else name, alone and pool * nodes)


def _teacher(draft: Draft, theirs: str, name: str, gpus: int) -> None:
    """One teacher; ``gpus`` of the whole pool if it is the only one."""
    ours = f"teachers.{name}"
    draft.ours[f"{ours}.model"] = draft.take(f"{theirs}.model_path")
    key = draft.take(f"{theirs}.key")
    draft.take(f"{theirs}.inference.name")
    if key is not None:
        draft.ours[f"{ours}.sources"] = [key]
    parallel = draft.count(f"{theirs}.inference.tensor_model_parallel_size", default=2)
    replicas = draft.whole(f"{theirs}.num_replicas") or max(int(gpus or parallel) // parallel, 1)
    draft.ours[f"{ours}.tensor_parallel"], draft.ours[f"{ours}.replicas"] = parallel, replicas
    draft.take(f"{theirs}.inference.gpu_memory_utilization")
    for one, engine in ENGINE.items():
        value = draft.take(f"{theirs}.inference.{one}")
        if value not in (None, False) and one != "gpu_memory_utilization":
            draft.ours[f"{ours}.engine.{engine}"] = value


def _loss(draft: Draft) -> None:
    mode = str(draft.take(f"{LOSS}.loss_mode", default="k3"))
    gradient = bool(draft.take(f"{LOSS}.use_policy_gradient", default=False))
    clamp, floor = draft.take(f"{LOSS}.loss_max_clamp"), draft.take(f"{LOSS}.log_prob_min_clamp")
    top = draft.take(f"{LOSS}.topk", default=32)
    if mode in TOP_K:
        kind, support, tail = TOP_K[mode]
        draft.ours.update({"loss.kind": kind, "loss.support": support, "loss.top_k": top})
        draft.ours["loss.tail"] = tail
        if gradient:
            draft.differs.append(
                f"{LOSS}.use_policy_gradient with {mode} trains on the sampled token alone there: "
                "here the whole support is differentiated"
            )
    elif mode == "jsd":
        draft.ours.update({"loss.kind": "jsd", "loss.support": "teacher_topk"})
        draft.ours.update({"loss.top_k": top, "loss.tail": "ignore"})
        draft.put("loss.beta", draft.take(f"{LOSS}.jsd_beta"))
    else:
        _estimator(draft, mode, gradient)
    _clamps(draft, mode, gradient, clamp, floor)


def _estimator(draft: Draft, mode: str, gradient: bool) -> None:
    kind = ESTIMATORS.get(mode)
    if kind is None:
        draft.unmapped[f"{LOSS}.loss_mode"] = f"there is no objective {mode!r} here"
        return
    draft.ours["loss.kind"] = kind
    if kind == "k1" and not gradient:
        draft.differs.append(f"{mode} without a policy gradient does not distil: one is used here")
    if kind != "k1" and gradient:
        draft.ours["loss.gradient"] = "policy_gradient"
    if kind == "k3" and not gradient:
        draft.differs.append("k3 is bounded to [-10, 10] there, which removes gradients: not here")


def _clamps(draft: Draft, mode: str, gradient: bool, clamp: Any, floor: Any) -> None:
    kind = draft.ours.get("loss.kind")
    if clamp is not None:
        if gradient or mode in TOP_K:
            draft.ours["loss.clamp"] = clamp
        if not gradient:
            draft.differs.append(
                f"{LOSS}.loss_max_clamp removes the gradient of every token beyond {clamp} there; "
                + ("here such tokens keep theirs, scaled down" if mode in TOP_K else "not here")
            )
    if floor is not None:
        if kind in ("reverse_kl", "k1", "k2", "k3", "abs"):
            draft.ours["loss.teacher_floor"] = floor
        draft.differs.append(
            f"{LOSS}.log_prob_min_clamp bounds the student too there, which removes the gradient "
            "of tokens that it excludes: here the student is never bounded"
        )


def _reward(draft: Draft) -> None:
    clips = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    low, high, dual = (
        draft.take(f"{ACTOR}.{name}", f"{ACTOR}.clip_ratio")
        if name != "clip_ratio_c"
        else draft.take(f"{ACTOR}.{name}")
        for name in clips
    )
    std = draft.take("algorithm.norm_adv_by_std_in_grpo", default=True)
    coefficient = draft.take(f"{LOSS}.distillation_loss_coef", default=1.0)
    if not draft.take(
        f"{LOSS}.use_task_rewards", "distillation.distillation_loss.use_policy_loss", default=True
    ):
        return
    if draft.whole(f"{ROLLOUT}.n", default=1) < 2:
        draft.differs.append(f"{LOSS}.use_task_rewards: a group of one has no advantage: no reward")
        return
    draft.put("loss.weight", coefficient)
    draft.ours["reward.grader"] = "math_verify"
    draft.fill_in.append("reward.grader: verl chose a grader by each row's data_source")
    values = {"clip_low": low, "clip_high": high, "dual_clip": dual}
    draft.ours.update({f"reward.{one}": v for one, v in values.items() if v is not None})
    if not std:
        draft.ours["reward.normalize"] = "none"


def _lora(draft: Draft) -> None:
    rank = draft.whole(f"{MODEL}.lora_rank")
    alpha, targets = (
        draft.take(f"{MODEL}.lora_alpha", default=16),
        draft.take(f"{MODEL}.target_modules", default="all-linear"),
    )
    if rank > 0:
        draft.ours.update({"train.lora.rank": rank, "train.lora.alpha": alpha})
        draft.put("train.lora.targets", targets)


def _images(draft: Draft) -> None:
    """Settings of the student's image processor, and whether its tower is trained."""
    key = "data.mm_processor_kwargs"
    whole = draft.take(key)
    given = dict(whole) if isinstance(whole, dict) else {}
    given |= {name: draft.take(f"{key}.{name}") for name in draft.below(key)}
    if given:
        draft.put("student.processor_kwargs", importable("student.processor_kwargs", given))
        draft.differs.append(
            f"{key}: a VLM teacher has separate processor_kwargs, which are not written"
        )
    if draft.take(f"{ACTOR}.freeze_vision_tower", default=False) is True:
        draft.put("train.freeze", importable("train.freeze", FROZEN))


def _evaluation(draft: Draft, sync: int) -> None:
    sampled = draft.take(f"{ROLLOUT}.val_kwargs.do_sample", default=False)
    answers = draft.whole(f"{ROLLOUT}.val_kwargs.n", default=1)
    temperature = draft.number(f"{ROLLOUT}.val_kwargs.temperature")
    draft.put("eval.temperature", temperature if sampled else ABSENT)
    draft.put("eval.n", answers if sampled else ABSENT)
    before = draft.take("trainer.val_before_train", default=True)
    draft.put("eval.before", before)
    every = draft.number("trainer.test_freq", "rollout.test_freq", default=-1)
    # without the trigger a step there makes one weight version, however many updates it has
    each = sync if draft.has("async_training.trigger_parameter_sync_step") else 1
    evaluation_every(draft, every, draft.number("trainer.save_freq", default=-1), each)
