"""The sections ``queue`` and ``cluster``: what stages share, and where they run."""

from __future__ import annotations

import os
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from async_opd.config.sections.section import Count, Section

VARIABLE = re.compile(r"[A-Za-z_]\w*")
OWNED = re.compile(
    r"(RAY|ASYNC_OPD)_\w*|PYTHONSAFEPATH|CUDA_VISIBLE_DEVICES"
    r"|VLLM_(ENABLE_V1_MULTIPROCESSING|WORKER_MULTIPROC_METHOD)"
)
"""Variables that keep a run's processes working, and safe: no config sets them."""
OF_INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}


MARK = re.compile(r"[\w.:/-]{1,200}")
"""A label's name or value, or a resource's name: Ray reads other characters as operators."""


class QueueConfig(Section):
    """The message queue between the stages. Producers wait while it is full."""

    max_samples: Count = 4096
    """Maximum of samples in a topic, leased ones included."""
    max_mib: Count = 4096
    """Maximum size of a topic in MiB, leased samples included."""
    max_image_mib: Count = 4096
    """Maximum size in MiB of the images of all prompts in flight, which the queue holds beside its
    topics, each image once. Prompts with new images wait for room, but for those that two batches
    need."""
    payloads: Literal["auto", "value", "reference"] = "auto"
    """How samples reach the trainer. ``value``: through the queue, as rollouts do. ``reference``:
    scores stay on their teacher's node, in Ray's object store; scorer and queue carry headers and
    rollouts, and the trainer's ranks fetch from that node. ``auto``: by reference from 1 MiB a
    sample on. Scores of servers always go through the queue. ``max_mib`` counts both."""
    lease_s: float = Field(default=600, gt=0)
    """A stage that does not renew its leases for so long loses their samples to the next one. While
    it lives it renews its leases, however long it works on them."""


