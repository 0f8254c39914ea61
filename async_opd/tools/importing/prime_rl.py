"""prime-rl's on-policy distillation: ``rl.toml`` in the forms that it has had.

    [trainer.loss] teacher_tau             a teacher beside the reward
    [orchestrator] training_mode = "opd"   a teacher alone, with [orchestrator.teacher]
    [[orchestrator.algorithms]] id = "opd"      the same, with [orchestrator.models.<name>]
    [orchestrator.train.algo] type = "opd"      the same, with its teacher inline

Facts: ``docs/on_policy_distillation.md``, ``docs/algorithms.md``, ``configs/debug`` and
``packages/prime-rl-configs`` of github.com/PrimeIntellect-ai/prime-rl, read in November 2026.
"""

from __future__ import annotations

from typing import Any

from async_opd.tools.importing.common import FROZEN, PLACEHOLDER, batches, importable, log_to
from async_opd.tools.importing.draft import Draft
from async_opd.tools.importing.entries import Meaningless

ORCHESTRATOR, LOSS = "orchestrator", "trainer.loss"
ENVIRONMENTS = ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env")
ALGORITHMS = ("orchestrator.train.algo", "orchestrator.algo", "orchestrator.algorithms.0")
ENDED = Meaningless("responses end at the model's end tokens")
UNCAPPED = 1000
"""An ``importance_cap`` that no ratio reaches: there the ratio is not truncated."""


def together(draft: Draft) -> None:
    """Sets what several keys say together."""
    kind, prefix = _algorithm(draft)
    n = draft.whole(
        "orchestrator.group_size",
        "orchestrator.train.group_size",
        "orchestrator.rollouts_per_example",
        default=1,
    )
    draft.ours["rollout.n"] = n
    level = draft.number("max_async_level", "orchestrator.max_async_level", default=1)
    batches(draft, draft.whole("orchestrator.batch_size", default=128), 1, level)
    _sampling(draft)
    _teacher(draft, kind, prefix)
    _objective(draft, kind, n)
    _optimizer(draft)
    _data(draft)
    draft.put("rollout.replicas", _engines(draft))
    interval = draft.number("orchestrator.eval.interval")
    draft.ours["eval.every"] = int(interval)
    draft.put("eval.before", not draft.take("orchestrator.eval.skip_first_step", default=False))
    named = draft.has("wandb.project") or draft.has("monitors.wandb.project")
    log_to(draft, ["wandb"] if named else ["console"])


