"""Does the pipeline carry many replicas? Simulated ones, over several raylets of this machine.

    python -m benchmarks.scale [--replicas 8 64 256] [--samples N] [--rate R] [--requests N]
    python -m benchmarks.scale --payload MIB … [--samples N]

A Ray cluster of four nodes, each a raylet with an object store, which the run joins: what one node
sends another goes through both stores, by TCP. Real actors, queue, scorer, rollouter, placement,
admission and ledger; the engines only take time, and share a few processes
(``benchmarks.simulated.crowd``). All engines together have the same rate and the same requests in
every case, so that the number of replicas is the only difference: 512 slots of the student,
teachers' batches of 128 in all, a quarter as many replicas of the teacher, batch 256, K = 4, s = 1.

    efficiency          samples/s over the smallest of the rates that the engines could give
    planned             what the planner predicts over what was measured, minus 1
    cpu_ms              a sample's CPU time of driver, queue and scorer
    mib                 bytes of a sample in the queue
    cpu_share           of the machine's cores, used by all its processes

``--payload`` measures two others in place of these: eight replicas, a batch of 8, samples of so
many MiB each, by top-k scores of 512 tokens, at 40 MiB/s; through the queue by value, and by
reference.

    samples_ratio, cpu_ratio   by reference over by value: samples/s, CPU time of queue and scorer

Prints one JSON line last. About 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import psutil
import ray
import uvloop
from ray.cluster_utils import Cluster

from async_opd.cluster import launch_parts
from async_opd.cluster.session import FIRST_WORKERS, TOO_SLOW, environment, ray_folder
from async_opd.processes.own_settings import starting_niceness
from async_opd.processes.reaper import process_reaper
from async_opd.queue.sizes import ITEM_BYTES, NUMBER, sample_bytes
from async_opd.tools.plan.setting import Lengths
from benchmarks.pipeline import PROMPT_TOKENS, Case, mean_length, run
from benchmarks.plan import compare
from benchmarks.simulated.crowd import CrowdedFactory

RATE = 130.0
"""Samples/s of the trainer, the slowest stage, in every case."""
REQUESTS = 512
NODES, STARTS = 4, 5
HOW = ("value", "reference")
STORE_MIB = 256
PAYLOAD_TOKENS, PAYLOAD_MIB_PER_S, PAYLOAD_STORE_MIB = 512, 40.0, 2048


def of_replicas(replicas: int, rate: float, requests: int) -> Case:
    """The case of so many replicas of the student, which have so many requests in all."""
    teachers = max(replicas // 4, 1)
    return Case(
        f"replicas_{replicas}",
        1.0,
        batch=requests // 2,
        rate=rate,
        students=replicas,
        teachers=teachers,
        slots=requests // replicas,
        scored=max(requests // 4 // teachers, 1),
    )


def of_payload(mib: float, payloads: str) -> Case:
    """The case of samples of so many MiB, by ``value`` or by ``reference``."""
    return Case(
        f"payload_{mib:g}_mib_{payloads}",
        1.0,
        sync_steps=1,
        batch=8,
        rate=PAYLOAD_MIB_PER_S / mib,
        top_k=round(mib * 2**20 / (2 * NUMBER * PAYLOAD_TOKENS)),
        warm_up=4,
        lengths=Lengths(PAYLOAD_TOKENS, 0.0, PAYLOAD_TOKENS),
        students=8,
        teachers=2,
        slots=2,
        scored=1,
        payloads=payloads,
    )


@contextmanager
def several_raylets(store_mib: int) -> Iterator[str]:
    """The address of a cluster of ``NODES`` nodes on this machine, which ends with the block.

    As a run's own cluster it is started again where Ray's processes were too slow.
    """
    for left in reversed(range(STARTS)):
        with ExitStack() as starting:
            starting.enter_context(environment({**starting_niceness(), FIRST_WORKERS: "0"}))
            folder = starting.enter_context(ray_folder())
            starting.callback(starting.enter_context(process_reaper(folder.path)).kill_all)
            cluster = Cluster()
            starting.callback(cluster.shutdown)
            starting.callback(ray.shutdown)
            session = {"temp_dir": str(folder.session), "include_dashboard": False}
            try:
                for _ in range(NODES):
                    cluster.add_node(object_store_memory=store_mib << 20, **session)
            except Exception as error:
                if TOO_SLOW not in str(error) or not left:
                    raise
            else:
                started = starting.pop_all()
                break
    with started:
        yield cluster.address


def measured(case: Case, samples: int, store_mib: int) -> dict[str, Any]:
    """Runs one case on a new cluster."""
    with (
        several_raylets(store_mib) as address,
        patch.object(launch_parts, "ActorFactory", CrowdedFactory),
    ):
        began = time.monotonic(), sum(psutil.cpu_times()[:3])
        found = uvloop.run(run(Case(**{**vars(case), "cluster": address}), samples))
        ended = time.monotonic(), sum(psutil.cpu_times()[:3])
    cores = psutil.cpu_count() or 1
    share = (ended[1] - began[1]) / (ended[0] - began[0]) / cores
    each = sample_bytes("teacher_topk", case.top_k) * mean_length(case.lengths)
    nbytes = each + NUMBER * PROMPT_TOKENS + ITEM_BYTES
    planned = compare(case, found)
    print(case.name, found, planned, flush=True)
    names = ("driver", "queue", "scorer")
    keys = ("cpu_ms_per_sample", "cpu_ms_queue", "cpu_ms_scorer")
    return {
        "efficiency": found["efficiency"],
        "planned": planned["error"],
        "samples_per_s": found["samples_per_s"],
        "cpu_ms": {name: found[key] for name, key in zip(names, keys, strict=True)},
        "mib": round(nbytes / 2**20, 3),
        "cpu_share": round(share, 2),
    }


def ratios_of(found: Mapping[str, Any], mib: float) -> dict[str, float]:
    """By reference over by value: samples/s, and CPU time of queue and scorer a sample."""
    value, reference = (found[of_payload(mib, how).name] for how in HOW)

    def cpu_ms(one: Mapping[str, Any]) -> float:
        return float(one["cpu_ms"]["queue"] + one["cpu_ms"]["scorer"])

    return {
        "samples_ratio": round(reference["samples_per_s"] / value["samples_per_s"], 3),
        "cpu_ratio": round(cpu_ms(reference) / cpu_ms(value), 3),
    }


def main() -> None:
    """Runs the cases and prints the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--samples", type=int, default=3072, help="measured of each case")
    parser.add_argument("--rate", type=float, default=RATE, help="samples/s of the trainer")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="that the student runs")
    parser.add_argument("--payload", type=float, nargs="+", metavar="MIB", help="of each sample")
    given = parser.parse_args()
    if given.payload:
        cases = [of_payload(mib, how) for mib in given.payload for how in HOW]
    else:
        cases = [of_replicas(replicas, given.rate, given.requests) for replicas in given.replicas]
    store = PAYLOAD_STORE_MIB if given.payload else STORE_MIB
    found = {case.name: measured(case, given.samples, store) for case in cases}
    ratios = {f"payload_{mib:g}_mib": ratios_of(found, mib) for mib in given.payload or ()}
    print(json.dumps(found | ratios))


if __name__ == "__main__":
    main()
