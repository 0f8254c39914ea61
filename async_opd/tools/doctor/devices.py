"""The devices of a run, and the pools on them."""

from __future__ import annotations

from collections.abc import Iterator

from async_opd.checks.resources import pools
from async_opd.config.run_config import RunConfig
from async_opd.models.engine_args import Device
from async_opd.tools.doctor.finding import Finding

TOPIC = "devices"


def devices(config: RunConfig, device: Device, gpus: int) -> Iterator[Finding]:
    """A line for the device, and one for each pool. ``gpus``: GPUs of this machine."""
    where = "of this machine" if config.cluster.joins is None else "of the cluster's driver"
    asked = ""
    if config.cluster.joins is not None and config.cluster.device == "auto":
        asked = " if the cluster has GPUs, which is asked when engines start"
    yield Finding(TOPIC, "ok", f"all pools compute on {device}{asked}; GPUs {where}: {gpus}")
    if device == "cpu" and gpus:
        message = f"cluster.device is cpu, and {gpus} GPUs are not used"
        yield Finding(TOPIC, "warning", message, "set cluster.device to auto")
    for pool in pools(config):
        each = f"{pool.gpus_per_replica} GPU each" if device == "cuda" else "CPU"
        each += f", those of {pool.shares}" if pool.shares else ""
        what = "ranks" if pool.name == "train" else "replicas"
        yield Finding(TOPIC, "ok", f"{pool.name}: {pool.replicas} {what}, {each}, {pool.model}")
