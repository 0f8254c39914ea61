"""prime-rl's on-policy distillation: ``rl.toml`` in the forms that it has had.

    [trainer.loss] teacher_tau             a teacher beside the reward
    [orchestrator] training_mode = "opd"   a teacher alone, with [orchestrator.teacher]
    [[orchestrator.algorithms]] id = "opd"      the same, with [orchestrator.models.<name>]
    [orchestrator.train.algo] type = "opd"      the same, with its teacher inline
    [[orchestrator.train.source]] algo          one source's, in place of that of the run

Facts: ``docs/on_policy_distillation.md``, ``docs/algorithms.md``, ``configs/debug`` and
``packages/prime-rl-configs`` of github.com/PrimeIntellect-ai/prime-rl, read in November 2026.
"""

from __future__ import annotations

from async_opd.tools.importing.common import FROZEN, batches, log_to
from async_opd.tools.importing.draft import Draft, teacher_of

LOSS = "trainer.loss"
ENVIRONMENTS = ("orchestrator.train.env", "orchestrator.train.source", "orchestrator.env")
TESTED = ("orchestrator.eval.env", "orchestrator.eval.source")
ALGORITHMS = ("orchestrator.train.algo", "orchestrator.algo", "orchestrator.algorithms.0")
OF_SOURCE = ("algo", "algorithms.0")
NAMES = ("name", "id", "taskset.id", "env.taskset.id")
DISTILS = ("opd", "tau")
SELF = ("opsd", "self_distill")
SHARE = "gpu_memory_utilization"
OF_ENGINE = {SHARE: SHARE, f"vllm.{SHARE}": SHARE, "model.dtype": "dtype"}
UNCAPPED = 1000
"""An ``importance_cap`` that no ratio reaches: there the ratio is not truncated."""


def together(draft: Draft) -> None:
    """Sets what several keys give together."""
    kind, prefix = _algorithm(draft)
    sources = _sources(draft, kind)
    kinds = [*dict.fromkeys(one for _, one, _ in sources)] or [kind]
    groups = ("group_size", "train.group_size", "rollouts_per_example")
    n = draft.whole(*(f"orchestrator.{one}" for one in groups), default=1)
    draft.ours["rollout.n"] = n
    level = draft.number("max_async_level", "orchestrator.max_async_level", default=1)
    batches(draft, draft.whole("orchestrator.batch_size", default=128), 1, level)
    _sampling(draft)
    _teachers(draft, kind, prefix, sources)
    _recipe(draft, kinds)
    _objective(draft, kinds, n)
    _optimizer(draft)
    _data(draft, sources)
    draft.put("rollout.replicas", _engines(draft))
    draft.ours["eval.every"] = draft.whole("orchestrator.eval.interval")
    draft.put("eval.before", not draft.take("orchestrator.eval.skip_first_step", default=False))
    named = draft.has("wandb.project") or draft.has("monitors.wandb.project")
    log_to(draft, ["wandb"] if named else ["console"])


