"""Faults of a node that keep it from running a part of a run, on reports that are made up."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.nodes import (
    AGREED,
    MIN_SHM_MIB,
    NodeReport,
    Probe,
    files_of,
    node_problems,
    report,
)
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.config.user_code import LOSS_GROUP, TRANSPORT_GROUP
from async_opd.grading.grader_pool import GraderSpec

VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "vllm": "0.32.0", "ray": "2.60.0"}
DRIVER = NodeReport("the driver", VERSIONS, {"NCCL_ALGO": "Ring"}, MIN_SHM_MIB)
A, B = replace(DRIVER, node="a (10.0.0.1)", gpus=True), replace(DRIVER, node="b (10.0.0.2)")
KEYS = {"/runs/r": "run_dir", "/models/s": "student.model"}


def found(*nodes: NodeReport) -> list[tuple[str, str]]:
    return [(one.key, one.message) for one in node_problems(DRIVER, nodes, KEYS)]


def test_nodes_like_the_drivers_have_no_problem() -> None:
    assert found(A, B) == []


def test_a_folder_is_one_problem_that_names_every_node_without_it() -> None:
    nodes = [replace(one, folders={"/runs/r": "No such file"}) for one in (A, B)]
    assert found(*nodes) == [
        (
            "run_dir",
            "/runs/r cannot be used on a (10.0.0.1): No such file; b (10.0.0.2): No such file",
        )
    ]


@pytest.mark.parametrize("name", VERSIONS)
def test_a_version_that_differs_is_named_with_its_node(name: str) -> None:
    other = replace(B, versions=VERSIONS | {name: "0.1"})
    message = f"{name} is {VERSIONS[name]} on the driver's node, 0.1 on b (10.0.0.2)"
    assert found(A, other) == [("cluster.address", message)]


def test_two_nodes_of_one_name_are_both_compared() -> None:
    other = replace(A, versions=VERSIONS | {"ray": "0.1"})
    message = "ray is 2.60.0 on the driver's node, 0.1 on a (10.0.0.1)"
    assert found(A, other) == found(other, A) == [("cluster.address", message)]


def test_a_package_that_a_node_lacks_differs() -> None:
    lacking = {name: value for name, value in VERSIONS.items() if name != "vllm"}
    ((_, message),) = found(replace(B, versions=lacking))
    assert message == "vllm is 0.32.0 on the driver's node, nothing on b (10.0.0.2)"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"NCCL_ALGO": "Ring", "NCCL_CUMEM_ENABLE": "0"},
            "NCCL_CUMEM_ENABLE is nothing on the driver's node, 0 on b (10.0.0.2)",
        ),
        ({"NCCL_ALGO": "Tree"}, "NCCL_ALGO is Ring on the driver's node, Tree on b (10.0.0.2)"),
    ],
)
def test_settings_of_nccl_that_differ_are_a_problem(settings: dict[str, str], message: str) -> None:
    assert found(A, replace(B, settings=settings)) == [("cluster.address", message)]


def test_nodes_without_the_interface_are_named() -> None:
    fault = "b has no interface 'ib0' with an address; it has eth0"
    assert found(A, replace(B, interface=fault)) == [("cluster.interface", fault)]


def test_code_that_nodes_cannot_import_is_one_problem_for_each_key() -> None:
    faults = [
        replace(A, code={"loss.function": "no m"}),
        replace(B, code={"loss.function": "no n"}),
    ]
    (problem,) = node_problems(DRIVER, faults, KEYS)
    message = "on a (10.0.0.1): no m; on b (10.0.0.2): no n"
    assert (problem.key, problem.message) == ("loss.function", message)
    assert "cluster.runtime_env: {working_dir" in problem.remedy


def test_only_nodes_with_gpus_need_shared_memory() -> None:
    small = [replace(one, shm_mib=64) for one in (A, B)]
    ((_, message),) = found(*small)
    assert message.startswith("/dev/shm of a (10.0.0.1) has 64 MiB, expected at least 1024")


def test_a_node_that_does_not_answer_is_named_and_compared_no_further() -> None:
    assert found(A, NodeReport("b", error="no report: it is gone")) == [
        ("cluster.address", "b: no report: it is gone")
    ]


def test_all_problems_are_reported_at_once() -> None:
    bad = replace(
        A,
        folders={"/runs/r": "x", "/models/s": "y"},
        versions=VERSIONS | {"ray": "0.1"},
        shm_mib=1,
        settings={},
    )
    assert [key for key, _ in found(bad, NodeReport("b", error="gone"))] == [
        "cluster.address",
        "run_dir",
        "student.model",
        "cluster.address",
        "cluster.address",
        "cluster.address",
    ]


# ── what a process finds on its own node ─────────────────────────────────────────────────────────


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    """A run directory with the driver's file, and a model."""
    run, model = tmp_path / "run", tmp_path / "model"
    for folder in (run, model):
        folder.mkdir()
    (run / ".probe").write_text("token")
    (model / "config.json").write_text("{}")
    return Probe(str(run), ".probe", "token", {str(model): files_of(str(model))})