def _engines(draft: Draft) -> int:
    parallel = draft.count("inference.parallel.tp")
    return max(draft.whole("deployment.num_infer_gpus", default=1) // parallel, 1)


def _algorithm(draft: Draft) -> tuple[str, str]:
    """The kind of distillation, and the prefix of its keys."""
    mode = draft.take("orchestrator.training_mode")
    for prefix in ALGORITHMS:
        kind = draft.take(f"{prefix}.type", f"{prefix}.id")
        if kind is not None:
            return str(kind), prefix
    if mode is not None:
        return str(mode), "orchestrator"
    return ("reward" if not draft.has(f"{LOSS}.teacher_tau") else "tau"), ""


def _sampling(draft: Draft) -> None:
    for place, ours in (("train.", "rollout"), ("", "rollout"), ("eval.", "eval")):
        prefix = f"orchestrator.{place}sampling"
        length = draft.take(f"{prefix}.max_completion_tokens", f"{prefix}.max_tokens")
        if length is not None:
            draft.ours[f"{ours}.max_tokens"] = length
        draft.put(f"{ours}.temperature", draft.take(f"{prefix}.temperature"))
    draft.ours.setdefault("rollout.max_tokens", draft.theirs.get("seq_len", 2048))
    answers = draft.whole(
        "orchestrator.eval.group_size", "orchestrator.eval.rollouts_per_example", default=1
    )
    if answers > 1:
        draft.put("eval.n", answers)
        draft.ours.setdefault("eval.temperature", 1.0)


def _teacher(draft: Draft, kind: str, prefix: str) -> None:
    ours = "teachers.teacher"
    if kind in ("opsd", "self_distill"):
        draft.ours[f"{ours}.kind"] = "self"
        demonstration = draft.take(f"{prefix}.demo_key", default="answer")
        draft.ours[f"{ours}.prompt_template"] = f"{{prompt}}\n\n{{{demonstration}}}"
        draft.ours[f"{ours}.refresh_every"] = 1
        draft.differs.append("opsd words the demonstration differently: see prompt_template")
        return
    named = draft.take(f"{prefix}.model") if prefix else None
    places = [f"{prefix}.teacher", "orchestrator.teacher", "orchestrator.teacher_model"]
    places += [f"orchestrator.models.{named}"] if named else []
    for place in places:
        name = draft.take(f"{place}.name", f"{place}.model.name")
        urls = draft.take(f"{place}.base_url", f"{place}.client.base_url")
        draft.take(f"{place}.tokens", f"{place}.client.skip_model_check")
        if urls:
            draft.ours[f"{ours}.kind"] = "endpoint"
            draft.ours[f"{ours}.urls"] = urls if isinstance(urls, list) else [urls]
            draft.ours[f"{ours}.served_model"] = name
            return
    own = draft.take("teacher_inference.model.name", default=draft.theirs.get("model.name"))
    length = draft.take("teacher_inference.model.max_model_len")
    for rest in ("gpu_memory_utilization", "model.dtype", "model.enforce_eager"):
        draft.take(f"teacher_inference.{rest}")
    draft.ours[f"{ours}.model"] = own
    draft.put(f"{ours}.replicas", draft.whole("deployment.num_teacher_gpus", default=1))
    draft.put(f"{ours}.engine.max_model_len", length)


def _objective(draft: Draft, kind: str, n: int) -> None:
    weight = draft.number(f"{LOSS}.teacher_tau", default=0.0 if kind == "reward" else 1.0)
    reward = draft.number(f"{LOSS}.adv_tau", default=1.0 if kind in ("tau", "reward") else 0.0)
    verified = draft.take("orchestrator.verification.enabled", default=True)
    draft.ours.update({"loss.kind": "k1", "loss.importance_cap": UNCAPPED})
    draft.put("loss.weight", weight)
    for name in ("kl_tau", "dppo_mask_low", "dppo_mask_high"):
        draft.take(f"{LOSS}.{name}")
    draft.differs.append(
        "tokens whose probability has moved by more than dppo_mask_low or dppo_mask_high since "
        "they were sampled have no gradient there; here they keep theirs"
    )
    draft.differs.append("kl_tau · log²(q/mu) is added there: here admission bounds the drift")
    if reward and verified:
        if n < 2:
            draft.differs.append("a group of one has no advantage: no reward")
            return
        draft.ours.update({"reward.grader": "math_verify", "reward.normalize": "none"})
        draft.put("reward.weight", reward)
        draft.fill_in.append("reward.grader: the environment graded there")


def _optimizer(draft: Draft) -> None:
    kind = draft.take("trainer.optim.type", default="adamw")
    if kind != "adamw":
        draft.differs.append(f"trainer.optim.type: {kind}; the optimizer here is AdamW")
    first = draft.number("trainer.optim.betas1", default=0.9)
    draft.ours["train.betas"] = [first, draft.number("trainer.optim.betas2", default=0.999)]
    schedule = draft.take("trainer.scheduler.type", default="constant")
    warmup = draft.whole("trainer.scheduler.warmup_steps", default=10)
    lowest = draft.number("trainer.scheduler.min_lr")
    draft.ours["train.schedule"] = "cosine" if schedule == "cosine" else "constant"
    draft.ours["train.warmup_steps"] = 0 if schedule == "constant" else warmup
    if schedule == "cosine":
        rate = draft.number("trainer.optim.lr", default=1e-6)
        draft.ours["train.min_lr_ratio"] = round(lowest / rate, 6) if rate else 0.0
    elif schedule != "constant":
        draft.differs.append(f"trainer.scheduler.type: {schedule}; constant is used here")
    if draft.number("trainer.model.lora.dropout"):
        draft.differs.append("trainer.model.lora.dropout: the student is trained without dropout")
    again = [draft.take(f"trainer.model.ac.{name}") for name in ("freq", "mode", "targets")]
    if any(one is not None for one in again):
        draft.ours["train.gradient_checkpointing"] = "full"
    for place in ("model.vlm", "trainer.model.vlm"):
        if draft.below(place) and draft.take(f"{place}.freeze_vision_encoder", default=True):
            draft.put("train.freeze", importable("train.freeze", FROZEN))
    moments = draft.take("trainer.model.optim_cpu_offload")
    if draft.take("trainer.model.fsdp_cpu_offload"):
        draft.ours["train.offload"] = "parameters"
    elif moments:
        draft.ours["train.offload"] = "moments"


def _data(draft: Draft) -> None:
    names = _environments(draft, *ENVIRONMENTS)
    draft.ours["data.train"] = [PLACEHOLDER]
    if names:
        draft.ours["teachers.teacher.sources"] = names
    routed = ", with the environment's name in the field data_source" if names else ""
    what = ", ".join(names) or "the environment"
    draft.fill_in.append(f"data.train: a file with the prompts of {what}{routed}")
    tested = _environments(draft, "orchestrator.eval.env", "orchestrator.eval.source")
    if tested:
        draft.fill_in.append(f"data.eval: a file with the prompts of {', '.join(tested)}")


def _environments(draft: Draft, *prefixes: str) -> list[str]:
    """Names of environments; their arguments are read, since a file takes their place."""
    names: list[Any] = []
    for prefix in prefixes:
        for index in draft.below(prefix):
            place = f"{prefix}.{index}"
            found = draft.take(
                f"{place}.name", f"{place}.id", f"{place}.taskset.id", f"{place}.env.taskset.id"
            )
            names += [] if found is None else [str(found)]
        for key in draft.theirs:
            if key.startswith(f"{prefix}.") and "." in key[len(prefix) + 1 :]:
                draft.take(key)
    return list(dict.fromkeys(names))
