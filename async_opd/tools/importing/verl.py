"""verl's on-policy distillation: Hydra overrides of ``main_ppo`` and of ``fully_async_main``.

    trainer_mode            a version of the weights has            rollouts run ahead by
    sync                    train_batch_size / mini batches         nothing, colocated
    colocate_async          train_batch_size / mini batches         num_warmup_batches, colocated
    separate_async          parameter_sync_step mini batches        num_warmup_batches
    fully_async_main        trigger_parameter_sync_step steps       staleness_threshold

Forks before ``distillation`` have ``adv_estimator=opd`` and the teacher in ``ref.model.path``.

Facts: ``docs/algo/opd.md``, ``docs/advance/v1_async_trainer.md``, ``verl/trainer/config`` and
``examples/on_policy_distillation_trainer`` of github.com/verl-project/verl, read in November 2026.
"""

from __future__ import annotations

from async_opd.tools.importing.common import (
    FROZEN,
    batches,
    evaluation_every,
    joined_files,
    length,
    log_to,
    section,
)
from async_opd.tools.importing.draft import Draft

ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
LOSS, TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"
V1, TRIGGER = "trainer.v1", "async_training.trigger_parameter_sync_step"
FORK = "actor_rollout_ref.ref.model.path"
MODES = ("sync", "colocate_async", "separate_async")
ENGINE = (
    "gpu_memory_utilization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "dtype",
)
ESTIMATORS = {k: k for k in ("k1", "k2", "k3", "abs")}
ESTIMATORS |= {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
CUTS = {"error": "refuse", "left": "truncate_left"}
TOP_K = {
    "forward_kl_topk": ("forward_kl", "teacher_topk", "ignore"),
    "forward_kl_topk_tail": ("forward_kl", "teacher_topk", "bucket"),
    "reverse_kl_topk": ("reverse_kl", "student_topk", "ignore"),
}


def together(draft: Draft) -> None:
    """Sets what several keys give together."""
    if draft.take("distillation.enabled", default=True) is False:
        draft.another.append("no distillation: distillation.enabled is off there")
    mode = str(draft.take(f"{V1}.trainer_mode", default="sync"))
    if mode not in MODES:
        draft.unreadable[f"{V1}.trainer_mode"] = f"{mode!r} is not one of {', '.join(MODES)}"
    sync = _sizes(draft, mode)
    joined_files(draft)
    _pools(draft, mode)
    if not _fork(draft):
        _teachers(draft)
        _loss(draft)
        _reward(draft)
    _lora(draft)
    _images(draft)
    _evaluation(draft, sync)
    log_to(draft, draft.take("trainer.logger", default=["console", "wandb"]))
    draft.put("data.answer", "reward_model.ground_truth")
    if draft.take("data.filter_overlong_prompts", default=False):
        draft.put("data.overlong", "filter")
    else:
        cut = str(draft.take("data.truncation", default="error"))
        draft.put("data.overlong", CUTS.get(cut))
        if cut not in CUTS:
            draft.unreadable["data.truncation"] = f"a prompt is not cut at its {cut} here"
    for key in (f"{ACTOR}.use_kl_loss", f"{ACTOR}.entropy_coeff", "algorithm.use_kl_in_reward"):
        if draft.take(key):
            draft.differs.append(f"{key}: there is no such term in the loss here")


def _sizes(draft: Draft, mode: str) -> int:
    """Batch and staleness; returns the optimizer steps of a weight version."""
    n = draft.whole(f"{ROLLOUT}.n", default=1)
    draft.put("rollout.n", n)
    mini = draft.count(f"{ACTOR}.ppo_mini_batch_size", default=256)
    trigger = draft.given(TRIGGER)
    threshold = draft.number("async_training.staleness_threshold")
    if trigger:
        require = draft.whole("async_training.require_batches", default=1)
        if require > 1:
            draft.differs.append(
                "async_training.require_batches: each mini-batch is a separate optimizer step here"
            )
        sync = int(trigger) * require
    else:
        every = draft.given(f"{V1}.{mode}.parameter_sync_step")
        sync = int(every or draft.whole("data.train_batch_size", default=1024) // mini)
    if mode in MODES[1:]:
        threshold = draft.number(f"{V1}.{mode}.num_warmup_batches", default=1)
        _versions(draft)
    sync = max(sync, 1)
    batches(draft, mini * n, sync, threshold)
    if draft.take("async_training.partial_rollout") is False:
        draft.put("async.on_sync", "finish")
    tokens = draft.whole(f"{ACTOR}.ppo_max_token_len_per_gpu", default=16384)
    parallel = draft.whole(f"{ACTOR}.ulysses_sequence_parallel_size", default=1)
    draft.put("train.context_parallel", parallel)
    draft.put("train.tokens_per_micro_batch", tokens * parallel)
    rollouts = draft.given("rollout.total_rollout_steps")
    if rollouts:
        draft.put("train.steps", max(int(rollouts) // mini, 1))
        return sync
    steps = draft.given("trainer.total_training_steps")
    each = 1 if trigger else sync  # otherwise a step there has several updates
    epochs = ("trainer.total_epochs", "rollout.total_epochs")
    length(draft, steps and steps * each, *epochs, default=30)
    return sync


def _versions(draft: Draft) -> None:
    """How stale a sample may be where rollouts run ahead."""
    lag = draft.whole(f"{V1}.sampler.max_off_policy_threshold", default=8)
    draft.put("async.max_version_lag", lag)
    strategy = draft.take(f"{V1}.sampler.max_off_policy_strategy", default="drop")
    draft.differs.append(
        f"max_off_policy_threshold: {strategy} beyond it there, sampled again here"
    )


def _pools(draft: Draft, mode: str) -> None:
    ranks = draft.whole("trainer.n_gpus_per_node", default=8)
    ranks *= draft.whole("trainer.nnodes", default=1)
    draft.put("train.ranks", ranks)
    parallel = draft.count(f"{ROLLOUT}.tensor_model_parallel_size", default=2)
    draft.ours["rollout.tensor_parallel"] = parallel
    place = ROLLOUT if mode == "separate_async" else "rollout"
    own = draft.given(f"{place}.n_gpus_per_node")
    separate = draft.take("actor_rollout_ref.hybrid_engine", default=True) is False
    if separate or own or mode == "separate_async":
        gpus = int(own or ranks) * draft.whole(f"{place}.nnodes", default=1)
        draft.put("rollout.placement", "dedicated")
        draft.put("rollout.replicas", max(gpus // parallel, 1))
        return
    draft.ours.update({"rollout.placement": "colocated", "rollout.with": "train"})
    draft.put("rollout.replicas", max(ranks // parallel, 1))


def _fork(draft: Draft) -> bool:
    """Whether the run is that of a fork with its teacher in place of the reference model."""
    estimator = draft.take("algorithm.adv_estimator", default="grpo")
    if any(key.startswith("distillation.teacher") for key in draft.theirs) or estimator != "opd":
        return False
    draft.give("teachers.teacher.model", FORK)
    draft.fill("loss.kind", "verl has no adv_estimator=opd, a fork has it: see how it estimates "
               "the divergence (k1: the log-ratio of the sampled token)")  # fmt: skip
    if draft.below("algorithm.opd_text_splitter"):
        draft.another.append(
            "cross-tokenizer: algorithm.opd_text_splitter aligns the texts of two vocabularies "
            "there; here student and teacher have one"
        )
    draft.take("algorithm.opd_text_splitter.name")
    return True


def _teachers(draft: Draft) -> None:
    names = draft.below(TEACHERS)
    several = [name for name in names if name != "teacher_model"]
    if several and len(names) > len(several):
        draft.differs.append("teacher_model: it is left out beside named teachers, as verl does")
    shared = draft.take("distillation.teacher_execution") == "trainer"
    places = ("distillation", "distillation.teacher_model")
    if draft.take(*(f"{one}.enable_resource_pool" for one in places)) is False or shared:
        draft.differs.append(
            "teachers share the trainer's GPUs there (enable_resource_pool, teacher_execution); "
            "here they have dedicated GPUs"
        )
    old = "distillation.teacher_model"
    if draft.has(f"{old}.model_path"):  # before verl had several teachers
        _teacher(draft, old, "teacher", alone=True)
    for name in several or names:
        _teacher(draft, f"{TEACHERS}.{name}", name if several else "teacher", not several)


def _teacher(draft: Draft, theirs: str, name: str, alone: bool) -> None:
    """One teacher, which has the whole pool if it is ``alone``."""
    ours = f"teachers.{name}"
    draft.give(f"{ours}.model", f"{theirs}.model_path")
    if (key := draft.take(f"{theirs}.key")) is not None:
        draft.ours[f"{ours}.sources"] = [key]
    parallel = draft.count(f"{theirs}.inference.tensor_model_parallel_size", default=2)
    replicas = draft.whole(f"{theirs}.num_replicas")
    if alone and not replicas:
        places = ("distillation", "distillation.teacher_model")
        gpus = draft.whole(*(f"{one}.n_gpus_per_node" for one in places))
        gpus *= draft.whole(*(f"{one}.nnodes" for one in places), default=1)
        replicas = gpus // parallel
    draft.ours |= {f"{ours}.tensor_parallel": parallel, f"{ours}.replicas": max(replicas, 1)}
    draft.gives(f"{theirs}.key", f"{ours}.sources")
    draft.gives(f"{theirs}.num_replicas", f"{ours}.replicas")
    size = f"{theirs}.inference.tensor_model_parallel_size"
    draft.gives(size, f"{ours}.tensor_parallel", f"{ours}.replicas")
    for one in ENGINE:
        draft.give(f"{ours}.engine.{one}", f"{theirs}.inference.{one}")
    eager = f"{ours}.engine.extra.enforce_eager"
    if draft.give(eager, f"{theirs}.inference.enforce_eager") is False:
        del draft.ours[eager]


def _loss(draft: Draft) -> None:
    mode = str(draft.take(f"{LOSS}.loss_mode", default="k3"))
    gradient = bool(draft.take(f"{LOSS}.use_policy_gradient", default=False))
    if mode in TOP_K or mode == "jsd":
        kind, support, tail = TOP_K.get(mode, ("jsd", "teacher_topk", "ignore"))
        draft.ours.update({"loss.kind": kind, "loss.support": support, "loss.tail": tail})
        draft.ours["loss.top_k"] = draft.take(f"{LOSS}.topk", default=32)
    if mode == "jsd":
        draft.put("loss.beta", draft.take(f"{LOSS}.jsd_beta"))
    elif mode not in TOP_K:
        _estimator(draft, mode, gradient)
    elif gradient:
        draft.differs.append(
            f"{LOSS}.use_policy_gradient with {mode} trains on the sampled token alone there: "
            "here the whole support is differentiated"
        )
    _clamps(draft, mode, gradient)


def _estimator(draft: Draft, mode: str, gradient: bool) -> None:
    kind = ESTIMATORS.get(mode)
    if kind is None:
        draft.unreadable[f"{LOSS}.loss_mode"] = f"there is no objective {mode!r} here"
        return
    draft.ours["loss.kind"] = kind
    if kind == "k1" and not gradient:
        draft.differs.append(f"{mode} without a policy gradient does not distil: one is used here")
    if kind != "k1":
        draft.put("loss.gradient", "policy_gradient" if gradient else None)
    if kind == "k3" and not gradient:
        draft.differs.append("k3 is bounded to [-10, 10] there, which removes gradients: not here")


def _clamps(draft: Draft, mode: str, gradient: bool) -> None:
    kind = draft.ours.get("loss.kind")
    clamp, floor = draft.take(f"{LOSS}.loss_max_clamp"), draft.take(f"{LOSS}.log_prob_min_clamp")
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
    if not draft.take(f"{LOSS}.use_task_rewards", f"{LOSS}.use_policy_loss", default=True):
        return
    if draft.whole(f"{ROLLOUT}.n", default=1) < 2:
        draft.differs.append(f"{LOSS}.use_task_rewards: a group of one has no advantage: no reward")
        return
    clip = f"{ACTOR}.clip_ratio"
    values = {
        "loss.weight": draft.take(f"{LOSS}.distillation_loss_coef", default=1.0),
        "reward.clip_low": draft.take(f"{clip}_low", clip),
        "reward.clip_high": draft.take(f"{clip}_high", clip),
        "reward.dual_clip": draft.take(f"{clip}_c"),
    }
    for key, value in values.items():
        draft.put(key, value)
    draft.fill("reward.grader", "verl chose a grader by each row's data_source")
    if not draft.take("algorithm.norm_adv_by_std_in_grpo", default=True):
        draft.ours["reward.normalize"] = "none"


def _lora(draft: Draft) -> None:
    rank = draft.whole(f"{MODEL}.lora_rank")
    if rank > 0:
        draft.ours["train.lora.rank"] = rank
        draft.ours["train.lora.alpha"] = draft.take(f"{MODEL}.lora_alpha", default=16)
        draft.put("train.lora.targets", draft.take(f"{MODEL}.target_modules", default="all-linear"))


def _images(draft: Draft) -> None:
    """Settings of the student's image processor, and whether its tower is trained."""
    key = "data.mm_processor_kwargs"
    if section(draft, key, "student.processor_kwargs"):
        draft.differs.append(f"{key}: separate processor_kwargs of a VLM teacher are not written")
    if draft.take(f"{ACTOR}.freeze_vision_tower", default=False) is True:
        draft.put("train.freeze", FROZEN)


def _evaluation(draft: Draft, sync: int) -> None:
    if draft.take(f"{ROLLOUT}.val_kwargs.do_sample", default=False):
        draft.put("eval.temperature", draft.number(f"{ROLLOUT}.val_kwargs.temperature"))
        draft.put("eval.n", draft.whole(f"{ROLLOUT}.val_kwargs.n", default=1))
    draft.put("eval.before", draft.take("trainer.val_before_train", default=True))
    # without the trigger a step there makes one weight version, however many updates it has
    each = sync if draft.has(TRIGGER) else 1
    evaluate = ("trainer.test_freq", "rollout.test_freq")
    evaluation_every(draft, evaluate, ("trainer.save_freq",), each)
