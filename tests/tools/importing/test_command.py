"""The subcommand ``import``: what it writes, refuses and names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.cli import main
from async_opd.tools.importing.command import NAMES, imported
from tests.world.cli import Cli

FIXTURES = Path(__file__).parent / "fixtures"
VERL = """\
actor_rollout_ref: {model: {path: s}}
distillation: {teacher_models: {t: {key: k, model_path: t}}}
"""


def written(tmp_path: Path, theirs: str, name: str = "theirs.yaml") -> Path:
    file = tmp_path / name
    file.write_text(theirs)
    return file


def text_of(tmp_path: Path, theirs: str, name: str = "theirs.yaml") -> str:
    return imported(written(tmp_path, theirs, name))[1]


def lines_of(text: str) -> str:
    """The text with the lines of its comments joined."""
    return " ".join(line.lstrip("# ") for line in text.splitlines())


def test_the_config_goes_to_standard_output(cli: Cli) -> None:
    printed = cli("import", FIXTURES / "trl_gold.sh", code=2)
    assert "student: {model: meta-llama/Llama-3.2-1B-Instruct}" in printed.out


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path, cli: Cli) -> None:
    target = tmp_path / "config.yaml"
    target.write_text("mine")
    given = ["import", str(FIXTURES / "trl_gold.sh"), "--output", str(target)]
    assert "exists already" in cli(*given, code=2).err
    assert target.read_text() == "mine"
    assert main([*given, "--force"]) == 2
    assert "Llama" in target.read_text()


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("a.yaml", "x: 1", "is of no framework that is known here"),
        ("a.yaml", "x: [", "cannot be parsed"),
        ("a.py", "def", "cannot be parsed"),
        ("a.toml", "x =", "cannot be parsed"),
        ("a.sh", "echo hello", "sets no key of a framework"),
    ],
)
def test_a_file_that_is_none_of_theirs_is_refused(
    name: str, text: str, cause: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / name).write_text(text)
    assert cause in cli("import", tmp_path / name, code=2).err


def test_a_binary_file_is_answered_with_the_kinds_of_files(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "a.sh").write_bytes(b"\xff\xfe\x00")
    assert "this one is not text" in cli("import", tmp_path / "a.sh", code=2).err


def test_a_result_that_does_not_pass_is_written_and_ends_with_exit_code_2(
    tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "bad.yaml").write_text(VERL + "data: {max_response_length: -1}")
    shown = cli("import", tmp_path / "bad.yaml", code=2)
    assert "max_tokens: -1" in shown.out
    assert "rollout.max_tokens" in shown.err


def test_an_unknown_key_is_named_as_not_mapped(tmp_path: Path) -> None:
    assert "# Not mapped:\n#   - data.sparkles\n" in text_of(tmp_path, VERL + "data: {sparkles: 1}")


def test_a_computed_value_is_named_with_its_source(tmp_path: Path) -> None:
    theirs = "GKDTrainer(args=GKDConfig(max_grad_norm=norm()), model='s', teacher_model='t')"
    text = text_of(tmp_path, theirs, "theirs.py")
    assert "max_grad_norm: its value is computed: norm()" in text
    assert "max_grad_norm: FILL_IN" in text


def test_a_clamp_that_removes_gradients_is_reported(tmp_path: Path) -> None:
    loss = "{loss_mode: k3, loss_max_clamp: 10.0, use_task_rewards: false}"
    text = text_of(
        tmp_path,
        "actor_rollout_ref: {model: {path: s}}\n"
        f"distillation: {{teacher_model: {{model_path: t}}, distillation_loss: {loss}}}",
    )
    assert "removes the gradient of every token beyond 10.0 there" in lines_of(text)


def test_keys_of_the_asynchronous_trainer_are_those_of_the_async_section(tmp_path: Path) -> None:
    theirs = (
        VERL.replace("{path: s}}", "{path: s}, hybrid_engine: false, rollout: {n: 4, "
                     "tensor_model_parallel_size: 1}, actor: {ppo_mini_batch_size: 32}}")
        + "async_training: {staleness_threshold: 0.1, trigger_parameter_sync_step: 4, "
        "require_batches: 4, partial_rollout: true}\nrollout: {nnodes: 1, n_gpus_per_node: 4}\n"
        "trainer: {nnodes: 1, n_gpus_per_node: 4}"
    )  # fmt: skip
    text = text_of(tmp_path, theirs)
    assert "async: {staleness_threshold: 0.1, sync_steps: 16}" in text
    assert "  batch_size: 128\n" in text
    assert "  replicas: 4\n" in text
    assert "  ranks: 4\n" in text
    assert "  placement: dedicated\n" in text


@pytest.mark.slow
def test_the_command_needs_neither_torch_nor_ray_vllm_or_transformers() -> None:
    heavy = "".join(
        f"sys.modules[{name!r}] = None;" for name in ("torch", "ray", "vllm", "transformers")
    )
    file = str(FIXTURES / "verl_mopd.sh")
    call = f"from async_opd.cli import main; sys.exit(main(['import', {file!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys;{heavy}{call}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("framework", "mark"),
    [("verl", "actor_rollout_ref: {model: {path: s}}"), ("asyncopd", "algorithm: {mode: opd}")],
)
def test_several_files_are_mixed_by_their_sizes(framework: str, mark: str, tmp_path: Path) -> None:
    several = text_of(tmp_path, f"{mark}\ndata: {{train_files: [a.parquet, b.parquet]}}\n")
    one = text_of(tmp_path, f"{mark}\ndata: {{train_files: [a.parquet]}}\n")
    assert "size_temperature: 1" in several
    assert "the order differs" in " ".join(several.replace("#", "").split())
    assert "size_temperature" not in one


NO_SETTINGS = """\
from trl import GKDConfig, GKDTrainer, ModelConfig, ScriptArguments, TrlParser
parser = TrlParser((ScriptArguments, GKDConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
GKDTrainer(
    model=model_args.model_name_or_path,
    teacher_model=training_args.teacher_model_name_or_path,
    args=training_args,
    peft_config=get_peft_config(model_args),
).train()
"""


@pytest.mark.parametrize("trainer", ["GKD", "Distillation"])
def test_a_script_whose_settings_come_from_its_command_line_is_answered_with_the_command(
    trainer: str, tmp_path: Path, cli: Cli
) -> None:
    """TRL's examples/scripts/gkd.py and distillation.py have this form."""
    (tmp_path / "a.py").write_text(NO_SETTINGS.replace("GKD", trainer))
    shown = cli("import", tmp_path / "a.py", code=2)
    assert shown.out == ""
    assert "its trainer takes args=training_args" in shown.err
    assert "into a .sh file" in shown.err


OPSD = """\
accelerate launch --config_file accelerate.yaml --num_processes 4 \\
    --gradient_accumulation_steps 2 opsd_train.py \\
    --model_name_or_path Qwen/Qwen3-1.7B --learning_rate 5e-6 \\
    --per_device_train_batch_size 1 --max_steps 100 --max_completion_length 1024 \\
    --beta 0 --lmbda 1 --use_vllm --fixed_teacher --use_peft --lora_r 64 --lora_alpha 128
"""
SWIFT = """\
NPROC_PER_NODE=4 swift rlhf --rlhf_type gkd --model Qwen/Qwen2.5-0.5B \\
    --teacher_model Qwen/Qwen2.5-7B-Instruct --lmbda 1 --beta 0.5 --learning_rate 1e-5 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_completion_length 512
"""
SLIME = (
    "ray job submit -- python3 train.py --hf-checkpoint /m/Qwen3-4B --ref-load /m/Qwen3-4B_torch"
)


@pytest.mark.parametrize("text", [OPSD, SWIFT, SLIME])
def test_an_unknown_framework_is_answered_with_the_known_ones(
    text: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "run.sh").write_text(text)
    shown = cli("import", tmp_path / "run.sh", code=2).err
    assert "sets no key of a framework that is known here" in shown
    assert f"--from: {', '.join(NAMES)}" in " ".join(shown.split())


def test_flags_that_are_those_of_trl_are_read_if_the_framework_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(OPSD)
    draft, _ = imported(tmp_path / "run.sh", "trl")
    assert draft.ours["student.model"] == "Qwen/Qwen3-1.7B"
    assert draft.ours["teachers.teacher.model"] == "TEACHER"
    assert "teachers.teacher.model" in draft.fill_in
    assert draft.ours["train.batch_size"] == 8  # one answer, two steps, four processes
    (tmp_path / "run.sh").write_text(SWIFT)
    draft, _ = imported(tmp_path / "run.sh", "trl")
    assert draft.ours["teachers.teacher.model"] == "Qwen/Qwen2.5-7B-Instruct"


def test_placeholders_are_listed_as_problems_once_the_config_is_written(
    tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "run.py").write_text(
        "settings = GKDConfig(lmbda=1.0, learning_rate=rate())\n"
        "GKDTrainer(model='s', teacher_model=load(), args=settings)"
    )
    target = tmp_path / "config.yaml"
    shown = " ".join(cli("import", tmp_path / "run.py", "--output", target, code=2).err.split())
    assert "train.lr: learning_rate could not be read: its value is computed: rate()" in shown
    assert "teachers.teacher.model: teacher_model_name_or_path could not be read" in shown
    assert "write the run's value, in place of the placeholder if the config has one" in shown
    text = target.read_text()
    assert "  lr: FILL_IN\n" in text
    assert "model: TEACHER" in text


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--lmbda 0", "off-policy: lmbda is 0 there"),
        ("--lmbda 1 --use_uld_loss", "cross-tokenizer: use_uld_loss aligns two vocabularies"),
    ],
)
def test_a_recipe_that_is_another_one_is_named_and_ends_with_exit_code_2(
    flags: str, named: str, tmp_path: Path, cli: Cli
) -> None:
    command = f"gold.py --model_name_or_path s --teacher_model_name_or_path t {flags}"
    (tmp_path / "run.sh").write_text(command)
    shown = cli("import", tmp_path / "run.sh", code=2)
    assert named in " ".join(shown.err.split())
    assert "# Another recipe:" in shown.out


