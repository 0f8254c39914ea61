"""TRL's GKD, GOLD, Distillation and AsyncDistillation trainers: a script, its flags, or its YAML.

Facts: the config classes in ``trl/experimental`` and ``transformers.TrainingArguments``, and
``examples/scripts`` of github.com/huggingface/trl, read in November 2026.
"""

from __future__ import annotations

from typing import Any

from async_opd.tools.importing.common import batches, length, log_to, section
from async_opd.tools.importing.draft import Draft, teacher_of
from async_opd.tools.importing.table import content_of

TEACHER = "teacher_model_name_or_path"
URLS = "teacher_server_urls"
FILES = (".parquet", ".jsonl", ".json")
STUDENTS = {"model_name_or_path", "model", "student_model"}


def classes() -> dict[str, dict[str, Any]]:
    """The defaults that differ between the config classes; ``length`` is that of a response."""
    found: dict[str, dict[str, Any]] = content_of("trl")["classes"]
    return found


def together(draft: Draft) -> None:
    """Sets what several keys give together."""
    kind = _class(draft)
    own = classes()[kind]
    _sampling(draft, own)
    _recipe(draft, own)
    _teachers(draft, kind)
    _loss(draft, kind, own)
    sync = _sizes(draft, kind)
    _optimizer(draft, own)
    _adapters(draft)
    _data(draft)
    _periods(draft, sync)
    log_to(draft, draft.take("report_to", default="all"))


def _periods(draft: Draft, sync: int) -> None:
    """Checkpoints and evaluations every so many steps there, and so many versions here."""
    draft.ours.update({"checkpoint.every": 0, "eval.every": 0})
    for ours, theirs, usual in (("checkpoint", "save", "steps"), ("eval", "eval", "no")):
        strategy = draft.take(f"{theirs}_strategy", default=usual)
        if strategy == "steps":
            every = draft.number(f"{theirs}_steps", default=500)
            draft.ours[f"{ours}.every"] = max(round(every / sync), 1)
        elif strategy != "no":
            draft.unreadable[f"{theirs}_strategy"] = f"{strategy}: here versions are counted"


def _class(draft: Draft) -> str:
    """The config class: as the script names it, else by keys that only one of them has."""
    named = draft.take("config_class")
    if isinstance(named, str) and named in classes():
        return named
    if draft.has("max_staleness") or draft.below(URLS):
        return "AsyncDistillationConfig"
    if draft.has("loss_top_k") or draft.has("use_teacher_server"):
        return "DistillationConfig"
    uld = any(key.startswith("use_uld") for key in draft.theirs)
    return "GOLDConfig" if uld or draft.has("max_completion_length") else "GKDConfig"


def _sampling(draft: Draft, own: dict[str, Any]) -> None:
    tokens = draft.take("max_completion_length", "max_new_tokens", default=own["length"])
    draft.ours["rollout.max_tokens"] = tokens
    draft.put("rollout.temperature", draft.take("temperature", default=own["temperature"]))
    draft.put("rollout.top_p", draft.take("top_p", default=own["top_p"]))
    draft.ours["rollout.n"] = draft.whole("num_generations", default=1)


def _recipe(draft: Draft, own: dict[str, Any]) -> None:
    """Names a run whose answers are not the student's, or which has two vocabularies."""
    share = 1 - draft.number("lmbda", default=own["lmbda"])
    if share >= 1:
        draft.another.append(
            "off-policy: lmbda is 0 there, so that all answers are the data set's; here all are "
            "the student's (cold_start trains on given answers first)"
        )
    elif share > 0:
        draft.differs.append(
            f"lmbda: {share:.0%} of the batches are the data set's answers there; here all "
            "are the student's (cold_start trains on given answers first)"
        )
    if draft.take("seq_kd"):
        draft.differs.append("seq_kd trains on the teacher's answers there: see cold_start")
    if draft.take("use_uld_loss"):
        draft.another.append(
            "cross-tokenizer: use_uld_loss aligns two vocabularies there; here student and teacher "
            "have one"
        )


