"""NeMo-RL's distillation: ``examples/run_distillation.py`` with a YAML config.

Facts: ``examples/configs/distillation_math.yaml``, ``examples/configs/recipes/llm`` and
``nemo_rl/algorithms`` of github.com/NVIDIA-NeMo/RL, read in November 2026.
"""

from __future__ import annotations

from async_opd.tools.importing.common import batches, evaluation_every, length, log_to, section
from async_opd.tools.importing.draft import Draft

GENERATION = "policy.generation"
LOGGERS = ("wandb", "tensorboard", "mlflow", "swanlab")
OFF_POLICY = ("loss_fn.ce_loss_scale", "data.collator_mode", "data.train.text_key")
"""Keys that only a run has which trains on the texts of its data set."""


def together(draft: Draft) -> None:
    """Sets what several keys give together."""
    _recipe(draft)
    _loss(draft)
    sync = _sizes(draft)
    _pools(draft)
    _optimizer(draft, sync)
    _data(draft)
    draft.put("rollout.temperature", draft.number(f"{GENERATION}.temperature", default=1.0))
    answers = draft.whole("data.validation.repeat", default=1)
    temperature = draft.take(f"{GENERATION}.val_temperature", f"{GENERATION}.temperature")
    draft.put("eval.temperature", temperature)
    draft.put("eval.n", answers if temperature else None)
    # a step there makes one weight version, however many updates it has
    evaluation_every(draft, ("distillation.val_period",), ("checkpointing.save_period",), 1, 10)
    if not draft.has("distillation.val_period"):
        draft.ours["eval.every"] = 20
    if draft.take("checkpointing.enabled", default=True) is False:
        draft.ours["checkpoint.every"] = 0
    log_to(draft, [name for name in LOGGERS if draft.take(f"logger.{name}_enabled")] or ["console"])
    draft.put("eval.before", draft.take("distillation.val_at_start", default=False))
    if draft.whole("distillation.max_rollout_turns", default=1) > 1:
        draft.differs.append("distillation.max_rollout_turns: a response has one turn here")


def _recipe(draft: Draft) -> None:
    """Names a run that trains on given texts, or that has two vocabularies."""
    if found := [key for key in OFF_POLICY if draft.has(key)]:
        draft.another.append(
            f"off-policy: {', '.join(found)} train on the data set's texts there; here the teacher "
            "scores the student's (cold_start trains on given answers first)"
        )
    names = draft.below("teachers")
    if any(draft.below(f"teachers.{name}.aligner") for name in names):
        draft.another.append(
            "cross-tokenizer: teachers have an aligner of two vocabularies there; here student and "
            "teacher have one"
        )
    for name in names:
        ours = f"teachers.{'teacher' if len(names) == 1 else f'teacher_{name}'}"
        draft.give(f"{ours}.model", f"teachers.{name}.model_name")


def _loss(draft: Draft) -> None:
    """Both sides are scaled to sum to 1 over the teacher's top-k, unless zero_outside_topk."""
    if draft.another:
        draft.fill("loss.kind", "the loss of the run there is another one")
        return
    kind = draft.take("loss_fn.kl_type", default="mixed")
    zero = draft.take("loss_fn.zero_outside_topk", default=False)
    weight = draft.number("loss_fn.mixed_kl_weight", default=0.5)
    ours = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
    if str(kind) not in ours:
        draft.unreadable["loss_fn.kl_type"] = f"there is no divergence {kind!r} here"
    draft.ours["loss.kind"] = ours.get(str(kind), "mixed_kl")
    draft.ours["loss.support"], draft.ours["loss.tail"] = "teacher_topk", "renormalize"
    if kind == "mixed":
        draft.ours["loss.forward_weight"] = weight
    if zero:
        draft.differs.append(
            "loss_fn.zero_outside_topk sets the teacher to exp(-100) outside of its top-k there; "
            "here both sides are scaled to the support"
        )


