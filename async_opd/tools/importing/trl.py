"""TRL's GKD, GOLD, Distillation and AsyncDistillation trainers: a script, its flags, or its YAML.

Facts: the config classes in ``trl/experimental`` and ``transformers.TrainingArguments``, and
``examples/scripts`` of github.com/huggingface/trl, read in November 2026.
"""

from __future__ import annotations

from typing import Any

from async_opd.tools.importing.common import FILES, batches, epochs, log_to, template_variables
from async_opd.tools.importing.draft import Draft

DEFAULTS: dict[str, dict[str, Any]] = {
    "GKDConfig": {
        "learning_rate": 2e-5,
        "temperature": 0.9,
        "top_p": 1.0,
        "length": 128,
        "lmbda": 0.5,
        "beta": 0.5,
        "loss_top_k": 0,
    },
    "GOLDConfig": {
        "learning_rate": 1e-7,
        "temperature": 0.9,
        "top_p": 0.95,
        "length": 128,
        "lmbda": 0.5,
        "beta": 0.5,
        "loss_top_k": 0,
    },
    "DistillationConfig": {
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 0.95,
        "length": 512,
        "lmbda": 1.0,
        "beta": 1.0,
        "loss_top_k": 1,
    },
    "AsyncDistillationConfig": {
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "length": 2048,
        "lmbda": 1.0,
        "beta": 0.0,
        "loss_top_k": 8,
    },
}
"""Defaults that differ between the classes; ``length`` is that of a response."""


def together(draft: Draft) -> None:
    """Sets what several keys say together."""
    kind = _class(draft)
    own = DEFAULTS[kind]
    _sampling(draft, own)
    _teachers(draft, kind)
    _loss(draft, kind, own)
    sync = _sizes(draft, kind)
    _optimizer(draft, own)
    _adapters(draft)
    _data(draft)
    saved = draft.take("save_strategy", default="steps")
    every = draft.whole("save_steps", default=500)
    draft.ours["checkpoint.every"] = 0 if saved == "no" else max(round(every / sync), 1)
    evaluated = draft.take("eval_strategy", default="no")
    draft.ours["eval.every"] = 0
    steps = draft.whole("eval_steps", default=500)
    if evaluated == "steps":
        draft.ours["eval.every"] = max(round(steps / sync), 1)
    report = draft.take("report_to", default="all")
    log_to(draft, report)


def _class(draft: Draft) -> str:
    """The config class: as the script names it, else by keys that only one of them has."""
    named = draft.take("config_class")
    if isinstance(named, str) and named in DEFAULTS:
        return named
    if draft.has("max_staleness") or draft.below("teacher_server_urls"):
        return "AsyncDistillationConfig"
    if draft.has("loss_top_k") or draft.has("use_teacher_server"):
        return "DistillationConfig"
    uld = any(key.startswith("use_uld") for key in draft.theirs)
    return "GOLDConfig" if uld or draft.has("max_completion_length") else "GKDConfig"


def _sampling(draft: Draft, own: dict[str, Any]) -> None:
    length = draft.take("max_completion_length", "max_new_tokens", default=own["length"])
    draft.ours["rollout.max_tokens"] = length
    draft.put("rollout.temperature", draft.take("temperature", default=own["temperature"]))
    draft.put("rollout.top_p", draft.take("top_p", default=own["top_p"]))
    draft.ours["rollout.n"] = draft.whole("num_generations", default=1)
    if draft.number("lmbda", default=own["lmbda"]) < 1:
        share = 1 - draft.number("lmbda", default=own["lmbda"])
        draft.differs.append(
            f"lmbda: {share:.0%} of the batches are the data set's own answers there; here all "
            "are the student's (cold_start trains on given answers first)"
        )
    if draft.take("seq_kd"):
        draft.differs.append("seq_kd trains on the teacher's answers there: see cold_start")


def _teachers(draft: Draft, kind: str) -> None:
    names = draft.below("teacher_server_urls")
    urls = {name: draft.take(f"teacher_server_urls.{name}") for name in names}
    single = draft.take("teacher_model_server_url")
    if draft.take("use_teacher_server") and single:
        urls = {"default": single}
    if kind == "AsyncDistillationConfig" and not urls:
        urls = {"default": "http://localhost:8001"}
    model = draft.take("teacher_model_name_or_path", "teacher_model")
    tempered = draft.number("teacher_temperature", default=1.0)
    for name, url in urls.items():
        ours = f"teachers.{'teacher' if name == 'default' else name}"
        draft.ours.update({f"{ours}.kind": "endpoint", f"{ours}.urls": [url]})
        draft.ours[f"{ours}.served_model"] = model or "TEACHER"
        if not model:
            draft.fill_in.append(f"{ours}.served_model: the model's name on the server")
    if len(urls) > 1:
        draft.ours["data.route_by"] = "teacher_id"
    if not urls:
        draft.ours["teachers.teacher.model"] = model or draft.theirs.get("model_name_or_path")
    if tempered != 1:
        draft.differs.append("teacher_temperature tempers the student too there: left out here")


