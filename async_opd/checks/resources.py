"""The GPUs of this machine or of a cluster, counted without torch, and those that a run takes."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from async_opd.config.load import with_overrides
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.core.distributions import installed
from async_opd.core.errors import ConfigError, StageError
from async_opd.memory.pools import EVAL
from async_opd.models.engine_args import NVIDIA_SMI_TIMEOUT_S, Device, smallest_gpu

JOINING = (
    "check cluster.address, or leave it out for a local cluster; a cluster with token "
    "authentication is joined with RAY_AUTH_MODE=token and its token (RAY_AUTH_TOKEN)"
)
ASK = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
print("GPUs", int(ray.cluster_resources().get("GPU", 0)))
"""
DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_count() -> int:
    """The GPUs that the installed PyTorch can use: none with a build of it for CPUs.

    Otherwise as ``visible_gpus``, which may raise ConfigError.
    """
    return 0 if built_for_cpus() else visible_gpus()


def built_for_cpus() -> str:
    """A sentence if the installed PyTorch is built for CPUs, by its version; else ''.

    Builds whose version ends without ``+cpu`` are taken for builds with CUDA.
    """
    version = installed("torch")
    return f"PyTorch {version} is built for CPUs" if version.endswith("+cpu") else ""


def unused_gpus() -> str:
    """The reason why the GPUs of this machine are not used; '' if they are, or if it has none."""
    build = built_for_cpus()
    try:
        count = visible_gpus() if build else 0
    except ConfigError:  # a driver that nothing needs
        count = 0
    return f"{build} and does not use the {count} GPU{'s' * (count > 1)} here" if count else ""


def visible_gpus() -> int:
    """NVIDIA GPUs this process may use: CUDA_VISIBLE_DEVICES, else the driver's list.

    As CUDA does, it reads the variable up to the first ``-1`` or empty entry. ConfigError if the
    driver does not answer: falling back to the CPU would change the run without a message.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = (entry.strip() for entry in visible.split(","))
        return sum(1 for _ in itertools.takewhile(lambda e: e not in ("", "-1"), entries))
    if DRIVER.is_dir():
        return len(list(DRIVER.iterdir()))
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"nvidia-smi -L did not answer: {error}"
        remedy = "repair the driver, or set cluster.device to cpu and CUDA_VISIBLE_DEVICES to ''"
        raise ConfigError.of("cluster.device", message, remedy, "this machine") from error
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def gpu_bytes(config: RunConfig) -> int | None:
    """Bytes of the smallest GPU, as ``cluster.gpu_memory_gib`` or nvidia-smi says it.

    None if neither does; nvidia-smi knows nothing of a cluster that the run joins.
    """
    if config.cluster.gpu_memory_gib is not None:
        return int(config.cluster.gpu_memory_gib * (1 << 30))
    return None if config.cluster.joins else smallest_gpu()


def resolve_device(config: RunConfig, gpus: int | None = None) -> Device:
    """The device of all pools; ``auto`` is cuda if there is a GPU or the run joins a cluster.

    With a PyTorch for CPUs the cluster has it too, and ``auto`` is the CPU.
    Callers that start engines in a joined cluster ask it first: see ``with_device``.
    """
    if config.cluster.device != "auto":
        return config.cluster.device
    gpus = gpu_count() if gpus is None else gpus
    joins = config.cluster.joins and not built_for_cpus()
    return "cuda" if gpus or joins else "cpu"


def with_device(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with the device of the cluster to join, and a note if that is the CPU.

    The cluster is asked where ``cluster.device`` does not say. One whose machines are to come
    (``cluster.wait_s``) is taken for one with GPUs. Its machines have the PyTorch of this one
    (``checks.nodes``). StageError if it does not answer.
    """
    cluster = config.cluster
    refuse_client(config)
    if cluster.device != "auto" or cluster.joins is None:
        return config, []
    cause = built_for_cpus()
    if not cause and (
        cluster.wait_s or gpus_of_cluster(cluster.joins, config.supervision.timeout_s)
    ):
        return config, []
    cause = cause or f"the cluster at {cluster.joins} has no GPU"
    cluster = cluster.model_copy(update={"device": "cpu"})
    note = f"cluster.device: auto is cpu, since {cause}"
    return config.model_copy(update={"cluster": cluster}), [note]


def gpus_of_cluster(address: str, timeout_s: float) -> int:
    """GPUs of all machines that a cluster to join has now. Another process asks.

    StageError if it does not answer within the bound.
    """
    try:
        command = [sys.executable, "-P", "-c", ASK, address]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        cause = f"the cluster at {address!r} did not answer within {timeout_s:g} s how many GPUs it"
        remedy = "check cluster.address, or set cluster.device; supervision.timeout_s is the bound"
        raise StageError("cluster", f"{cause} has", remedy) from error
    found = re.search(r"^GPUs (\d+)$", asked.stdout, re.MULTILINE)
    if found is None:
        last = next((line for line in reversed(asked.stderr.splitlines()) if line.strip()), "")
        cause = f"the cluster at {address!r} did not answer how many GPUs it has: {last.strip()}"
        raise StageError("cluster", cause, JOINING)
    return int(found[1])


def refuse_client(config: RunConfig) -> None:
    """ConfigError if RAY_ADDRESS, which names the cluster to join, names no node of it."""
    address = config.cluster.joins
    if address is not None and "://" in address:
        message = f"RAY_ADDRESS is {address}, which is not host:port of Ray's head"
        remedy = "unset it, set it to host:port on a node of the cluster, or use ray job submit"
        raise ConfigError.of("cluster.address", message, remedy, "the environment")


