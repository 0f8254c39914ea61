"""examples/clusters: the Slurm script runs on commands that take the place of Slurm's and Ray's."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_opd.cli import parser
from async_opd.config.load import load_config
from tests.checks.inputs import EXAMPLE

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
BOUND_S = 60
COMMANDS = {
    "scontrol": "echo node-a; echo node-b",
    "srun": '''for word; do
case $word in --nodelist=*) node=${word#*=};; --*) ;; *) break;; esac
shift; done
echo "$node $*" >> "$CALLS"
exec "$@"''',
    "python": "echo 127.0.0.1",
    "ray": """case $* in *--head*) exec {python} -c "
import socket, time
listening = socket.create_server(('127.0.0.1', $RAY_PORT))
time.sleep(600)";; esac
exec sleep 600""",
    "async_opd": """until [ $(wc -l < "$CALLS") -ge 4 ]; do sleep 0.05; done # the worker, too
[ ${ENDS:-} ] && exit $ENDS
trap 'kill $!; exit 130' TERM
sleep 600 &
touch $CALLS.up; wait""",
}


def started(folder: Path, **env: str) -> subprocess.Popen[bytes]:
    for name, text in COMMANDS.items():
        command = folder / name
        command.write_text(f"#!/bin/bash\n{text.replace('{python}', sys.executable)}\n")
        command.chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
    env |= {"RAY_PORT": port, "RUN_DIR": "/shared/run", "SLURM_JOB_NODELIST": "node-[a-b]"}
    script = str(CLUSTERS / "slurm.sbatch")
    return subprocess.Popen(["bash", script, "my.yaml", "train.steps=8"], env=env)


@pytest.mark.slow
def test_the_slurm_script_starts_ray_on_all_nodes_and_the_run_on_the_first(tmp_path: Path) -> None:
    script = started(tmp_path, ENDS="3")
    assert script.wait(BOUND_S) == 3
    _, head, *others = (tmp_path / "calls").read_text().splitlines()
    port = head.rpartition("=")[2]
    assert head == f"node-a ray start --head --block --node-ip-address=127.0.0.1 --port={port}"
    run, worker = sorted(others)
    assert worker == f"node-b ray start --block --address=127.0.0.1:{port}"
    assert run.startswith("node-a async_opd run my.yaml train.steps=8 --run-dir /shared/run")
    assert f"cluster.address=127.0.0.1:{port}" in run
    refused(shlex.split(run)[2:])


@pytest.mark.slow
def test_slurms_signal_ends_the_run_as_an_interrupted_one(tmp_path: Path) -> None:
    script = started(tmp_path)
    until = time.monotonic() + BOUND_S
    while not (tmp_path / "calls.up").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    script.send_signal(signal.SIGTERM)
    assert script.wait(BOUND_S) == 130


def refused(words: list[str]) -> None:
    """Fails for an option or an override that a run does not take."""
    given, rest = parser("run").parse_known_args(words)
    assert [word for word in rest if word.startswith("-")] == []
    load_config(EXAMPLE, [*given.overrides, *rest])


@pytest.fixture(scope="module")
def job() -> Any:
    return yaml.safe_load((CLUSTERS / "kuberay_rayjob.yaml").read_text())["spec"]


def test_the_rayjob_submits_a_command_that_a_run_takes(job: Any) -> None:
    folder, _, run = job["entrypoint"].partition(" && ")
    command, *words = shlex.split(run)
    assert (folder.split()[0], command) == ("mkdir", "async_opd")
    refused(words)
    assert "--resume" in words  # a retry would be refused without it


def test_pods_have_shared_memory_the_shared_volume_and_a_secret_token(job: Any) -> None:
    cluster = job["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token", "secretName": "async-opd-token"}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
        volumes = {one["name"]: one for one in pod["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_task_of_skypilot_is_a_script_that_runs_a_command_that_a_run_takes() -> None:
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    assert subprocess.run(["bash", "-n"], input=task["run"].encode()).returncode == 0
    lines = task["run"].replace("\\\n", " ").splitlines()
    refused(shlex.split(lines[-1])[1:])
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None}
