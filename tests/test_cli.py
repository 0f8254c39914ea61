"""The command line: exit codes, flags, and what ``check`` does not import."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.cli import COMMANDS, GROUPS, NO_READER, main
from tests.checks.inputs import FEW
from tests.world.cli import Cli

ROOT = Path(__file__).parents[1]
EXAMPLE = str(ROOT / "examples" / "quickstart.yaml")


def test_check_exits_0_and_prints_the_resolved_config_and_the_pools(cli: Cli) -> None:
    printed = cli("check", EXAMPLE).out
    assert "sync_steps: 4" in printed
    assert "teachers.reverse" in printed


@pytest.mark.parametrize("columns", ["80", None])
def test_check_has_whole_paths_of_models_at_any_width(
    columns: str | None, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / ("folder" * 10) / "student"
    shutil.copytree(ROOT / "examples" / "quickstart" / "models" / "student", model)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    rows = [
        line
        for line in cli("check", EXAMPLE, *FEW, f"student.model={model}").out.splitlines()
        if line.startswith("│")
    ]
    pools = [row.split() for row in rows if str(model) in row]
    assert [(row[1], row[-2]) for row in pools] == [("rollout", str(model)), ("train", str(model))]


@pytest.mark.usefixtures("torch_for_gpus")
def test_check_says_that_only_a_run_asks_the_cluster_for_its_device(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    words = " ".join(cli("check", EXAMPLE, *FEW).out.split())
    assert "auto is taken for cuda here; a run asks the cluster at 10.0.0.1:6379" in words


def test_check_prints_what_a_step_moves_and_what_the_queue_holds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    changes = ["loss={kind: forward_kl, top_k: 8}", "rollout.max_tokens=32"]
    main(["check", EXAMPLE, *changes, "queue.payloads=reference"])
    printed = capsys.readouterr().out
    assert "teacher sort: teacher_topk, 8 bytes a response token of a rollout, 80 of a" in printed
    assert "with 32 response tokens: a rollout" in printed
    assert "a step moves" in printed
    assert "0 B and more stay on their teacher's node" in printed


def test_flags_and_overrides_in_any_order_set_their_keys(cli: Cli) -> None:
    """A name that looks like a number stays a name."""
    flags = ["--staleness-threshold", "2", "--sync-steps", "9", "--run-dir", "2026"]
    overrides = ["--set", "train.steps=8", "--set", "seed=5", "seed=4", "rollout.n=4"]
    printed = cli("check", EXAMPLE, *FEW, "eval.every=7", *flags, *overrides).out
    for line in ("staleness_threshold: 2.0", "sync_steps: 9", "run_dir: '2026'", "every: 7"):
        assert f"{line}\n" in printed
    for line in ("steps: 8", "seed: 5", "  n: 4"):
        assert f"{line}\n" in printed


@pytest.mark.parametrize("command", ["check", "run"])
def test_bad_input_exits_2_and_says_everything(command: str, cli: Cli) -> None:
    printed = cli(
        command, EXAMPLE, "eval.grader=nonsense", "student.model=/no/such/model", code=2
    ).err
    assert "eval.grader" in printed
    assert "/no/such/model" in printed


def test_a_missing_config_exits_2() -> None:
    assert main(["run", "/no/such.yaml"]) == 2


@pytest.mark.parametrize("words", [["dance"], ["check", EXAMPLE, "--sync-stps", "2"]])
def test_a_wrong_command_or_option_exits_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2


def test_a_run_loads_no_other_command() -> None:
    code = (
        "import sys; from async_opd.cli import main\n"
        "for words in ['--help'], ['run', '--help'], ['run', sys.argv[1], 'seed=x']:\n"
        "    try: main(words)\n"
        "    except SystemExit: pass\n"
        "print([m for m in sys.modules if m.startswith('async_opd.tools')])"
    )
    command = [sys.executable, "-c", code, EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


def test_a_config_is_read_without_libraries_of_data() -> None:
    code = (
        "import sys; from async_opd.config import run_config;"
        "print([m for m in ('numpy', 'pyarrow', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.slow
def test_check_imports_neither_torch_nor_ray_nor_vllm() -> None:
    code = (
        "import sys; from async_opd.cli import main; main(sys.argv[1:]);"
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, "check", EXAMPLE, *FEW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "Trains a student model on its own rollouts"),
        (["run"], "Starts the engines, trains all steps"),
        (["check"], "without starting an engine"),
        (["plan"], "Predicts throughput and staleness"),
    ],
)
def test_help_says_what_the_command_does_with_an_example_and_the_exit_codes(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*arguments, "--help"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    assert says in shown
    assert f"  async_opd {arguments[0] if arguments else 'check'} " in shown
    assert "exit codes: 0 done, 1 failed, 2 bad config or usage, 130 interrupted" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("form", [[], ["--set"]])
def test_a_wrong_override_is_told_alike_in_both_forms(form: list[str], cli: Cli) -> None:
    printed = cli("check", EXAMPLE, *form, "train.stps=8", code=2)
    assert "command line: train.stps: unknown key (value 8)" in printed.err


@pytest.mark.parametrize("command", ["run", "check", "report"])
def test_overrides_are_not_among_the_arguments_that_are_required(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command])
    required = capsys.readouterr().err.rpartition("required: ")[2].strip()
    assert required in ("config", "RUN_DIR|URL")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chekc", EXAMPLE], "no command chekc: did you mean check?"),
        (["init", "--model", "x"], "(did you mean --student or --teacher?)"),
        (["run", EXAMPLE, "--model", "x"], "or --set teachers.<name>.model=…?)"),
    ],
)
def test_a_mistyped_command_or_option_is_answered_with_what_was_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    printed = capsys.readouterr().err
    assert (caught.value.code, said in printed) == (2, True), printed
    assert words[0] == "chekc" or f"usage: async_opd {words[0]} " in printed


def test_check_says_how_often_each_prompt_is_taken(cli: Cli) -> None:
    sizes = ["train.steps=100", "train.batch_size=8", "rollout.n=2", "async.sync_steps=4"]
    assert "training prompts (the steps take 400: each " in cli("check", EXAMPLE, *FEW, *sizes).out


def test_every_command_with_overrides_takes_set(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "check", "plan", "doctor", "report", "eval", "init", "quickstart"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--set a.b.c=value" in capsys.readouterr().out, command


def test_a_dry_run_checks_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "6000 training prompts" in cli("run", EXAMPLE, "--dry-run").out
    assert main(["run", EXAMPLE, "--dry-run", "student.model=/no/such"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_help_lists_all_commands_by_groups_in_the_order_of_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.partition("\ncommands:\n")[2]
    found = re.findall(r"^  (?:  (\w+) +\S|(\w.*):$)", listed, flags=re.MULTILINE)
    shown = [command or group for command, group in found]
    assert shown == [one for title, group in GROUPS.items() for one in (title, *group)]
    assert list(COMMANDS) == [name for group in GROUPS.values() for name in group]


def test_the_readme_has_the_groups_of_the_help() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| (\w*) ?\| `async_opd (\w+)", text, flags=re.MULTILINE)
    shown = [one for title, command in rows for one in (title, command) if one]
    assert shown == [one for title, group in GROUPS.items() for one in (title, *group)]


def test_the_package_is_run_as_the_command_is(tmp_path: Path) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('of the working directory')")
    command = [sys.executable, "-m", "async_opd", "--version"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=_environment()
    )
    assert (done.returncode, done.stdout[:10], done.stderr) == (0, "async_opd ", "")


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


@pytest.mark.parametrize("words", [["check", EXAMPLE, *FEW], ["run", "--help"], ["--help"]])
@pytest.mark.slow
def test_a_closed_pipe_is_silent_and_has_the_exit_code_of_sigpipe(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "async_opd", *words]
    done = subprocess.run(
        command,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=_environment(PYTHONUNBUFFERED=""),  # argparse hides the error of an unbuffered write
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (NO_READER, "")


def test_a_pipe_that_breaks_elsewhere_is_an_error(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("async_opd.tools.check.check", breaks)
    assert "failed: [Errno 32] Broken pipe" in cli("check", EXAMPLE, code=1).err


@pytest.mark.slow
def test_a_full_disk_behind_standard_output_is_an_error() -> None:
    command = [sys.executable, "-m", "async_opd", "check", EXAMPLE, *FEW]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "No space left on device" in done.stderr


@pytest.mark.parametrize(
    "words", [["plan", "--help"], ["import", "--help"], ["check", EXAMPLE, *FEW]]
)
@pytest.mark.slow
def test_characters_that_the_encoding_lacks_are_escapes(words: list[str]) -> None:
    command = [sys.executable, "-m", "async_opd", *words]
    given = _environment(PYTHONIOENCODING="ascii")
    done = subprocess.run(command, capture_output=True, timeout=60, env=given)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--steps", "train.steps"),
        ("--batch-size=4", "train.batch_size"),
        ("--train.lr", "train.lr"),
    ],
)
def test_an_option_that_is_a_key_of_the_config_is_named_as_one(
    option: str, key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["run", EXAMPLE, option, "10"])
    assert f"--set {key}=…" in capsys.readouterr().err