@dataclass(frozen=True)
class Pool:
    """One role's ``replicas`` engines (or ranks), each on dedicated GPUs.

    It has up to ``beyond`` more where the cluster has room for them. A pool that ``shares`` the
    GPUs of another pool takes none itself. ``together`` of them at a time, one after the other, are
    on one node.
    """

    name: str
    replicas: int
    gpus_per_replica: int
    model: str
    shares: str | None = None
    together: int = 1
    needs: frozenset[str] = frozenset()
    """See ClusterConfig.needs."""
    beyond: int = 0

    @property
    def most(self) -> int:
        """The engines that it has where the cluster has room for all."""
        return self.replicas + self.beyond

    @property
    def count(self) -> str:
        """Its number of engines, or the range of it, in words."""
        return f"{self.replicas}–{self.most}" if self.beyond else str(self.replicas)

    @property
    def gpus(self) -> int:
        """GPUs without which the pool cannot start."""
        return 0 if self.shares else self.replicas * self.gpus_per_replica

    @property
    def term(self) -> str:
        """The pool's GPUs as a term of a sum."""
        own = f"{self.name} {self.replicas}·{self.gpus_per_replica}"
        return f"{self.name} 0 (on {self.shares}'s)" if self.shares else own


def section_of(pool: str) -> str:
    """The config section of a pool's engines or ranks."""
    return "rollout" if pool == EVAL else pool


def pools(config: RunConfig) -> list[Pool]:
    """The pools of a run, with the GPUs that they take if the device is cuda."""
    rollout, train, student = config.rollout, config.train, config.student.model

    def teacher_pool(name: str) -> Pool:
        t, model = config.teachers[name], config.teacher_model(name)
        shares = t.host and (rollout.host or t.host)  # all on the trainer's, if engines are there
        pool = Pool(f"teachers.{name}", t.min_replicas, t.gpus, model, shares)
        return replace(pool, beyond=t.max_replicas - t.min_replicas)

    engines = Pool("rollout", rollout.min_replicas, rollout.tensor_parallel, student, rollout.host)
    evaluating = Pool(EVAL, config.eval.min_replicas, rollout.tensor_parallel, student)
    found = [
        replace(engines, beyond=rollout.max_replicas - engines.replicas),
        *(
            [replace(evaluating, beyond=config.eval.max_replicas - evaluating.replicas)]
            if evaluating.replicas
            else []
        ),
        *map(teacher_pool, config.teachers),
        Pool("train", train.ranks, 1, student, together=train.context_parallel),
    ]
    return [replace(pool, needs=config.cluster.needs(pool.name)) for pool in found]


def sharing(config: RunConfig, gpus: int) -> list[str]:
    """Overrides by which pools share GPUs and all together take at most ``gpus`` of them.

    Teachers' engines move to the student's GPUs, one after the other, then the student's to the
    trainer's; those that cannot move stay. Empty if that is not enough. Memory is not compared.
    """
    moves = [
        (f"teachers.{name}", "rollout")
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EngineTeacher) and teacher.host is None
        if "." not in name  # which would divide the key
    ] + [("rollout", "train")] * (config.rollout.host is None)
    found: list[str] = []
    for pool, host in moves:
        more = [*found, f"{pool}.placement=colocated", f"{pool}.with={host}"]
        try:
            tree = with_overrides(config.model_dump(by_alias=True), more)
            changed = RunConfig.model_validate(tree)
        except (ConfigError, ValueError):
            continue
        if not any(misplaced(changed)):
            found = more
            if sum(one.gpus for one in pools(changed)) <= gpus:
                return found
    return []


def guests_of(config: RunConfig, host: str) -> list[str]:
    """Names of the pools on the GPUs of a pool."""
    return [pool.name for pool in pools(config) if pool.shares == host]


def hosts_of(config: RunConfig, guest: str) -> list[range]:
    """For each replica of a colocated pool, the processes of its host whose GPUs it shares.

    They are as many as have the GPUs that it needs; several next to each other.
    """
    named = {pool.name: pool for pool in pools(config)}
    pool = named[guest]
    assert pool.shares is not None
    span = -(-pool.gpus_per_replica // named[pool.shares].gpus_per_replica)
    return [range(span * at, span * (at + 1)) for at in range(pool.replicas)]


def misplaced(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Pools that cannot be where the config places them: (key, fault, remedy).

    Colocated ones that do not fit the pool whose GPUs they share, and labels or resources of pools
    that have no node of their choice.
    """
    named = {pool.name: pool for pool in pools(config)}
    own = [one.name for one in named.values() if one.shares is None and one.gpus_per_replica]
    for key in ("labels", "resources"):
        for name in sorted(getattr(config.cluster, key).keys() - set(own)):
            fault = "a pool that is not there, or has no processes on dedicated nodes"
            yield f"cluster.{key}.{name}", fault, f"one of {', '.join(own)}"
    for guest in named.values():
        if guest.shares is None:
            continue
        host, taken, gpus = (
            named[guest.shares],
            hosts_of(config, guest.name),
            guest.gpus_per_replica,
        )
        each, span = host.gpus_per_replica, len(taken[0])
        if gpus > each and gpus % each:
            fault = f"{gpus}, which is not the GPUs of several {each} of {host.name}"
            yield f"{guest.name}.tensor_parallel", fault, f"at most {each}, or a multiple of it"
        elif span > host.replicas:
            total = host.replicas * each
            fault = f"{gpus}, but {host.name} has {total} GPUs to share"
            yield f"{guest.name}.tensor_parallel", fault, f"at most {total}"
        elif taken[-1].stop > host.replicas:
            fault = f"{guest.replicas}, but {host.name} has {host.replicas} to share GPUs with"
            fault += f", {span} for each replica" if span > 1 else ""
            yield f"{guest.name}.replicas", fault, f"at most {host.replicas // span}"