def _loss(draft: Draft, kind: str, own: dict[str, Any]) -> None:
    beta = draft.number("beta", default=own["beta"])
    top = draft.whole("loss_top_k", "teacher_top_k", default=own["loss_top_k"])
    tail = draft.take("loss_add_tail", "add_tail_bucket", default=True)
    mode = draft.take("reverse_kl_top_1_mode", default="sampled")
    names = {0.0: "forward_kl", 1.0: "reverse_kl"}
    draft.ours["loss.kind"] = names.get(beta, "jsd")
    if beta not in names:
        draft.ours["loss.beta"] = beta
    if draft.take("use_uld_loss"):
        draft.differs.append("use_uld_loss aligns two vocabularies there; here both share one")
    if kind == "DistillationConfig" and "rollout.temperature" in draft.ours:
        draft.differs.append("temperature tempers both sides of the divergence too there: not here")
    if top == 0:
        draft.ours["loss.support"] = "full_vocab"
        return
    if beta == top == 1 and mode == "sampled" and tail and kind == "DistillationConfig":
        draft.ours.update({"loss.kind": "binary_kl", "loss.importance": "off"})
        return
    draft.ours["loss.support"] = "student_topk" if beta == 1 else "teacher_topk"
    draft.ours.update({"loss.top_k": top, "loss.tail": "bucket" if tail else "renormalize"})
    if kind == "AsyncDistillationConfig":
        _over_server(draft, beta)
    elif 0 < beta < 1:
        draft.differs.append("loss_top_k: the support is the union of both top-k there")
    elif beta == 1 and top == 1 and mode == "sampled":
        draft.differs.append(
            "reverse_kl_top_1_mode: sampled takes the sampled token as the support there; here it "
            "is the student's most probable one"
        )


def _over_server(draft: Draft, beta: float) -> None:
    draft.ours["loss.support"] = "teacher_topk"
    if beta:
        draft.differs.append(
            "beta above 0: the support is the teacher's best token and the sampled one there, "
            "whatever teacher_top_k says; here it is the teacher's top-k"
        )
    else:
        draft.differs.append("the sampled token is added to the teacher's top-k there: not here")


def _sizes(draft: Draft, kind: str) -> int:
    processes = draft.whole("num_processes", default=1)
    draft.put("train.ranks", processes)
    batch = draft.whole("per_device_train_batch_size", default=8) * processes
    batch *= draft.whole("gradient_accumulation_steps", default=1)
    sync = draft.count("weight_sync_steps", "vllm_sync_frequency", default=1)
    lag = draft.given("max_staleness")
    if lag is None and kind.startswith("Async"):
        lag = 4
    batches(draft, batch, sync, int(lag or 0))
    draft.put("async.max_version_lag", None if lag is None else int(lag))
    steps = draft.number("max_steps", default=-1)
    epochs(draft, steps, draft.number("num_train_epochs", default=3))
    again = draft.take("gradient_checkpointing", default=True)
    draft.ours["train.gradient_checkpointing"] = "full" if again else "none"
    return sync


def _optimizer(draft: Draft, own: dict[str, Any]) -> None:
    draft.put("train.lr", draft.take("learning_rate", default=own["learning_rate"]))
    name = str(draft.take("lr_scheduler_type", default="linear"))
    lowest = draft.number("lr_scheduler_kwargs.min_lr_rate")
    draft.ours["train.schedule"] = "constant" if name.startswith("constant") else "cosine"
    if not name.startswith("constant"):
        draft.ours["train.min_lr_ratio"] = lowest
    if name not in ("cosine", "cosine_with_min_lr", "constant", "constant_with_warmup"):
        draft.differs.append(
            f"lr_scheduler_type: {name} is not a schedule here; cosine to 0 is used"
        )
    ratio, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    total = draft.ours.get("train.steps")
    if ratio and not total:
        draft.fill_in.append(f"train.warmup_steps: {ratio:g} of the steps")
    if 0 < steps < 1:
        ratio, steps = steps, 0
    draft.ours["train.warmup_steps"] = int(steps) or round(ratio * (total or 0))
    first = draft.number("adam_beta1", default=0.9)
    draft.ours["train.betas"] = [first, draft.number("adam_beta2", default=0.999)]


def _adapters(draft: Draft) -> None:
    rank = draft.whole("lora_r", default=16)
    alpha = draft.number("lora_alpha", default=32)
    targets = draft.take("lora_target_modules", default="all-linear")
    stable = draft.take("use_rslora")
    if draft.take("use_peft") or draft.has("lora_r"):
        draft.ours.update({"train.lora.rank": rank, "train.lora.alpha": alpha})
        draft.put("train.lora.targets", targets)
        draft.put("train.lora.use_rslora", stable)


def _data(draft: Draft) -> None:
    name = draft.take("dataset_name")
    rest = (draft.take("dataset_config"), draft.take("dataset_train_split", default="train"))
    draft.take("dataset_test_split")
    template_variables(draft, "chat_template_kwargs")
    if name is None:
        return
    local = str(name).endswith(FILES) or str(name).startswith(("/", "."))
    keys = zip(("id", "config", "split"), (name, *rest), strict=True)
    hub = {"kind": "hub"} | {key: str(value) for key, value in keys if value}
    draft.ours["data.train"] = [{"path": str(name)} if local else hub]
    draft.fill_in.append("data.prompt and data.answer: the fields of your rows")
