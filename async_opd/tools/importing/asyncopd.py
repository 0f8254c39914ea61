"""AsyncOPD (arXiv:2606.24143): a YAML config of ``opd-train``.

Facts: ``docs/configuration.md``, ``docs/training-modes.md``, ``opd/utils/config.py`` and
``configs/examples`` of github.com/furiosa-ai/async-opd, read in November 2026.
"""

from __future__ import annotations

from async_opd.tools.importing.common import batches, evaluation_every, joined_files, length, log_to
from async_opd.tools.importing.draft import Draft

OPD = "algorithm.opd"
MODES = {
    "forward_kl": ("forward_kl", "teacher_topk"),
    "reverse_kl": ("reverse_kl", "teacher_topk"),
    "reverse_kl_rollout_student_topk": ("reverse_kl", "student_topk"),
    "multi_sample_forward_kl": ("forward_kl", "full_vocab"),
    "multi_sample_policy_gradient_kl": ("reverse_kl", "full_vocab"),
}
"""Objective and support by their names of it. The last two estimate what here is computed."""


def together(draft: Draft) -> None:
    """Sets what several keys give together."""
    mode = draft.take("algorithm.mode", default="opd")
    if mode != "opd":
        draft.another.append(f"no distillation: algorithm.mode is {mode}; only opd has a teacher")
    _loss(draft)
    _sizes(draft)
    joined_files(draft)
    _pools(draft)
    if quantization := draft.take("rollout.quantization"):
        draft.ours["rollout.engine.extra.quantization"] = quantization
        draft.ours["sync.verify_every"] = 0
        draft.differs.append(
            "rollout.quantization: sync.verify_every is 0 for it, so that nothing proves that the "
            "rollout engines have the trainer's weights"
        )
    answers = draft.whole("eval.n_samples", default=32)
    temperature = draft.number("eval.temperature", default=1.0)
    draft.put("eval.n", answers)
    draft.put("eval.temperature", temperature if answers > 1 else None)
    draft.put("eval.before", draft.take("eval.before_train", default=True))
    # a step there makes one weight version, however many updates it has
    evaluation_every(draft, ("eval.freq",), ("trainer.save_freq",), 1)
    log_to(draft, ["wandb"] if draft.has("logging.wandb.project") else ["console"])
    thinking = draft.take("data.enable_thinking")
    if thinking is not None:
        draft.ours["student.chat_template_kwargs"] = {"enable_thinking": bool(thinking)}
    if draft.take("data.solution_key"):
        draft.fill_in["teachers.teacher.prompt_template"] = "if the teacher reads the solution"


def _loss(draft: Draft) -> None:
    mode = str(draft.take(f"{OPD}.kl_loss_mode", default="forward_kl"))
    hidden = draft.take(f"{OPD}.teacher_artifact_mode", default="legacy") == "hidden_recompute"
    samples = draft.take(f"{OPD}.pg_kl_n_total_samples", default=16)
    if mode in MODES:
        kind, support = MODES[mode]
        support = "full_vocab" if hidden else support
        draft.ours.update({"loss.kind": kind, "loss.support": support})
        if support != "full_vocab":
            own = support == "student_topk"
            place = f"{OPD}.rollout_student_topk_k" if own else "teacher.vllm.n_logprobs"
            draft.ours["loss.top_k"] = draft.take(place) or (64 if own else 10)
            draft.ours["loss.tail"] = "ignore"
        elif not hidden:
            draft.differs.append(
                f"{OPD}.kl_loss_mode: {samples} samples a token estimate this divergence there; "
                "here it is computed exactly"
            )
    elif mode == "policy_gradient_kl":
        draft.ours["loss.kind"] = "k1"
        _importance(draft)
    else:
        draft.unreadable[f"{OPD}.kl_loss_mode"] = f"there is no objective {mode!r} here"
    if draft.number(f"{OPD}.kl_token_clip"):
        draft.differs.append(
            f"{OPD}.kl_token_clip removes the gradient of every summand beyond it there; not here"
        )


def _importance(draft: Draft) -> None:
    if draft.take(f"{OPD}.use_importance_sampling", default=True) is False:
        draft.ours["loss.importance"] = "off"
    cap = draft.number(f"{OPD}.behave_imp_weight_cap", default=5.0)
    if draft.take(f"{OPD}.use_decoupled_loss"):
        draft.ours["loss.importance_cap"] = cap


def _sizes(draft: Draft) -> None:
    whole = draft.whole("trainer.batch_size", default=256)
    mini = draft.count("trainer.mini_batch_size", default=whole)
    sync = max(whole // mini, 1)
    kind = draft.take("pipeline.scheduling_mode", default="n_step_off")
    ahead = 0.0
    if kind == "fully_async":
        ahead = draft.number("pipeline.fully_async.staleness_threshold", default=8)
        evict = draft.take("pipeline.fully_async.evict_stale")
        draft.put("async.max_version_lag", int(ahead) if evict else None)
    elif kind != "fused_hybrid_sync":
        ahead = draft.number("pipeline.n_step_off.step_off", default=2)
    if draft.take("pipeline.fully_async.pause_mode", default="keep") == "wait":
        draft.ours["async.on_sync"] = "finish"
    draft.ours["rollout.n"] = 1
    batches(draft, mini, sync, ahead)
    steps = draft.given("trainer.total_steps")
    length(draft, steps and int(steps) * sync, "trainer.total_epochs", default=1)
    if steps and sync > 1:
        draft.differs.append(f"trainer.total_steps: {sync} optimizer steps are one there")
    ratio = draft.number("trainer.optim.lr_warmup_steps_ratio")
    total = draft.ours.get("train.steps")
    draft.ours["train.warmup_steps"] = round(ratio * (total or 0))
    if ratio and not total:
        draft.fill("train.warmup_steps", f"it is {ratio:g} of the steps there")
    lowest = draft.number("trainer.optim.min_lr")
    rate = draft.number("trainer.optim.lr", default=1e-5)
    draft.ours["train.lr"] = rate
    if draft.ours.get("train.schedule", "constant") == "cosine" and rate:
        draft.ours["train.min_lr_ratio"] = round(lowest / rate, 6)


def _pools(draft: Draft) -> None:
    parallel = draft.count("teacher.vllm.tensor_parallel_size", default=1)
    draft.ours["teachers.teacher.tensor_parallel"] = parallel
    draft.ours["teachers.teacher.replicas"] = max(_gpus(draft, "teacher") // parallel, 1)
    engines = draft.count("rollout.vllm.tensor_parallel_size", default=1)
    draft.put("rollout.tensor_parallel", engines)
    draft.ours["rollout.replicas"] = max(_gpus(draft, "rollout") // engines, 1)
    draft.ours["train.ranks"] = max(_gpus(draft, "trainer"), 1)


def _gpus(draft: Draft, pool: str) -> int:
    ids = draft.take(f"{pool}.gpu_ids")
    count = len([one for one in str(ids).split(",") if one.strip()]) if ids is not None else 1
    return draft.whole(f"{pool}.n_gpus", default=count)
