"""The need of a pool, against its GPU: faults, remedies and notes, for made-up sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.memory_fit import (
    faults_of_cache,
    faults_of_memory,
    fewest_ranks,
    memory_rows,
    near,
)
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import GIB, Machine, memory_of
from async_opd.models.model_size import ModelSize
from tests.world.config import run_config

BILLION = 1_000_000_000


def sizes(model: str) -> ModelSize:
    """As many parameters as the model's name says, in the shape of Qwen3-4B."""
    entries = int(float(model) * BILLION)
    widths = {"query": 4096, "key": 1024, "heads": 32, "query_norms": True}
    return ModelSize(entries, 0, 2560, 9728, 36, 151_936, embeddings=151_936, **widths)


def config(student: str = "4", train: Any = None, **sections: Any) -> RunConfig:
    teachers = sections.pop("teachers", {"a": {"model": "1"}})
    return run_config(student={"model": student}, teachers=teachers, train=train or {}, **sections)


def gpus(gib: float | None) -> Machine:
    return Machine("cuda", None if gib is None else int(gib * GIB), sizes)


def test_a_student_that_its_gpus_do_not_hold_is_refused_with_its_terms_by_size() -> None:
    ((key, fault, _),) = faults_of_memory(config("4"), gpus(70))
    assert key == "train"
    assert fault.startswith("a rank needs ")
    shown = fault[fault.index("(") :]
    assert shown.startswith("(moments 29.8 GiB, parameters 14.9 GiB, gradients 14.9 GiB, ")
    assert fault.endswith("its GPU has 70.0 GiB")


def test_recorded_tokens_are_a_term_of_a_ranks_memory() -> None:
    one = {"train": {"ranks": 2}, "rollout": {"max_tokens": 1000}}
    recorded = config(**one, log={"microscope": {"share": 0.5, "top_k": 3}})
    terms = memory_of(recorded, "train", gpus(80)).gpu
    assert terms["recorded tokens"] == 8 * (13 + 5 * 3) * 1000 * recorded.train.batch_size // 4
    assert "recorded tokens" not in memory_of(config(**one), "train", gpus(80)).gpu


def test_the_remedies_name_what_each_leads_to_and_the_best_comes_first() -> None:
    ((_, _, remedy),) = faults_of_memory(config("4"), gpus(70))
    changes = remedy.split("; ")
    assert changes[0].startswith("train.offload: parameters (")
    needs = [float(change.split("(")[1].split()[0]) for change in changes]
    assert needs == sorted(needs)
    assert {change.split(":")[0] for change in changes} == {
        "train.ranks", "train.offload", "train.moments",
    }  # fmt: skip


def test_no_remedy_needs_more_than_there_is() -> None:
    for gib in (70, 50, 30):
        ((_, _, remedy),) = faults_of_memory(config("4"), gpus(gib))
        assert all(float(change.split("(")[1].split()[0]) <= gib for change in remedy.split("; "))


def test_a_remedy_that_takes_more_gpus_than_there_are_says_so_and_comes_last() -> None:
    machine = Machine("cuda", 70 * GIB, sizes, host=900 * GIB, gpus=3)
    ((_, _, remedy),) = faults_of_memory(config("4"), machine)
    assert remedy.endswith("GiB; the pools then take 4 GPUs, this machine has 3)")
    assert remedy.count("this machine has") == 1


def test_a_remedy_that_the_host_has_no_memory_for_is_not_named() -> None:
    machine = Machine("cuda", 70 * GIB, sizes, host=90 * GIB, gpus=4)
    ((_, _, remedy),) = faults_of_memory(config("4"), machine)
    assert "train.offload: moments (" in remedy
    assert "train.offload: parameters" not in remedy


def test_the_remedy_of_too_many_engines_that_evaluate_are_fewer() -> None:
    machine = Machine("cpu", 200 * GIB, sizes)
    ((key, _, remedy),) = faults_of_memory(config("1", eval={"replicas": 361}), machine)
    assert key == "eval"
    assert remedy.startswith("eval.replicas: 0 (")


def test_a_remedy_that_the_config_refuses_is_not_named() -> None:
    shared = {"placement": "colocated", "with": "train"}
    machine = Machine("cpu", 110 * GIB, sizes)
    assert "offload" not in next(iter(faults_of_memory(config("4"), machine)))[2]
    asleep = Machine("cuda", 80 * GIB, sizes, host=100 * GIB, gpus=4)
    ((_, _, remedy),) = faults_of_memory(config("4", rollout=shared), asleep)
    assert "train.offload" not in remedy


