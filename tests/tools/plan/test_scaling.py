"""Bytes and calls of a sample on each arrow, against real messages; the process at its limit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from async_opd.core.batch import MESSAGE_BYTES, Batch
from async_opd.core.samples import Sample
from async_opd.core.scores import TopK
from async_opd.queue.sizes import ITEM_BYTES, rollout_bytes, sample_bytes
from async_opd.tools.plan.scaling import COSTS, Arrow, Load, limits
from tests.conftest import make_rollout

P, R, K = 40, 300, 8
ROLLOUT, SAMPLE = rollout_bytes("teacher_topk", K), sample_bytes("teacher_topk", K)
LOAD = Load(P, R, ROLLOUT, SAMPLE, n=4, scored=16, batch=32, ranks=2)


def arrows(load: Load) -> dict[str, Arrow]:
    return {f"{one.source} → {one.target}": one for one in load.arrows()}


def test_rollouts_and_samples_weigh_on_their_arrows_what_real_ones_do() -> None:
    rollout = make_rollout(tokens=R, prompt_tokens=P)
    sampled, rest = np.zeros(R, np.float32), np.zeros(R, np.float32)
    scores = TopK(np.zeros((R, K), np.int32), np.zeros((R, K), np.float32), sampled, rest)
    found = arrows(LOAD)
    for arrow, item in (
        ("student → queue", rollout),
        ("queue → scorer", rollout),
        ("teacher → scorer", Sample(rollout, scores)),
        ("queue → ranks", Sample(rollout, scores)),
    ):
        (header,) = Batch.pack([item]).headers
        assert header.nbytes <= found[arrow].nbytes <= header.nbytes + ITEM_BYTES


def test_a_call_carries_a_prompts_group_a_teachers_batch_or_a_ranks_part() -> None:
    found = arrows(LOAD)
    assert found["driver → queue"].calls == 1 / 4
    assert found["student → queue"].calls == 1
    assert found["scorer → teacher"].calls == found["scorer → queue"].calls == 1 / 16
    assert found["queue → ranks"].calls == 1 / 16


def test_a_sample_as_large_as_a_message_travels_alone() -> None:
    found = arrows(replace(LOAD, sample_bytes=MESSAGE_BYTES / R))
    assert {found[name].calls for name in ("teacher → scorer", "queue → ranks")} == {1}


def test_a_sample_by_reference_goes_on_as_its_rollout_and_its_scores_from_their_node() -> None:
    by_value, stored = arrows(LOAD), arrows(replace(LOAD, stored_from=1.0))
    rollout = stored["student → queue"].nbytes
    assert {stored[name].nbytes for name in ("scorer → queue", "queue → ranks")} == {rollout}
    moved = stored["teacher → ranks"].nbytes + rollout
    assert moved == pytest.approx(by_value["queue → ranks"].nbytes)
    assert by_value["teacher → ranks"].nbytes == 0
    assert arrows(replace(LOAD, stored_from=1e9)) == by_value


@pytest.mark.parametrize("process", COSTS)
def test_a_process_at_its_limit_takes_one_core_for_what_passes_it(process: str) -> None:
    found = LOAD.arrows()
    mib = sum(one.nbytes for one in found if process in (one.source, one.target)) / 2**20
    cost = COSTS[process]
    assert limits(found)[process] * (cost.sample_ms + cost.mib_ms * mib) == pytest.approx(1000)


def test_the_lowest_limit_comes_first() -> None:
    found = list(limits(replace(LOAD, sample_bytes=1e6).arrows()).values())
    assert found == sorted(found)
