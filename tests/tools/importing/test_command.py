"""The subcommand ``import``: what it writes, refuses and names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.cli import main
from async_opd.tools.importing.command import imported

FIXTURES = Path(__file__).parent / "fixtures"
VERL = """\
actor_rollout_ref: {model: {path: s}}
distillation: {teacher_models: {t: {key: k, model_path: t}}}
"""


def text_of(tmp_path: Path, theirs: str, name: str = "theirs.yaml") -> str:
    file = tmp_path / name
    file.write_text(theirs)
    return imported(file)


def test_the_config_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(FIXTURES / "trl_gold.sh")]) == 0
    assert "student: {model: meta-llama/Llama-3.2-1B-Instruct}" in capsys.readouterr().out


def test_an_existing_file_is_kept_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "config.yaml"
    target.write_text("mine")
    given = ["import", str(FIXTURES / "trl_gold.sh"), "--output", str(target)]
    assert main(given) == 2
    assert "exists already" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main([*given, "--force"]) == 0
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
    name: str, text: str, cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["import", str(tmp_path / name)]) == 2
    assert cause in capsys.readouterr().err


def test_a_binary_file_is_answered_with_the_kinds_of_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.sh").write_bytes(b"\xff\xfe\x00")
    assert main(["import", str(tmp_path / "a.sh")]) == 2
    assert "this one is not text" in capsys.readouterr().err


def test_a_result_that_does_not_pass_is_written_and_ends_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(VERL + "data: {max_response_length: -1}")
    assert main(["import", str(tmp_path / "bad.yaml")]) == 2
    shown = capsys.readouterr()
    assert "max_tokens: -1" in shown.out
    assert "rollout.max_tokens" in shown.err


def test_an_unknown_key_is_named_as_not_mapped(tmp_path: Path) -> None:
    assert "# Not mapped:\n#   - data.sparkles\n" in text_of(tmp_path, VERL + "data: {sparkles: 1}")


def test_a_computed_value_is_named_with_its_source(tmp_path: Path) -> None:
    theirs = "GKDTrainer(args=GKDConfig(max_grad_norm=norm()), model='s', teacher_model='t')"
    text = text_of(tmp_path, theirs, "theirs.py")
    assert "max_grad_norm: its value is computed: norm()" in text


def test_a_clamp_that_removes_gradients_is_reported(tmp_path: Path) -> None:
    loss = "{loss_mode: k3, loss_max_clamp: 10.0, use_task_rewards: false}"
    text = text_of(
        tmp_path,
        "actor_rollout_ref: {model: {path: s}}\n"
        f"distillation: {{teacher_model: {{model_path: t}}, distillation_loss: {loss}}}",
    )
    assert "removes the gradient of every token beyond 10.0 there" in " ".join(
        line.lstrip("# ") for line in text.splitlines()
    )


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
    assert "placement:" not in text


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