def test_changes_that_help_only_together_are_named_together() -> None:
    ((_, _, remedy),) = faults_of_memory(config("4"), Machine("cpu", 115 * GIB, sizes))
    together = "together train.moments: 8bit and train.gradient_checkpointing: full (112.7 GiB)"
    assert remedy == together


def test_a_fault_without_a_remedy_is_reported() -> None:
    ((_, _, remedy),) = faults_of_memory(config("4"), Machine("cpu", 64 * GIB, sizes))
    assert remedy == "a smaller model, or more memory"


# ── host memory of runs on GPUs ────────────────────────────────────────────────────────────────


def host(config: RunConfig, pool: str) -> str:
    rows = memory_rows(config, gpus(80))
    return next(row[4] for row in rows if row[:3:2] == (pool, "host"))


def test_a_run_on_gpus_that_needs_more_host_memory_than_there_is_is_refused() -> None:
    machine = Machine("cuda", 80 * GIB, sizes, host=100 * GIB, gpus=4)
    offloaded = config("4", {"ranks": 2, "offload": "parameters"})
    ((key, fault, remedy),) = faults_of_memory(offloaded, machine)
    assert key == "train"
    assert fault.startswith("the run needs 111.8 GiB of host memory, most of it train, 2 times ")
    assert remedy.startswith("train.offload: none (52.2 GiB); ")


def test_the_first_rank_alone_has_the_snapshot() -> None:
    machine = Machine("cuda", 80 * GIB, sizes, host=70 * GIB, gpus=10)
    assert list(faults_of_memory(config("4", {"ranks": 8}), machine)) == []