def _sizes(draft: Draft) -> int:
    n = draft.whole("distillation.num_generations_per_prompt", default=1)
    draft.put("rollout.n", n)
    samples = draft.whole("distillation.num_prompts_per_step", default=128) * n
    batch = draft.count("policy.train_global_batch_size", default=samples)
    if draft.has("policy.train_global_batch_size"):  # the batch is that, whatever a step has
        sizes = ("async.sync_steps", "train.steps", "train.warmup_steps")
        draft.gives("distillation.num_prompts_per_step", *sizes)
        draft.gives("distillation.num_generations_per_prompt", "rollout.n", *sizes)
    sync = max(samples // batch, 1)
    batches(draft, batch, sync, 0)
    steps = draft.given("distillation.max_num_steps")
    length(draft, steps and int(steps) * sync, "distillation.max_num_epochs")
    if steps and sync > 1:
        draft.differs.append(f"distillation.max_num_steps: {sync} optimizer steps are one there")
    places = [f"policy.{one}.train_mb_tokens" for one in ("sequence_packing", "dynamic_batching")]
    draft.put("train.tokens_per_micro_batch", draft.whole(*places, default=8192))
    return sync


def _pools(draft: Draft) -> None:
    node = draft.whole("cluster.gpus_per_node", default=1)
    gpus = node * draft.whole("cluster.num_nodes", default=1)
    parallel = draft.count(f"{GENERATION}.vllm_cfg.tensor_parallel_size", default=1)
    resources = f"{GENERATION}.colocated.resources"
    draft.ours["rollout.tensor_parallel"] = parallel
    if draft.take(f"{GENERATION}.colocated.enabled", default=True):
        draft.ours.update({"rollout.placement": "colocated", "rollout.with": "train"})
        draft.put("rollout.replicas", max(gpus // parallel, 1))
        draft.put("train.ranks", gpus)
    else:
        own = draft.whole(f"{resources}.gpus_per_node")
        own *= draft.whole(f"{resources}.num_nodes", default=1)
        draft.put("rollout.placement", "dedicated")
        draft.put("rollout.replicas", max(own // parallel, 1))
        draft.put("train.ranks", max(gpus - own, 1))
    megatron = draft.take("policy.megatron_cfg.enabled", default=False)
    names = ("megatron_cfg",) if megatron else ("automodel_cfg", "dtensor_cfg")
    keys = [f"policy.{name}.context_parallel_size" for name in names]
    draft.put("train.context_parallel", draft.take(*keys, default=1))
    boxes = ("automodel_cfg", "dtensor_cfg")
    again = draft.take(*(f"policy.{one}.activation_checkpointing" for one in names))
    if again is not None:
        draft.put("train.gradient_checkpointing", "full" if again else "none")
    if draft.take(*(f"policy.{one}.cpu_offload" for one in boxes)):
        draft.ours["train.offload"] = "parameters"
    size = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    own_ranks = draft.take(*(f"teacher.{name}.{size}" for name in names))
    if own_ranks is not None and len(draft.below("teachers")) <= 1:
        draft.ours["teachers.teacher.tensor_parallel"] = own_ranks
    draft.differs.append("the teacher shares the student's GPUs there; here it has dedicated GPUs")


def _optimizer(draft: Draft, sync: int) -> None:
    """A linear rise and then a constant rate is the only schedule that is read.

    The schedule goes on once a step, after all of its ``sync`` updates.
    """
    box, kwargs = "policy.megatron_cfg", "policy.optimizer.kwargs"
    places: tuple[str, ...] = (kwargs,)
    draft.ours["train.schedule"] = "constant"
    if draft.take(f"{box}.enabled", default=False):
        warmup = draft.whole(f"{box}.scheduler.lr_warmup_iters")
        style = draft.take(f"{box}.scheduler.lr_decay_style", default="constant")
        if style != "constant":
            draft.differs.append(f"policy.scheduler: constant is used, there is no {style} here")
        places = (f"{box}.optimizer", kwargs)
        first = draft.number(f"{box}.optimizer.adam_beta1", default=0.9)
        betas = [first, draft.number(f"{box}.optimizer.adam_beta2", default=0.999)]
    else:
        warmup = _scheduled(draft)
        betas = draft.take(f"{kwargs}.betas", default=[0.9, 0.999])
    draft.put("train.lr", draft.given(*(f"{one}.lr" for one in places)))
    decay = draft.number(*(f"{one}.weight_decay" for one in places), default=0.01)
    draft.ours.update({"train.weight_decay": decay, "train.betas": betas})
    draft.ours["train.warmup_steps"] = warmup * sync


def _scheduled(draft: Draft) -> int:
    """Steps of the linear rise in ``policy.scheduler``, which torch's optimizers have."""
    warmup = 0
    for name in draft.below("policy.scheduler"):
        kind = str(draft.take(f"policy.scheduler.{name}.name", default=""))
        total = draft.whole(f"policy.scheduler.{name}.kwargs.total_iters")
        milestones = draft.take(f"policy.scheduler.{name}.milestones")
        for rest in ("factor", "start_factor", "end_factor"):
            draft.take(f"policy.scheduler.{name}.kwargs.{rest}")
        if kind.endswith("LinearLR"):
            warmup = total
        elif kind and not kind.endswith("ConstantLR"):
            draft.differs.append(f"policy.scheduler: constant is used, there is no {kind} here")
        elif not kind and milestones is None:
            draft.take(f"policy.scheduler.{name}")
    return warmup


def _data(draft: Draft) -> None:
    names = [k for k in draft.theirs if k.startswith("data.") and k.endswith("dataset_name")]
    for key in names:
        split = "eval" if "validation" in key else "train"
        draft.fill(f"data.{split}", f"NeMo-RL loads {draft.take(key)} by name: write a file")
    for key in ("prompt_file", "system_prompt_file"):
        if text := draft.take(f"data.default.{key}"):
            draft.fill(
                "data.train",
                f"NeMo-RL puts each problem into the text of {text} ({key}): write a file whose "
                "prompts have it",
            )
    if text := draft.take("data.default.teacher_prompt_file"):
        draft.fill("teachers.teacher.prompt_template", f"the text of {text}")
    section(draft, "policy.tokenizer.chat_template_kwargs", "student.chat_template_kwargs")
