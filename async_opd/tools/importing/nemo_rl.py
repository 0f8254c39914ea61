"""NeMo-RL's distillation: ``examples/run_distillation.py`` with a YAML config.

Facts: ``examples/configs/distillation_math.yaml``, ``examples/configs/recipes/llm`` and
``nemo_rl/algorithms`` of github.com/NVIDIA-NeMo/RL, read in November 2026.
"""

from __future__ import annotations

from async_opd.tools.importing.common import (
    batches,
    epochs,
    evaluation_every,
    log_to,
    template_variables,
)
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.tables.nemo_rl import GENERATION


def together(draft: Draft) -> None:
    """Sets what several keys say together."""
    _loss(draft)
    sync = _sizes(draft)
    _pools(draft)
    _optimizer(draft, sync)
    _data(draft)
    answers = draft.whole("data.validation.repeat", default=1)
    temperature = draft.take(f"{GENERATION}.val_temperature", f"{GENERATION}.temperature")
    draft.put("eval.temperature", temperature)
    draft.put("eval.n", answers if temperature else None)
    saved = draft.take("checkpointing.enabled", default=True)
    save = draft.number("checkpointing.save_period", default=10) if saved else -1
    # a step there makes one weight version, however many updates it has
    evaluation_every(draft, draft.number("distillation.val_period", default=20), save, 1)
    names = ("wandb", "tensorboard", "mlflow")
    log_to(draft, [name for name in names if draft.take(f"logger.{name}_enabled")] or ["console"])
    draft.take("logger.swanlab_enabled")
    draft.put("eval.before", draft.take("distillation.val_at_start", default=False))
    if draft.whole("distillation.max_rollout_turns", default=1) > 1:
        draft.differs.append("distillation.max_rollout_turns: a response has one turn here")


def _loss(draft: Draft) -> None:
    """Both sides are scaled to sum to 1 over the teacher's top-k, unless zero_outside_topk."""
    kind = draft.take("loss_fn.kl_type", default="mixed")
    zero = draft.take("loss_fn.zero_outside_topk", default=False)
    weight = draft.number("loss_fn.mixed_kl_weight", default=0.5)
    ours = {"forward": "forward_kl", "reverse": "reverse_kl", "mixed": "mixed_kl"}
    draft.ours["loss.kind"] = ours.get(str(kind), "reverse_kl")
    draft.ours["loss.support"], draft.ours["loss.tail"] = "teacher_topk", "renormalize"
    if kind == "mixed":
        draft.ours["loss.forward_weight"] = weight
    if zero:
        draft.differs.append(
            "loss_fn.zero_outside_topk sets the teacher to exp(-100) outside of its top-k there; "
            "here both sides are scaled to the support"
        )