def _teachers(draft: Draft, kind: str) -> None:
    places = {key.partition(".")[2]: key for key in draft.theirs if key.startswith(f"{URLS}.")}
    if draft.take("use_teacher_server") and draft.has("teacher_model_server_url"):
        places = {"default": "teacher_model_server_url"}
    if kind == "AsyncDistillationConfig" and not places:
        places = {"default": URLS}
    if not places:
        draft.give("teachers.teacher.model", TEACHER, "teacher_model")
    for name, place in places.items():
        ours = teacher_of("teacher" if name == "default" else name)
        url = draft.take(place, default="http://localhost:8001")
        draft.gives(place, f"{ours}.urls")
        draft.ours.update({f"{ours}.kind": "endpoint", f"{ours}.urls": [url]})
        if not draft.give(f"{ours}.served_model", TEACHER, "teacher_model"):
            draft.fill(f"{ours}.served_model", "the file does not give its name on the server")
        if len(places) > 1 and ours != f"teachers.{name}":
            draft.ours[f"{ours}.sources"] = [name]
    if len(places) > 1:
        draft.ours["data.route_by"] = "teacher_id"
    if draft.number("teacher_temperature", default=1.0) != 1:
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
    length(draft, draft.number("max_steps", default=-1), "num_train_epochs", default=3)
    again = draft.take("gradient_checkpointing", default=True)
    draft.ours["train.gradient_checkpointing"] = "full" if again else "none"
    return sync


def _optimizer(draft: Draft, own: dict[str, Any]) -> None:
    draft.put("train.lr", draft.take("learning_rate", default=own["learning_rate"]))
    name = str(draft.take("lr_scheduler_type", default="linear"))
    draft.ours["train.schedule"] = "constant" if name.startswith("constant") else "cosine"
    if not name.startswith("constant"):
        draft.ours["train.min_lr_ratio"] = draft.number("lr_scheduler_kwargs.min_lr_rate")
    if name not in ("cosine", "cosine_with_min_lr", "constant", "constant_with_warmup"):
        draft.differs.append(f"lr_scheduler_type: cosine to 0 is used, there is no {name} here")
    ratio, steps = draft.number("warmup_ratio"), draft.number("warmup_steps")
    total = draft.ours.get("train.steps")
    if 0 < steps < 1:
        ratio, steps = steps, 0
    draft.ours["train.warmup_steps"] = int(steps) or round(ratio * (total or 0))
    if ratio and not steps and not total:
        draft.fill("train.warmup_steps", f"it is {ratio:g} of the steps there")
    first = draft.number("adam_beta1", default=0.9)
    draft.ours["train.betas"] = [first, draft.number("adam_beta2", default=0.999)]


def _adapters(draft: Draft) -> None:
    if draft.take("use_peft") or (draft.has("lora_r") and not draft.has("use_peft")):
        draft.ours["train.lora.rank"] = draft.whole("lora_r", default=16)
        draft.ours["train.lora.alpha"] = draft.number("lora_alpha", default=32)
        draft.put("train.lora.targets", draft.take("lora_target_modules", default="all-linear"))
        draft.put("train.lora.use_rslora", draft.take("use_rslora"))


def _data(draft: Draft) -> None:
    name = draft.take("dataset_name")
    rest = (draft.take("dataset_config"), draft.take("dataset_train_split", default="train"))
    section(draft, "chat_template_kwargs", "student.chat_template_kwargs")
    more = draft.take("load_dataset", "data_files")
    if name is not None:
        local = str(name).endswith(FILES) or str(name).startswith(("/", "."))
        keys = zip(("id", "config", "split"), (name, *rest), strict=True)
        hub = {"kind": "hub"} | {key: str(value) for key, value in keys if value}
        draft.ours["data.train"] = [{"path": str(name)} if local else hub]
    draft.fill_in["data.prompt"] = "the field of your rows that has the prompt"
    draft.fill_in["data.answer"] = "the field of your rows that has the answer, to be graded"
    if more is not None:
        draft.fill_in["data.train"] = f"the script loads {more} of it"