def _engines(draft: Draft) -> int:
    parallel = _engine(draft, "rollout", [*_tagged(draft, "student"), "inference"])
    return max(draft.whole("deployment.num_infer_gpus", default=1) // parallel, 1)


def _algorithm(draft: Draft) -> tuple[str, str]:
    """The kind of the run, and the prefix of its keys."""
    mode = draft.take("orchestrator.training_mode")
    for prefix in ALGORITHMS:
        if kind := _kind(draft, prefix):
            return kind, prefix
    if mode is not None:
        return str(mode), "orchestrator"
    return ("tau" if draft.has(f"{LOSS}.teacher_tau") else "reward"), ""


def _sources(draft: Draft, kind: str) -> list[tuple[str, str, str]]:
    """Of each source that is trained on its name, its kind, and the prefix of its algorithm.

    The prefix is empty where the source has the run's algorithm.
    """
    found = dict[str, tuple[str, str, str]]()
    for prefix in ENVIRONMENTS:
        for index in draft.below(prefix):
            place = f"{prefix}.{index}"
            named = draft.take(*(f"{place}.{one}" for one in NAMES))
            if named is None:
                continue
            name = str(named)
            for one in NAMES:
                draft.gives(
                    f"{place}.{one}", "teachers.teacher.sources", f"{teacher_of(name)}.sources"
                )
            kinds = {f"{place}.{one}": _kind(draft, f"{place}.{one}") for one in OF_SOURCE}
            at, own = next(((at, own) for at, own in kinds.items() if own), ("", kind))
            found.setdefault(name, (name, own, at))
    return list(found.values())


def _kind(draft: Draft, prefix: str) -> str:
    """The kind of the algorithm in a section; empty without one."""
    keys = (f"{prefix}.type", f"{prefix}.id")
    kind = str(draft.take(*keys, default=""))
    if kind not in (*DISTILS, *SELF):
        for key in keys:
            draft.gives(key, "loss.kind" if kind == "sft" else "reward.grader")
    return kind


def _recipe(draft: Draft, kinds: list[str]) -> None:
    """Names kinds that are not on-policy distillation."""
    for kind in kinds:
        if kind == "sft":
            draft.another.append(
                "off-policy: sft trains on the teacher's answers there; here the teacher scores "
                "the student's (cold_start trains on given answers first)"
            )
        elif kind not in (*DISTILS, *SELF):
            draft.another.append(
                f"no distillation: {kind} trains by reward alone there, without a teacher; here "
                "every source has one"
            )


def _sampling(draft: Draft) -> None:
    for place, ours in (("train.", "rollout"), ("", "rollout"), ("eval.", "eval")):
        prefix = f"orchestrator.{place}sampling"
        length = draft.take(f"{prefix}.max_completion_tokens", f"{prefix}.max_tokens")
        if length is not None:
            draft.ours[f"{ours}.max_tokens"] = length
        draft.put(f"{ours}.temperature", draft.take(f"{prefix}.temperature"))
    if "rollout.max_tokens" not in draft.ours:
        draft.ours["rollout.max_tokens"] = draft.take("seq_len", default=2048)
    groups = ("group_size", "rollouts_per_example")
    answers = draft.whole(*(f"orchestrator.eval.{one}" for one in groups), default=1)
    if answers > 1:
        draft.put("eval.n", answers)
        draft.ours.setdefault("eval.temperature", 1.0)


def _teachers(draft: Draft, kind: str, prefix: str, sources: list[tuple[str, str, str]]) -> None:
    """One teacher for all sources, or one for each where they have separate algorithms."""
    tagged = _tagged(draft, "teacher")
    if not any(at for _, _, at in sources):
        _teacher(draft, "teachers.teacher", kind, prefix, tagged)
        if sources:
            draft.ours["teachers.teacher.sources"] = [name for name, _, _ in sources]
        return
    for name, kind_there, at in sources:
        draft.ours[f"{teacher_of(name)}.sources"] = [name]
        _teacher(draft, teacher_of(name), kind_there, at or prefix, tagged)


def _teacher(draft: Draft, ours: str, kind: str, prefix: str, tagged: list[str]) -> None:
    if kind in SELF:
        draft.ours[f"{ours}.kind"] = "self"
        demonstration = draft.take(f"{prefix}.demo_key", default="answer")
        draft.ours[f"{ours}.prompt_template"] = f"{{prompt}}\n\n{{{demonstration}}}"
        draft.gives(f"{prefix}.demo_key", f"{ours}.prompt_template")
        draft.ours[f"{ours}.refresh_every"] = 1
        draft.differs.append("opsd words the demonstration differently: see prompt_template")
        return
    if kind not in (*DISTILS, "sft"):
        draft.fill(f"{ours}.model", f"{kind} has no teacher there: name one, or omit its source")
        return
    named = draft.take(f"{prefix}.model", default="reference") if prefix else None
    places = [f"{prefix}.teacher", "orchestrator.teacher", "orchestrator.teacher_model"]
    places += [f"orchestrator.models.{named}"] if named else []
    for place in places:
        names = (f"{place}.model.name", f"{place}.name")
        urls = (f"{place}.client.base_url", f"{place}.base_url")
        url = draft.take(*urls)
        if url:
            draft.ours[f"{ours}.kind"] = "endpoint"
            draft.ours[f"{ours}.urls"] = url if isinstance(url, list) else [url]
            for key in (*urls, f"{prefix}.model"):
                draft.gives(key, f"{ours}.urls")
            if not draft.give(f"{ours}.served_model", *names):
                draft.fill(f"{ours}.served_model", "the file does not give its name on the server")
            return
    started = [f"{place}.{one}" for place in places for one in ("model.name", "name")]
    _started(draft, ours, started, tagged)


def _started(draft: Draft, ours: str, names: list[str], tagged: list[str]) -> None:
    """A teacher that the run starts: in ``teacher_inference``, or in ``inference`` by its tag."""
    for place in [*tagged, "teacher_inference"]:
        names.append(f"{place}.model.name")
        draft.give(f"{ours}.engine.max_model_len", f"{place}.model.max_model_len")
    parallel = _engine(draft, ours, tagged)
    draft.give(f"{ours}.model", *names)
    gpus = draft.whole("deployment.num_teacher_gpus", default=1)
    draft.put(f"{ours}.replicas", max(gpus // parallel, 1))


def _tagged(draft: Draft, tag: str) -> list[str]:
    """The first engines in ``[[inference]]`` that have a tag."""
    places = (f"inference.{index}" for index in draft.below("inference"))
    return [one for one in places if draft.take(f"{one}.tag") == tag][:1]


def _engine(draft: Draft, ours: str, places: list[str]) -> int:
    """The settings of an engine in the first place that has them; returns its GPUs."""
    for theirs, name in OF_ENGINE.items():
        draft.give(f"{ours}.engine.{name}", *(f"{one}.{theirs}" for one in places))
    sizes = [f"{one}.parallel.tp" for one in places]
    for key in sizes:
        draft.gives(key, f"{ours}.tensor_parallel", f"{ours}.replicas")
    parallel = draft.count(*sizes)
    draft.put(f"{ours}.tensor_parallel", parallel)
    return parallel


def _objective(draft: Draft, kinds: list[str], n: int) -> None:
    weight = draft.number(f"{LOSS}.teacher_tau", default=1.0)
    rewarded = kinds != ["sft"] and any(one not in ("opd", *SELF) for one in kinds)
    reward = draft.number(f"{LOSS}.adv_tau", default=float(rewarded))
    verified = draft.take("orchestrator.verification.enabled", default=True)
    draft.ours.update({"loss.kind": "k1", "loss.importance_cap": UNCAPPED})
    if "sft" in kinds:
        draft.fill("loss.kind", "the loss of the run there is another one")
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
        draft.ours["reward.normalize"] = "none"
        draft.put("reward.weight", reward)
        draft.fill("reward.grader", "the environment graded there")


def _optimizer(draft: Draft) -> None:
    kind = draft.take("trainer.optim.type", default="adamw")
    if kind != "adamw":
        draft.differs.append(f"trainer.optim.type: {kind}; the optimizer here is AdamW")
    first = draft.number("trainer.optim.betas1", default=0.9)
    draft.ours["train.betas"] = [first, draft.number("trainer.optim.betas2", default=0.999)]
    rate = draft.number("trainer.optim.lr", default=1e-6)
    draft.ours["train.lr"] = rate
    schedule = draft.take("trainer.scheduler.type", default="constant")
    warmup = draft.whole("trainer.scheduler.warmup_steps", default=10)
    lowest = draft.number("trainer.scheduler.min_lr")
    draft.ours["train.schedule"] = "cosine" if schedule == "cosine" else "constant"
    draft.ours["train.warmup_steps"] = 0 if schedule == "constant" else warmup
    if schedule == "cosine":
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
            draft.put("train.freeze", FROZEN)
    moments = draft.take("trainer.model.optim_cpu_offload")
    if draft.take("trainer.model.fsdp_cpu_offload"):
        draft.ours["train.offload"] = "parameters"
    elif moments:
        draft.ours["train.offload"] = "moments"


def _data(draft: Draft, sources: list[tuple[str, str, str]]) -> None:
    names = [name for name, _, _ in sources]
    routed = ", with the environment's name in the field data_source" if names else ""
    what = ", ".join(names) or "the environment"
    draft.fill("data.train", f"a file with the prompts of {what}{routed}")
    tested = dict[str, None]()
    for prefix in TESTED:
        for index in draft.below(prefix):
            keys = [f"{prefix}.{index}.{one}" for one in NAMES]
            name = draft.take(*keys)
            for key in keys:
                draft.gives(key, "data.eval")
            tested |= {} if name is None else {str(name): None}
    if tested:
        draft.fill_in["data.eval"] = f"a file with the prompts of {', '.join(tested)}"