def faults(probe: Probe) -> list[str]:
    return list(report("n", probe, False).folders.values())


def test_folders_that_are_there_have_no_fault_and_stay_as_they_are(probe: Probe) -> None:
    assert faults(probe) == []
    assert set(files_of(str(probe.run_dir))) == {".probe"}


def test_a_run_directory_without_the_drivers_file_is_another_one(probe: Probe) -> None:
    (Path(str(probe.run_dir)) / ".probe").unlink()
    assert "No such file" in faults(probe)[0]


def test_a_run_directory_with_an_older_runs_file_is_another_one(probe: Probe) -> None:
    assert faults(replace(probe, content="other")) == ["has another driver's files"]


def test_a_run_directory_in_which_nothing_can_be_written_is_a_fault(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "touch", refuse)
    assert "Permission denied" in faults(probe)[0]


def test_nodes_of_one_host_name_and_pid_write_files_of_different_names(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers of one image have them."""
    monkeypatch.setattr(Path, "unlink", lambda self: None)
    assert [faults(probe), faults(probe)] == [[], []]
    assert len(files_of(str(probe.run_dir))) == 3


def test_a_model_whose_download_is_not_complete_is_a_fault(probe: Probe) -> None:
    (folder,) = probe.models
    Path(folder, "config.json").write_text('{"a": 1}')
    assert faults(probe) == ["lacks or has other contents of config.json"]


def test_a_model_that_is_not_there_is_a_fault(probe: Probe) -> None:
    assert "No such file" in faults(replace(probe, models={"/none/such": {"config.json": 2}}))[0]


def test_a_report_says_which_interface_is_missing(probe: Probe) -> None:
    assert "no interface 'none0'" in report("n", replace(probe, interface="none0"), False).interface
    assert report("n", replace(probe, interface="lo"), False).interface == ""


def test_a_report_says_that_no_interface_has_the_nodes_address_in_ray(probe: Probe) -> None:
    elsewhere, here = "198.51.100.1", "127.0.0.1"
    assert elsewhere in report("n", replace(probe, address=elsewhere), False).interface
    assert report("n", replace(probe, address=here), False).interface == ""
    named = replace(probe, address=elsewhere, interface="lo")
    assert report("n", named, False).interface == ""


def test_a_report_has_the_versions_of_all_that_a_run_imports(probe: Probe) -> None:
    versions = report("n", probe, False).versions
    assert set(versions) == {"python", "torch", "vllm", "ray", "nccl", "async_opd"}
    assert "nothing" not in {versions[name] for name in ("torch", "vllm", "ray", "async_opd")}
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_report_of_a_run_with_images_has_the_versions_of_what_makes_pixels(probe: Probe) -> None:
    text, images = (
        report("n", replace(probe, vision=vision), False).versions for vision in (False, True)
    )
    assert images.keys() - text.keys() == {"pillow", "torchvision", "transformers"}
    assert "nothing" not in {images[name] for name in images.keys() - text.keys()}


def test_a_report_has_the_settings_that_nccl_has_to_agree_on(
    probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in AGREED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert report("n", probe, False).settings == {"NCCL_CUMEM_ENABLE": "0"}


MODULES = {
    "good": "def f(): pass",
    "lacks": "import none_such",
    "hangs": "import time; time.sleep(600)",
    "crashes": "import os; os.kill(os.getpid(), 9)",
    "ends": "print('bye'); raise SystemExit(3)",
}


@pytest.mark.parametrize(
    ("module", "fault"),
    [
        ("good", ""),
        ("lacks", "No module named 'none_such'"),
        ("hangs", "took longer than"),
        ("crashes", "exit code -9"),
        ("ends", "SystemExit: 3"),
    ],
)
def test_code_of_users_is_imported_in_a_process_that_may_do_anything(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, fault: str
) -> None:
    (tmp_path / f"{module}_of_a_user.py").write_text(MODULES[module])
    monkeypatch.syspath_prepend(tmp_path)
    named = {"loss.function": (f"{module}_of_a_user:f", LOSS_GROUP)}
    bound_s = 0.1 if module == "hangs" else 60
    found = report("n", replace(probe, code=named, bound_s=bound_s), False).code
    assert list(found) == (["loss.function"] if fault else [])
    assert fault in found.get("loss.function", "")
    assert f"{module}_of_a_user" not in sys.modules


def test_the_grader_of_the_reward_is_loaded_as_a_replica_loads_it(probe: Probe) -> None:
    spec = GraderSpec("none_such:f", GradingConfig(), 60)
    found = report("n", replace(probe, grader=spec), False).code
    assert "No module named 'none_such'" in found["reward.grader"]


def test_a_transport_lacks_an_end(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one_end.py").write_text("def sender(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    given = replace(probe, code={"sync.backend": ("one_end:", TRANSPORT_GROUP)})
    assert "not a module with DEVICES, receiver" in report("n", given, False).code["sync.backend"]