def _sizes(draft: Draft) -> int:
    prompts = draft.whole("distillation.num_prompts_per_step", default=128)
    samples = prompts * draft.whole("distillation.num_generations_per_prompt", default=1)
    batch = draft.count("policy.train_global_batch_size", default=samples)
    sync = max(samples // batch, 1)
    batches(draft, batch, sync, 0)
    steps = draft.given("distillation.max_num_steps")
    epochs(draft, steps and int(steps) * sync, draft.given("distillation.max_num_epochs"))
    if steps and sync > 1:
        draft.differs.append(
            f"distillation.max_num_steps: a step there has {sync} optimizer steps, which are steps "
            "here"
        )
    packed, dynamic = (
        f"policy.{name}.train_mb_tokens" for name in ("sequence_packing", "dynamic_batching")
    )
    draft.put("train.tokens_per_micro_batch", draft.whole(packed, dynamic, default=8192))
    return sync


def _pools(draft: Draft) -> None:
    node = draft.whole("cluster.gpus_per_node", default=1)
    gpus = node * draft.whole("cluster.num_nodes", default=1)
    parallel = draft.count(f"{GENERATION}.vllm_cfg.tensor_parallel_size", default=1)
    resources = f"{GENERATION}.colocated.resources"
    own = draft.whole(f"{resources}.gpus_per_node") * draft.whole(
        f"{resources}.num_nodes", default=1
    )
    if draft.take(f"{GENERATION}.colocated.enabled", default=True):
        draft.ours.update({"rollout.placement": "colocated", "rollout.with": "train"})
        draft.put("rollout.replicas", max(gpus // parallel, 1))
        draft.put("train.ranks", gpus)
    else:
        draft.put("rollout.replicas", max(own // parallel, 1))
        draft.put("train.ranks", max(gpus - own, 1))
    megatron = draft.take("policy.megatron_cfg.enabled", default=False)
    names = ("megatron_cfg",) if megatron else ("automodel_cfg", "dtensor_cfg")
    keys = [f"policy.{name}.context_parallel_size" for name in names]
    for unused in ("automodel_cfg", "dtensor_cfg", "megatron_cfg"):
        draft.take(f"policy.{unused}.context_parallel_size")
    draft.put("train.context_parallel", draft.take(*keys, default=1))
    boxes = ("automodel_cfg", "dtensor_cfg")
    again = draft.take(*(f"policy.{one}.activation_checkpointing" for one in names))
    draft.put(
        "train.gradient_checkpointing", None if again is None else "full" if again else "none"
    )
    draft.take(*(f"policy.{one}.cpu_offload" for one in boxes))
    size = "tensor_model_parallel_size" if megatron else "tensor_parallel_size"
    own_ranks = draft.take(*(f"teacher.{name}.{size}" for name in names))
    draft.put("teachers.teacher.tensor_parallel", own_ranks)
    draft.differs.append("the teacher shares the student's GPUs there; here it has dedicated GPUs")


def _optimizer(draft: Draft, sync: int) -> None:
    """A linear rise and then a constant rate is the only schedule that is read.

    The schedule goes on once a step, after all of its ``sync`` updates.
    """
    box = "policy.megatron_cfg"
    megatron = draft.take(f"{box}.enabled", default=False)
    draft.ours["train.schedule"] = "constant"
    warmup = _scheduled(draft)
    if megatron:
        warmup = draft.whole(f"{box}.scheduler.lr_warmup_iters")
        style = draft.take(f"{box}.scheduler.lr_decay_style", default="constant")
        if style != "constant":
            draft.differs.append(
                f"policy.scheduler: {style} is not a schedule here; constant is used"
            )
        for name in ("lr", "weight_decay"):
            if draft.has(f"{box}.optimizer.{name}"):
                draft.ours[f"train.{name}"] = draft.number(f"{box}.optimizer.{name}")
        first = draft.number(f"{box}.optimizer.adam_beta1", default=0.9)
        second = draft.number(f"{box}.optimizer.adam_beta2", default=0.999)
        draft.ours["train.betas"] = [first, second]
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
            draft.differs.append(
                f"policy.scheduler: {kind} is not a schedule here; constant is used"
            )
        elif not kind and milestones is None:
            draft.take(f"policy.scheduler.{name}")
    return warmup


def _data(draft: Draft) -> None:
    names = {
        key: draft.take(key)
        for key in draft.theirs
        if key.startswith("data.") and key.endswith("dataset_name")
    }
    for key, name in names.items():
        split = "eval" if "validation" in key else "train"
        draft.fill_in.append(f"data.{split}: NeMo-RL loads {name} by name; give a file here")
    for key in ("prompt_file", "system_prompt_file"):
        if text := draft.take(f"data.default.{key}"):
            draft.fill_in.append(
                f"data.train: NeMo-RL puts each problem into the text of {text} ({key}): your "
                "prompts have to have it"
            )
    prompt = draft.take("data.default.teacher_prompt_file")
    if prompt:
        draft.ours["teachers.teacher.prompt_template"] = "{prompt}"
        draft.fill_in.append(f"teachers.teacher.prompt_template: the text of {prompt}")
    template_variables(draft, "policy.tokenizer.chat_template_kwargs")