class ClusterConfig(Section):
    """The Ray cluster of the run, and the device of its pools."""

    address: str | None = None
    """An existing Ray cluster to join: ``auto``, or ``host:port`` of its head. By default the one
    that RAY_ADDRESS names, which ``ray job submit`` sets; without it a local one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all pools; ``auto``: GPUs if PyTorch can use any; ``gpu`` means ``cuda``. A run
    asks a cluster that it joins, and takes one with ``wait_s`` for a cluster with GPUs."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a GPU in GiB, which ``check`` and ``plan`` compare pools with (docs/memory.md). By
    default what nvidia-smi says on this machine, without what the driver reserves; a check of other
    machines' GPUs needs it (an H100 of 80 GB has 79.1)."""
    interface: str | None = Field(default=None, pattern=r"^[\w.-]{1,15}$")
    """Network interface (``eth0``) on which weight sync and ranks of a joined cluster listen and
    connect; every node needs it. By default the one that has the node's address in Ray. A local run
    listens on the loopback only."""
    ports: str | None = Field(default=None, pattern=r"^\d{4,5}-\d{4,5}$")
    """Ports, as ``20000-20099``, on which the run's own servers listen: the rendezvous of a weight
    sync and that of ranks, on the trainer's node. By default any free port."""

    wait_s: float = Field(default=0, ge=0)
    """Seconds to wait for machines of a joined cluster that are to come: its workers start later,
    or an autoscaler starts them for the GPUs that the run asks for. By default a cluster that has
    too few GPUs is refused at once, and none is asked for while others use them."""

    trainer_recovery: Literal["checkpoint", "replica"] = "checkpoint"
    """Where a trainer that was lost goes on: from the newest checkpoint, or from the newest
    verified weights that a rollout replica has, if they are newer. These have the engines' dtype,
    and the optimizer's moments begin anew; each replica keeps a copy of them in host memory."""

    env: dict[str, str] = Field(default={})
    """Environment variables of all actors of the run, in place of their node's and of those that
    the run sets. Ray shows them to all users of the cluster: secrets are refused."""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the run, which goes to Ray as it is: ``working_dir``,
    ``py_modules``, ``pip`` … bring code of yours to all nodes. Variables are in ``cluster.env``."""

    labels: dict[str, dict[str, str]] = Field(default={})
    """Labels of Ray that a node must have for the processes of a pool: ``{rollout: {market: spot},
    teachers.math: {ray.io/accelerator-type: H100}}``. The pools are ``rollout``, ``eval``,
    ``teachers.NAME`` and ``train``; queue, scorer and rollouter are on the node of ``train``."""
    resources: dict[str, list[str]] = Field(default={})
    """Custom resources of Ray that a node must have for the processes of a pool, as ``ray start
    --resources`` names them: ``{train: [reliable]}``. A process takes 0.001 of each."""

    @property
    def joins(self) -> str | None:
        """The cluster to join: of ``address``, else of RAY_ADDRESS; None for a local one."""
        found = self.address or os.environ.get("RAY_ADDRESS") or "local"
        return None if found == "local" else found

    def needs(self, pool: str) -> frozenset[str]:
        """All that a node must have for the processes of a pool: ``NAME=VALUE`` is a label."""
        labels = (f"{name}={value}" for name, value in self.labels.get(pool, {}).items())
        return frozenset((*labels, *self.resources.get(pool, ())))

    @property
    def port_range(self) -> range | None:
        """The ports of ``ports``; None for any."""
        if self.ports is None:
            return None
        low, high = map(int, self.ports.split("-"))
        return range(low, high + 1)

    @field_validator("device", mode="before")
    @classmethod
    def _gpu_is_cuda(cls, value: Any) -> Any:
        return "cuda" if str(value).lower() in ("gpu", "gpus") else value

    @field_validator("address")
    @classmethod
    def _is_of_a_node(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError("host:port of Ray's head, on a node of it, or use ray job submit")
        return value

    @field_validator("env", mode="before")
    @classmethod
    def _has_texts(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: str(v) if type(v) in (int, float) else v for k, v in value.items()}

    @field_validator("env")
    @classmethod
    def _leaves_ours(cls, value: dict[str, str]) -> dict[str, str]:
        if wrong := sorted(name for name in value if not VARIABLE.fullmatch(name)):
            raise ValueError(f"names of environment variables; {wrong[0]!r} is not one")
        if owned := sorted(name for name in value if OWNED.fullmatch(name)):
            raise ValueError(f"no {owned[0]} here: the run sets it")
        return value

    @field_validator("labels", "resources")
    @classmethod
    def _has_marks(cls, value: dict[str, Any]) -> dict[str, Any]:
        for named in value.values():
            texts = [*named, *named.values()] if isinstance(named, dict) else named
            if wrong := [text for text in texts if not MARK.fullmatch(text)]:
                raise ValueError(f"a label or resource of letters, digits and _.:/-: {wrong[0]!r}")
        return value

    @field_validator("runtime_env")
    @classmethod
    def _has_no_variables(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "env_vars" in value:
            raise ValueError("no env_vars here: cluster.env has the variables of all actors")
        return value

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str | None) -> str | None:
        if value is not None:
            low, high = map(int, value.split("-"))
            if not 1024 <= low <= high <= 65535:
                raise ValueError("two ports from 1024 to 65535, the lower one first")
        return value

    @model_validator(mode="after")
    def _is_of_a_cluster(self) -> Self:
        if self.address is None and (self.labels or self.resources):
            key = "labels" if self.labels else "resources"
            raise ValueError(
                f"'{key}' with 'address' only (auto joins the cluster of RAY_ADDRESS): a local run "
                "has one node"
            )
        if self.interface is not None and self.address is None:
            raise ValueError(
                "'interface' with 'address' only (auto joins the cluster of RAY_ADDRESS): a local "
                "run uses the loopback"
            )
        named = sorted(OF_INTERFACES & self.env.keys())
        if named and (self.interface is not None or self.address is None):
            why = "'interface' sets it" if self.interface else "a local run uses the loopback"
            raise ValueError(f"no {named[0]} in 'env': {why}")
        return self