def test_of_adapters_a_checkpoint_has_what_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("async_opd.memory.pools.trained_entries", lambda *_: BILLION // 100)
    adapters = config("4", {"lora": {"rank": 8, "sync": "merged"}})
    assert "checkpoint 0.1 GiB" in host(adapters, "train")


def beside(host: str) -> dict[str, Any]:
    """A teacher of 4B on GPUs of a pool."""
    return {"teachers": {"a": {"model": "4", "placement": "colocated", "with": host}}}


@pytest.mark.parametrize(
    ("sections", "pool"),
    [
        ({"rollout": {"placement": "colocated", "with": "train"}}, "rollout"),
        (beside("rollout"), "rollout"),
        (beside("train"), "teachers.a"),
    ],
)
def test_an_engine_that_sleeps_has_its_weights_in_host_memory(
    sections: dict[str, Any], pool: str
) -> None:
    assert "weights asleep 7.5 GiB" in host(config("4", **sections), pool)
    assert "asleep" not in host(config("4"), "rollout")


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_engines_on_the_trainers_gpus_receive_chunks_in_host_memory_and_never_the_whole_model(
    backend: str,
) -> None:
    shared = {"placement": "colocated", "with": "train", "replicas": 8, "tensor_parallel": 2}
    sections = {
        "rollout": shared,
        "sync": {"backend": backend},
        "eval": {"replicas": 1, "every": 1},
    }
    for pool in ("rollout", "eval"):
        terms = memory_of(config("32", {"ranks": 16}, **sections), pool, gpus(80)).host
        layer, head = sizes("32").block * 2, sizes("32").head_bytes("bfloat16")
        buffer = head if backend == "gloo" else 0  # else it is in the trainer's shared memory
        assert terms["received weights"] == buffer + (256 << 20) + layer
        assert terms["received weights"] < sizes("32").engine_bytes("bfloat16") / 10


def test_weights_in_shared_memory_are_there_once_for_all_engines() -> None:
    shared = {"placement": "colocated", "with": "train", "replicas": 8}
    sections = {"train": {"ranks": 8}, "rollout": shared}
    first = memory_of(config("32", **sections), "train", gpus(80)).first
    assert first["shared weights"] == first["snapshot"] == sizes("32").engine_bytes("bfloat16")
    over_gloo = config("32", **sections, sync={"backend": "gloo"})
    assert "shared weights" not in memory_of(over_gloo, "train", gpus(80)).first


def test_engines_that_receive_on_their_gpus_have_no_weights_in_host_memory() -> None:
    assert "received" not in host(config("4"), "rollout")


def test_an_engine_on_a_cpu_receives_all_weights_before_it_loads_them() -> None:
    terms = memory_of(config("1"), "rollout", Machine("cpu", 80 * GIB, sizes)).host
    assert terms["received weights"] == terms["weights"]
    assert "received weights" not in memory_of(config("1"), "teachers.a", gpus(80)).host


def test_engines_that_only_evaluate_never_sleep_though_those_of_rollouts_do() -> None:
    shared = {"placement": "colocated", "with": "train"}
    sections = {"rollout": shared, "eval": {"replicas": 1, "every": 1}}
    assert "weights asleep" in host(config("4", **sections), "rollout")
    assert "asleep" not in host(config("4", **sections), "eval")


def test_with_enough_ranks_it_fits() -> None:
    assert fewest_ranks(config("4"), gpus(70)) == 2
    assert list(faults_of_memory(config("4", {"ranks": 2}), gpus(70))) == []


def test_no_number_of_ranks_holds_a_row_that_is_too_long() -> None:
    long = {"tokens_per_micro_batch": 4_000_000, "batch_size": 4096}
    assert fewest_ranks(config("4", long), gpus(70)) is None


def test_an_engine_that_its_gpu_does_not_hold_is_refused_with_the_gpus_that_do() -> None:
    small = config("1", {"ranks": 8}, teachers={"a": {"model": "40"}})
    ((key, fault, remedy),) = faults_of_memory(small, gpus(70))
    assert key == "teachers.a"
    assert "(weights 74.5 GiB" in fault
    assert remedy.startswith("teachers.a.tensor_parallel: 8 (")


def test_where_the_memory_is_not_known_nothing_is_refused() -> None:
    assert list(faults_of_memory(config("400"), gpus(None))) == []


def test_a_rank_that_nearly_fills_its_gpu_is_noted() -> None:
    two = config("4", {"ranks": 2})
    (needed,) = [row[3] for row in memory_rows(two, gpus(70)) if row[0] == "train"][:1]
    gib = float(needed.split()[0])
    assert list(near(two, gpus(2 * gib))) == []
    (note,) = near(two, gpus(gib + 1))
    assert note.startswith(f"train: a rank needs {needed} (")


def test_a_share_that_leaves_too_little_for_a_load_of_weights_is_noted() -> None:
    def notes(share: Any) -> list[str]:
        return list(
            near(config("1", rollout={"engine": {"gpu_memory_utilization": share}}), gpus(40))
        )

    assert notes("auto") == notes(0.8) == []
    (note,) = notes(0.97)
    assert note.startswith("rollout.engine.gpu_memory_utilization: 0.97 of its GPU leaves 1.2 GiB")
    assert "weight load" in note


def test_a_run_on_cpus_that_needs_more_than_the_host_has_is_refused() -> None:
    machine = Machine("cpu", 125 * GIB, sizes)
    ((key, fault, remedy),) = faults_of_memory(config("4"), machine)
    assert key == "train"
    assert "this machine has 125.0 GiB" in fault
    assert "train.moments: 8bit" in remedy
    assert list(faults_of_memory(config("0.1"), machine)) == []


def test_gradients_that_are_reduced_once_a_step_are_whole_on_every_rank() -> None:
    def gradients(when: str, total: float | None) -> str:
        made = config("4", {"ranks": 8, "reduce_gradients": when})
        (terms,) = [
            row[4] for row in memory_rows(made, gpus(total)) if row[:3:2] == ("train", "GPU")
        ]
        return next(one for one in terms.split(", ") if one.startswith("gradients"))

    assert gradients("step", 70) == "gradients 14.9 GiB"
    assert gradients("auto", 70) == gradients("micro_batch", 70) == "gradients 1.9 GiB"
    assert gradients("auto", 141) == "gradients 14.9 GiB"


@pytest.mark.parametrize(("gib", "tokens"), [(40, True), (None, False)])
def test_engines_say_what_is_left_for_their_kv_cache(gib: float | None, tokens: bool) -> None:
    (row,) = [one for one in memory_rows(config(), gpus(gib)) if one[:3:2] == ("rollout", "GPU")]
    assert ("; KV cache of at most " in row[4]) == tokens


def test_the_fewest_ranks_hold_whole_copies_and_whole_rows() -> None:
    shared = {"ranks": 12, "replicate": 2, "context_parallel": 3}
    assert fewest_ranks(config("4", shared), gpus(500)) == 6


LONG = {"max_position_embeddings": 262_144, "hidden_size": 2560}


def long_models(folder: Path, **settings: Any) -> dict[str, Any]:
    """Sections of a student and a teacher whose models take 262,144 tokens."""
    for name in ("4", "1"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(LONG | settings))
    return {
        "student": {"model": str(folder / "4")},
        "teachers": {"a": {"model": str(folder / "1")}},
    }


def of_folders(gib: float) -> Machine:
    return Machine("cuda", int(gib * GIB), lambda model: sizes(Path(model).name))


def of_run(made: dict[str, Any], **sections: Any) -> RunConfig:
    data = {"train": "prompts.jsonl", **sections}
    return RunConfig.model_validate({"data": data, **made})


def test_an_engine_whose_cache_holds_no_longest_sequence_is_refused(tmp_path: Path) -> None:
    """36 layers, 1,024 keys and values in bfloat16: 36 GiB of 262,144 tokens."""
    found = list(faults_of_cache(of_run(long_models(tmp_path)), of_folders(40)))
    assert [key for key, *_ in found] == [
        "rollout.engine.max_model_len",
        "teachers.a.engine.max_model_len",
    ]
    _, fault, remedy = found[0]
    assert "a sequence of max_model_len 262144 has 36.0 GiB of keys and values" in fault
    assert remedy.startswith("set data.max_prompt_tokens")


def test_an_engine_needs_no_more_than_the_run_does(tmp_path: Path) -> None:
    short = of_run(long_models(tmp_path), max_prompt_tokens=2048)
    assert list(faults_of_cache(short, of_folders(40))) == []


def test_the_remedy_of_a_length_that_the_config_has_is_a_lower_one(tmp_path: Path) -> None:
    models = long_models(tmp_path) | {"rollout": {"engine": {"max_model_len": 262_144}}}
    ((key, _, remedy),) = faults_of_cache(of_run(models, max_prompt_tokens=2048), of_folders(40))
    assert key == "rollout.engine.max_model_len"
    assert remedy == "lower it, or raise tensor_parallel"


def test_the_remedy_for_a_teacher_with_prompts_of_its_own_is_its_own_length(tmp_path: Path) -> None:
    models = long_models(tmp_path)
    models["teachers"]["a"]["system_prompt"] = "be brief"
    ((key, _, remedy),) = faults_of_cache(of_run(models, max_prompt_tokens=2048), of_folders(40))
    assert key == "teachers.a.engine.max_model_len"
    assert remedy.startswith("set it to its longest prompt")


def test_a_window_that_the_model_does_not_use_is_no_limit(tmp_path: Path) -> None:
    models = long_models(tmp_path, sliding_window=1024, use_sliding_window=False)
    assert list(faults_of_cache(of_run(models), of_folders(40))) != []


def test_layers_with_a_window_keep_the_window_only(tmp_path: Path) -> None:
    kinds = ["full_attention"] + ["sliding_attention"] * 35
    models = long_models(tmp_path, layer_types=kinds, sliding_window=1024)
    assert list(faults_of_cache(of_run(models), of_folders(40))) == []


def test_the_cache_of_an_engine_on_a_cpu_holds_one_longest_sequence_too(tmp_path: Path) -> None:
    machine = replace(of_folders(64), device="cpu")
    (_, fault, _), _ = faults_of_cache(of_run(long_models(tmp_path)), machine)
    assert "72.0 GiB of keys and values; the engine's KV cache has 64.0 MiB" in fault


def test_a_pool_that_can_grow_is_planned_with_its_most_engines_on_cpus_and_its_least_on_gpus() -> (
    None
):
    joins = {"address": "10.0.0.1:6379"}
    growing = config("1", eval={"replicas": {"min": 1, "max": 361}}, cluster=joins)
    assert memory_of(growing, "eval", gpus(80)).processes == 1
    ((key, _, remedy),) = faults_of_memory(growing, Machine("cpu", 200 * GIB, sizes))
    assert (key, remedy.split(" (")[0]) == ("eval", "eval.replicas: 0")
