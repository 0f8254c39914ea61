"""The bytes and the time of the hand-out of samples to the trainer's ranks.

    queue actor ──headers──► this process, rank 0: HandOut ──Share──► actors, ranks 1 … N-1
         └──each rank's own samples──► every rank

The classes of a run, in separate processes, without a student: batches of samples with scores
of the top 64 are assigned one after the other, and nothing is computed meanwhile, so that all of
the hand-out's time shows. All samples are in the queue before.

    payload_mib   of a step's samples
    rank_0        bytes that enter and leave rank 0's process in a step, pickled, over the payload
    beside_own    the same without the samples that rank 0 computes: headers, shares, answers
    hand_out_s    median seconds of a step's hand-out; bytes are counted in separate steps

``python -m benchmarks.hand_out`` prints one JSON object last, with a row for each number of ranks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from async_opd.cluster.proxies import QueueProxy
from async_opd.cluster.remote import Remote
from async_opd.cluster.trainer_actor import RemoteRankGroup
from async_opd.core.batch import Batch
from async_opd.core.samples import Header
from async_opd.core.stages import SCORED
from benchmarks.local_ray import on_local_ray
from benchmarks.queue import Case, sample
from trainer.batcher import Batcher
from trainer.batches.micro_batches import assign_micro_batches
from trainer.batches.micro_batches import planned as planned_of
from trainer.batches.packing import Vocabularies
from trainer.batches.shares import HandOut, Plan
from trainer.batches.token_weights import TokenWeighting
from trainer.follower import Follower
from trainer.rank import BackwardResult
from trainer.rank_group import dispatched

VOCABULARY, ROW_TOKENS, BOUND_S = 150_000, 16384, 120.0


class NoStudent:
    """In a rank's place: it computes nothing."""

    vocabularies = Vocabularies(VOCABULARY)
    sight = None

    @property
    def student(self) -> NoStudent:
        """Where a follower finds both."""
        return self

    def backward(self, micro_batches: Sequence[Any], *given: Any) -> BackwardResult:
        """Lets the micro-batches go."""
        return BackwardResult({}, 0.0)


def follower(queue: QueueProxy) -> Follower:
    """The follower of a rank without a student; built in its actor."""
    rank: Any = NoStudent()
    return Follower(rank, queue)


class Planner:
    """The learner's division of a batch over ranks by tokens, without a learner."""

    vocabularies = NoStudent.vocabularies

    def __init__(self, ranks: int) -> None:
        self._ranks, self._weighting = ranks, TokenWeighting()

    def plan(self, headers: Sequence[Header]) -> Plan:
        """See Learner.plan."""
        weights, rewards = self._weighting(headers)
        counted = list(range(len(headers)))
        groups = assign_micro_batches([one.tokens for one in headers], ROW_TOKENS, self._ranks)
        planned = [[planned_of(headers, weights, g, counted) for g in own] for own in groups]
        return Plan(tuple(headers), tuple(map(tuple, planned)), tuple(counted), rewards)


class Counted:
    """Counts the pickled bytes of all calls and answers of a queue, if ``counts``."""

    def __init__(self, queue: QueueProxy) -> None:
        self._queue, self.counts, self.nbytes = queue, False, 0

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **named: Any) -> Any:
            answer = await getattr(self._queue, name)(*args, **named)
            self.count((args, named, answer))
            return answer

        return call

    def count(self, value: Any) -> None:
        """Adds the bytes of a message."""
        if self.counts:
            self.nbytes += len(pickle.dumps(value, protocol=5))


class CountedRanks(RemoteRankGroup):
    """Counts the bytes of what the other ranks are sent, and answer, by ``counted``."""

    counted: Counted

    def dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Callable[[], list[Any]]:
        """See RankGroup.dispatch."""
        answers = super().dispatch(method, arguments)

        def call() -> list[Any]:
            found = answers()
            self.counted.count((arguments, found))
            return found

        return call


async def one_size(ranks: int, case: Case, steps: int) -> dict[str, float]:
    """Medians over ``steps`` timed steps, after one; bytes of as many steps after them."""
    queue_actor = Remote.create("queue", timeout_s=BOUND_S)
    room = (2 * steps + 2) * case.batch
    limits = ((SCORED,), room, 8 << 30, 600.0)
    await queue_actor.build("async_opd.queue.message_queue:MessageQueue", limits, BOUND_S)
    queue = Counted(QueueProxy(queue_actor))
    actors = [Remote.create(f"rank_{rank}", timeout_s=BOUND_S) for rank in range(1, ranks)]
    for actor in actors:
        await actor.build("benchmarks.hand_out:follower", (QueueProxy(queue_actor),), BOUND_S)
    for start in range(0, room, case.batch):
        made = [sample(case, start + index) for index in range(case.batch)]
        for batch in Batch.packed(made):
            await queue.put(SCORED, batch)
    group = CountedRanks(actors)
    group.counted = queue
    reader: Any = queue
    batcher = Batcher(reader, batch_size=case.batch, payloads=False)
    hand_out = HandOut(batcher, Planner(ranks), group)
    seconds: list[float] = []
    payload = own = 0
    for step in range(2 * steps + 1):
        queue.counts = step > steps
        started = time.perf_counter()
        now = await asyncio.wait_for(hand_out._assign(), BOUND_S)  # nothing is assigned ahead
        assert batcher.commit(now.batch, 0)
        if 0 < step <= steps:
            seconds.append(time.perf_counter() - started)
        if queue.counts:
            payload += sum(header.nbytes for header in now.batch.headers)
            computed = (i for one in now.plan.micro_batches[0] for i in one.indices)
            own += sum(now.batch.headers[index].nbytes for index in computed)
        await batcher.done()
        await asyncio.to_thread(_freed, group, now.number)
    batcher.close()
    for actor in (*actors, queue_actor):
        actor.kill()
    return {
        "payload_mib": round(payload / steps / 2**20, 2),
        "rank_0": round(queue.nbytes / payload, 4),
        "beside_own": round((queue.nbytes - own) / payload, 4),
        "hand_out_s": round(statistics.median(seconds), 4),
    }


def _freed(group: RemoteRankGroup, number: int) -> None:
    """The other ranks let their samples of a step go, as after its backward pass."""
    with dispatched(group, "backward", [(number,)] * (group.ranks - 1)) as results:
        results()


async def measure(ranks: Sequence[int], case: Case, steps: int) -> dict[str, Any]:
    """A row for each number of ranks."""
    found = {}
    for count in ranks:
        found[str(count)] = await one_size(count, case, steps)
        print(count, found[str(count)], flush=True)
    return found


def main() -> None:
    """Measures on a local Ray cluster."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("tokens", 2048), ("k", 64), ("batch", 32), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    given = parser.parse_args()
    case = Case(given.tokens, given.k, given.batch, 0)
    print(json.dumps(on_local_ray(measure(given.ranks, case, given.steps))))


if __name__ == "__main__":
    main()