def test_a_parent_that_is_not_there_is_to_be_filled_in(tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text("defaults: ../none.yaml\npolicy: {model_name: s}")
    draft, text = imported(tmp_path / "child.yaml")
    assert "../none.yaml" in draft.fill_in
    assert "#   - ../none.yaml: this file was not read, nor are its values here" in text


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("gold.py --config mine.yaml --teacher_model_name_or_path t", ["mine.yaml"]),
        ("python -m verl.x --config-name=mine actor_rollout_ref.model.path=s", ["mine"]),
        ("python -m verl.x --config-name mine.yaml actor_rollout_ref.model.path=s", ["mine.yaml"]),
        ("python -m verl.x --config-name=ppo_trainer.yaml actor_rollout_ref.model.path=s", []),
        ("other --config a\nrun actor_rollout_ref.model.path=s --config", []),
    ],
)
def test_a_file_that_a_training_command_names_is_to_be_filled_in(
    command: str, named: list[str], tmp_path: Path
) -> None:
    draft, _ = imported(written(tmp_path, command, "run.sh"))
    assert [key for key, why in draft.fill_in.items() if "this file was not read" in why] == named


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("gold.py --teacher_model_name_or_path t --learning_rate 1e-5",
         "gold.py --teacher_model_name_or_path t --learning_rate 1e-6"),
        ("run actor_rollout_ref.actor.optim.lr=1e-5", "run actor_rollout_ref.actor.optim.lr=1e-6"),
    ],
)  # fmt: skip
def test_two_commands_that_differ_in_a_value_leave_it_to_be_filled_in(
    one: str, other: str, tmp_path: Path
) -> None:
    draft, _ = imported(written(tmp_path, f"{one}\n{other}", "run.sh"))
    assert "1e-05 or 1e-06" in draft.fill_in["train.lr"]


def test_teachers_on_the_trainers_gpus_there_are_named(tmp_path: Path) -> None:
    theirs = VERL.replace("{teacher_models", "{enable_resource_pool: false, teacher_models")
    assert "here they have dedicated GPUs" in lines_of(text_of(tmp_path, theirs))


def test_a_share_of_memory_of_a_teacher_stands_where_it_is_mapped_to(tmp_path: Path) -> None:
    theirs = VERL.replace(
        "model_path: t}", "model_path: t, inference: {gpu_memory_utilization: 0.3}}"
    )
    text = text_of(tmp_path, theirs)
    assert "teachers.t.engine.gpu_memory_utilization: 0.3" in lines_of(text)


def test_clips_without_a_reward_are_not_mapped(tmp_path: Path) -> None:
    theirs = VERL.replace("{path: s}}", "{path: s}, actor: {clip_ratio_high: 0.28}}")
    draft, _ = imported(written(tmp_path, theirs))
    assert "actor_rollout_ref.actor.clip_ratio_high" in draft.unmapped
