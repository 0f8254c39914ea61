"""Keys of other frameworks that a config of ours may be given by mistake, and our name for each.

tests/tools/importing/test_foreign_keys.py compares them with the tables of ``async_opd import``.
By the last part of the key, since it stands in another section than there.
"""

from __future__ import annotations

FOREIGN = {
    "verl": {
        "max_prompt_length": "data.max_prompt_tokens",
        "max_response_length": "rollout.max_tokens",
        "train_batch_size": "train.batch_size",
        "ppo_mini_batch_size": "train.batch_size",
        "train_files": "data.train",
        "val_files": "data.eval",
        "prompt_key": "data.prompt",
        "tensor_model_parallel_size": "rollout.tensor_parallel",
        "loss_agg_mode": "loss.reduction",
        "clip_grad": "train.max_grad_norm",
        "grad_clip": "train.max_grad_norm",
        "ppo_max_token_len_per_gpu": "train.tokens_per_micro_batch",
        "ulysses_sequence_parallel_size": "train.context_parallel",
        "enable_gradient_checkpointing": "train.gradient_checkpointing",
        "teacher_key": "data.route_by",
        "loss_mode": "loss.kind",
        "topk": "loss.top_k",
        "use_task_rewards": "reward",
        "distillation_loss_coef": "loss.weight",
        "loss_max_clamp": "loss.clamp",
        "log_prob_min_clamp": "loss.teacher_floor",
        "trigger_parameter_sync_step": "async.sync_steps",
        "partial_rollout": "async.on_sync",
        "total_training_steps": "train.steps",
        "project_name": "log.project",
        "experiment_name": "name",
        "save_freq": "checkpoint.every_steps",
        "test_freq": "eval.every_steps",
    },
    "TRL": {
        "learning_rate": "train.lr",
        "lr_scheduler_type": "train.schedule",
        "max_completion_length": "rollout.max_tokens",
        "max_new_tokens": "rollout.max_tokens",
        "num_generations": "rollout.n",
        "per_device_train_batch_size": "train.batch_size",
        "max_steps": "train.steps",
        "max_staleness": "async.max_version_lag",
        "weight_sync_steps": "async.sync_steps",
        "teacher_server_urls": "teachers.<name>.urls",
        "loss_top_k": "loss.top_k",
        "loss_add_tail": "loss.tail",
        "teacher_top_k": "loss.top_k",
        "add_tail_bucket": "loss.tail",
        "lora_r": "train.lora.rank",
        "report_to": "log.loggers",
        "run_name": "name",
        "save_total_limit": "checkpoint.keep",
        "queue_maxsize": "queue.max_samples",
    },
    "prime-rl": {
        "group_size": "rollout.n",
        "rollouts_per_example": "rollout.n",
        "max_completion_tokens": "rollout.max_tokens",
        "max_off_policy_steps": "async.max_version_lag",
        "max_async_level": "async.staleness_threshold",
        "teacher_tau": "loss.weight",
        "adv_tau": "reward.weight",
        "num_train_gpus": "train.ranks",
        "num_infer_gpus": "rollout.replicas",
        "max_norm": "train.max_grad_norm",
        "keep_last": "checkpoint.keep",
    },
    "AsyncOPD": {
        "kl_loss_mode": "loss.kind",
        "rollout_student_topk_k": "loss.top_k",
        "n_logprobs": "loss.top_k",
        "step_off": "async.staleness_threshold",
        "evict_stale": "async.max_version_lag",
        "pause_mode": "async.on_sync",
        "mini_batch_size": "train.batch_size",
        "lr_decay_style": "train.schedule",
        "answer_key": "data.answer",
        "enable_thinking": "student.chat_template_kwargs",
        "behave_imp_weight_cap": "loss.importance_cap",
        "nccl_socket_ifname": "cluster.interface",
    },
    "NeMo-RL": {
        "kl_type": "loss.kind",
        "topk_logits_k": "loss.top_k",
        "zero_outside_topk": "loss.tail",
        "num_prompts_per_step": "train.batch_size",
        "num_generations_per_prompt": "rollout.n",
        "train_global_batch_size": "train.batch_size",
        "max_total_sequence_length": "rollout.engine.max_model_len",
        "max_num_steps": "train.steps",
        "train_mb_tokens": "train.tokens_per_micro_batch",
        "val_period": "eval.every_steps",
        "max_val_samples": "eval.max_prompts",
        "keep_top_k": "checkpoint.keep",
        "save_period": "checkpoint.every_steps",
    },
}
"""Our key by the last part of theirs, for each framework."""

SECTIONS = {
    "actor_rollout_ref": "verl",
    "distillation": "verl or NeMo-RL",
    "async_training": "verl",
    "trainer": "verl, prime-rl or AsyncOPD",
    "orchestrator": "prime-rl",
    "teacher_inference": "prime-rl",
    "policy": "NeMo-RL",
    "loss_fn": "NeMo-RL",
    "algorithm": "AsyncOPD or verl",
    "pipeline": "AsyncOPD",
}
"""Whole sections that only a file of another framework has."""

GPU_COUNTS = ("gpus", "num_gpus", "n_gpus", "gpus_per_node", "n_gpus_per_node", "nodes", "nnodes")
"""Keys of the number of GPUs of a whole run, which no config of ours has."""
GPUS = (
    "each pool has its own: rollout.replicas × rollout.tensor_parallel, the same of each teacher, "
    "and train.ranks; async_opd plan CONFIG --gpus N advises them"
)
"""Where GPUs are set."""


def name_here(key: str) -> tuple[str, str] | None:
    """The framework that a key belongs to and our name for it; None for any other key.

    Our name is empty for one of SECTIONS.
    """
    if key in SECTIONS:
        return SECTIONS[key], ""
    last = key.rpartition(".")[2]
    for framework, names in FOREIGN.items():
        if last in names:
            return framework, names[last]
    return None
