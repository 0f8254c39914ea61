"""Where the processes of a run listen, and the environment that all of them have in common."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import ray

from async_opd.config.secrets import without_secret_variables
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.models.engine_args import LOOPBACK
from async_opd.processes.listening import interface_address, interface_of

SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "HF_")
SHARED_NAMES = {
    "VLLM_NCCL_SO_PATH",
    *(f"{scheme}_proxy" for scheme in ("http", "https", "all", "no")),
    *(f"{scheme}_PROXY" for scheme in ("HTTP", "HTTPS", "ALL", "NO")),
}
"""Variables of the driver that every process of a joined cluster gets, beside ``SHARED_PREFIXES``.

The trainer and the engines form one NCCL communicator, in which all have to have the same settings
(``NCCL_CUMEM_ENABLE``). vLLM 0.32 changes some of them for its own communicators only
(``vllm.utils.nccl.unpinned_nccl_env``).
"""


def own_address(cluster: ClusterConfig) -> str:
    """The address of this process's node, at which the others of the run reach it.

    It is Ray's: the host's name may resolve to 127.0.1.1. StageError if the node has no
    interface ``cluster.interface``.
    """
    if cluster.address is None:
        return "127.0.0.1"
    if cluster.interface is not None:
        return interface_address(cluster.interface)
    return str(ray.util.get_node_ip_address())


def shared_environment(cluster: ClusterConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all processes of a run get; ``environ`` is the driver's environment.

    Processes of a local run inherit ``environ``. In a joined cluster they inherit their node's, so
    they get the variables named above, except secrets: Ray shows a process's variables to all users
    of the cluster. Those of ``cluster.env`` come in their place.
    """
    if cluster.address is None:
        return {**cluster.env, **LOOPBACK}
    named = {name: value for name, value in environ.items() if _is_shared(name)}
    shared = {**without_secret_variables(named), **cluster.env}
    if cluster.interface is not None:
        shared |= _named(cluster.interface)
    return shared


def name_interface(environ: MutableMapping[str, str]) -> None:
    """Makes gloo and NCCL of this process use the interface that has its node's address in Ray.

    Otherwise gloo would listen where the host's name resolves to: on Debian on the loopback. Values
    that ``environ`` has already stay, as in a local run. StageError if no interface has the
    address.
    """
    unset = [name for name in LOOPBACK if not environ.get(name)]
    if unset:
        named = _named(interface_of(str(ray.util.get_node_ip_address())))
        environ.update((name, named[name]) for name in unset)


def _named(interface: str) -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",  # without "=" it is a prefix
    }


def _is_shared(name: str) -> bool:
    return name in SHARED_NAMES or name.startswith(SHARED_PREFIXES)
