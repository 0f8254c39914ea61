"""Which replicas have wrong weights, when they are compared, and what follows; on fakes."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import WeightSyncError, WrongWeights
from async_opd.core.row import Media
from async_opd.processes.members import Member, MemberSet, Policy
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.freshness import (
    FIRST_RATIO,
    MARGIN,
    Evidence,
    Freshness,
    refuse_other_digests,
)
from async_opd.weight_sync.layout import HeldRow, Reference, WeightMeta, held_rows
from tests.world.sync import Receiver, Sender

ROWS = held_rows(100, 128)
UNIT = 0.01
"""Noise of one rounding in nats: noise 1.28 at a rounding of 2^-7."""


def reference() -> Reference:
    """Of rows whose tokens all have a probability of 1/e."""
    logprobs = tuple(np.full(row.compared, -1.0, np.float32) for row in ROWS)
    return Reference(ROWS, logprobs, noise={"text": 1.28}, rounding=2.0**-24)


META = WeightMeta(
    ("norm", "matrix"),
    ("float32", "float32"),
    ((2,), (2, 2)),
    (4, 4),
    digests=("n1", "m1"),
    reference=reference(),
)


def evidence(nats: float = 0.001, **loaded: str) -> Evidence:
    """Of a replica whose log-probabilities differ by so much."""
    logprobs = tuple(np.full(row.compared, -1.0 - nats, np.float32) for row in ROWS)
    return Evidence(logprobs, (loaded or {"norm": "n1", "packed": "p1"},), 2.0**-7)


# ── log-probabilities ──────────────────────────────────────────────────────────────────────────


def test_a_replica_within_rounding_is_fresh_and_the_metric_is_the_largest_difference() -> None:
    verdict = Freshness(1).judge(META, {0: evidence(UNIT), 1: evidence(UNIT / 2)})
    assert verdict.wrong == {}
    assert verdict.metrics["sync/student/1/freshness_nats"] == pytest.approx(UNIT / 2, rel=1e-3)
    assert verdict.metrics["sync/freshness_nats"] == pytest.approx(UNIT, rel=1e-3)


def test_a_first_difference_beyond_any_rounding_means_wrong_weights_and_sets_no_bound() -> None:
    freshness = Freshness(1)
    verdict = freshness.judge(META, {0: evidence(1.1 * FIRST_RATIO * UNIT)})
    assert "differ from the trainer's by 0.352 nats" in str(verdict.wrong[0])
    assert freshness.judge(META, {0: evidence(0.9 * FIRST_RATIO * UNIT)}).wrong == {}


@pytest.mark.parametrize(("nats", "wrong"), [(0.0, []), (1e-6, [0])])
def test_where_rounding_changes_nothing_any_difference_means_wrong_weights(
    nats: float, wrong: list[int]
) -> None:
    exact = replace(META, reference=replace(reference(), noise={"text": 0.0}))
    assert list(Freshness(1).judge(exact, {0: evidence(nats)}).wrong) == wrong


def test_the_first_sync_measures_the_bound_of_the_later_ones() -> None:
    freshness, first = Freshness(1), 2 * UNIT
    freshness.judge(META, {0: evidence(first)})
    assert freshness.judge(META, {0: evidence(0.9 * MARGIN * first)}).wrong == {}
    assert list(freshness.judge(META, {0: evidence(1.1 * MARGIN * first)}).wrong) == [0]


def test_one_rounding_is_never_taken_for_wrong_weights_however_exact_the_first_sync_was() -> None:
    freshness = Freshness(1)
    freshness.judge(META, {0: evidence(0.0)})
    assert freshness.judge(META, {0: evidence(0.99 * UNIT)}).wrong == {}


def test_at_the_first_sync_the_nearest_replica_bounds_the_others() -> None:
    verdict = Freshness(1).judge(META, {0: evidence(UNIT), 1: evidence(5 * UNIT)})
    assert list(verdict.wrong) == [1]


def test_the_bound_grows_with_the_noise_of_the_weights() -> None:
    freshness = Freshness(1)
    freshness.judge(META, {0: evidence(UNIT)})
    noisier = replace(META, reference=replace(reference(), noise={"text": 12.8}))
    assert freshness.judge(noisier, {0: evidence(30 * UNIT)}).wrong == {}


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_log_probabilities_that_are_no_numbers_mean_wrong_weights(broken: float) -> None:
    assert list(Freshness(1).judge(META, {0: evidence(broken)}).wrong) == [0]


def seen(nats_of_text: float, nats_of_image: float) -> tuple[WeightMeta, Evidence]:
    """Of a VLM student, whose last row has an image, and a tenth of the noise of text."""
    media = (Media("00", 1, 1, 1),)
    rows = (*ROWS, HeldRow(np.arange(4, dtype=np.int32), 3, media, b"0"))
    own = tuple(np.full(row.compared, -1.0, np.float32) for row in rows)
    moved = [nats_of_text] * len(ROWS) + [nats_of_image]
    its = tuple((one - by).astype(np.float32) for one, by in zip(own, moved, strict=True))
    made = Reference(rows, own, noise={"text": 1.28, "image": 0.128}, rounding=2.0**-24)
    return replace(META, reference=made), replace(evidence(), logprobs=its)


def test_the_row_with_an_image_is_judged_apart_from_those_of_text() -> None:
    meta, its = seen(0.0, 1.1 * FIRST_RATIO * UNIT / 10)
    verdict = Freshness(1).judge(meta, {0: its})
    assert "of the held row with an image differ from the trainer's by 0.0352 nats" in str(
        verdict.wrong[0]
    )


def test_a_rough_row_with_an_image_does_not_widen_the_bound_of_text() -> None:
    freshness = Freshness(1)
    meta, its = seen(UNIT, 8 * UNIT / 10)
    assert freshness.judge(meta, {0: its}).wrong == {}
    meta, its = seen(1.1 * MARGIN * UNIT, UNIT / 10)
    assert "of held rows differ" in str(freshness.judge(meta, {0: its}).wrong[0])


def test_each_kind_of_rows_has_metrics_of_its_own() -> None:
    meta, its = seen(UNIT, UNIT / 5)
    metrics = Freshness(1).judge(meta, {0: its}).metrics
    assert metrics == pytest.approx(
        {
            "sync/freshness_nats": UNIT,
            "sync/freshness_limit_nats": MARGIN * UNIT,
            "sync/student/0/freshness_nats": UNIT,
            "sync/freshness_image_nats": UNIT / 5,
            "sync/freshness_image_limit_nats": MARGIN * UNIT / 5,
            "sync/student/0/freshness_image_nats": UNIT / 5,
            "sync/learned_parameters": metrics["sync/learned_parameters"],
        },
        rel=1e-3,
    )


def test_of_two_replicas_the_one_with_more_roundings_has_the_wrong_parameters() -> None:
    """The other one is farther in nats: on the row with an image, which is noisier there."""
    freshness = Freshness(1)
    meta, near = seen(UNIT, UNIT / 10)
    freshness.judge(meta, {0: near, 1: near})
    noisy = replace(meta.reference, noise={"text": 1.28, "image": 12.8})  # type: ignore[type-var]
    noisier = replace(meta, reference=noisy, digests=("n1", "m2"))
    _, good = seen(UNIT / 10, 10 * UNIT)
    _, bad = seen(3 * UNIT, UNIT)
    good = replace(good, loaded=({"norm": "n1", "packed": "p2"},))
    bad = replace(bad, loaded=({"norm": "n1", "packed": "p3"},))
    assert list(freshness.judge(noisier, {0: good, 1: bad}).wrong) == [1]


def test_rows_of_other_lengths_mean_wrong_weights() -> None:
    cut = evidence()
    cut = replace(cut, logprobs=cut.logprobs[:-1])
    assert list(Freshness(1).judge(META, {0: cut}).wrong) == [0]


def test_no_replica_is_blamed_for_a_broken_trainer() -> None:
    broken = replace(reference(), noise={"text": float("nan")})
    with pytest.raises(WeightSyncError, match="trainer's own log-probabilities"):
        Freshness(1).judge(replace(META, reference=broken), {0: evidence()})


# ── digests ────────────────────────────────────────────────────────────────────────────────────

SENT = {"norm": "n1", "matrix": "m1"}


@pytest.mark.parametrize(
    ("received", "said"),
    [
        ({}, "norm is missing, matrix is missing"),
        ({"norm": "n1"}, "matrix is missing"),
        ({"norm": "n1", "matrix": "m0"}, "matrix differs"),
        (SENT | {"head": "h"}, "head was not sent"),
    ],
)
def test_other_digests_in_one_worker_mean_wrong_weights(
    received: dict[str, str], said: str
) -> None:
    refuse_other_digests("student/0", META, [SENT, SENT])
    with pytest.raises(WrongWeights, match=f"worker 1 was given other tensors .* sent: {said}"):
        refuse_other_digests("student/0", META, [SENT, received])


def test_a_parameter_that_was_equal_to_the_sent_one_has_to_stay_so() -> None:
    freshness = Freshness(1)
    freshness.judge(META, {0: evidence()})
    later = replace(META, digests=("n2", "m2"))
    assert "other weights than were sent: norm" in str(
        freshness.judge(later, {0: evidence(norm="n1", packed="p2")}).wrong[0]
    )


def test_a_parameter_that_the_engine_keeps_in_another_form_is_not_compared_with_the_sent() -> None:
    freshness = Freshness(1)
    freshness.judge(META, {0: evidence(norm="n1", matrix="transposed")})
    assert freshness.judge(META, {0: evidence(norm="n1", matrix="again")}).wrong == {}


def test_a_parameter_unlike_that_of_the_other_replicas_is_wrong() -> None:
    freshness = Freshness(1)
    same = {index: evidence() for index in range(3)}
    freshness.judge(META, same)
    verdict = freshness.judge(META, same | {1: evidence(norm="n1", packed="p0")})
    assert "differ from those of the other replicas: packed" in str(verdict.wrong[1])
    assert list(verdict.wrong) == [1]


def test_of_two_replicas_the_farther_one_is_the_one_that_differs() -> None:
    freshness = Freshness(1)
    freshness.judge(META, {0: evidence(), 1: evidence()})
    other = evidence(0.002, norm="n1", packed="p0")
    assert list(freshness.judge(META, {0: other, 1: evidence(0.001)}).wrong) == [0]


def test_parameters_that_differ_from_the_first_are_no_weights_and_left_out() -> None:
    freshness = Freshness(1)
    two = {index: evidence(norm="n1", padding=f"garbage {index}") for index in range(2)}
    assert freshness.judge(META, two).wrong == {}
    assert freshness.judge(META, two).wrong == {}


def test_the_trainer_may_not_leave_out_a_tensor_that_it_has_sent_before() -> None:
    freshness = Freshness(1)
    freshness.refuse_other_names(META)
    with pytest.raises(WeightSyncError, match="other tensors than at its first sync: norm is miss"):
        freshness.refuse_other_names(replace(META, names=("matrix",)))


async def test_a_snapshot_without_a_tensor_is_never_sent() -> None:
    world = World(Compared())
    await world.push(1)
    names = replace(META, names=("norm",))
    world.sender.meta = lambda compare: names  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="matrix is missing"):
        await world.sync.snapshot(2)
    assert world.sync.newest[0] == 1


# ── parameters that are never equal to what was sent ───────────────────────────────────────────


def matrix(seed: str) -> str:
    """A digest of a matrix; equal texts are equal weights."""
    return f"bfloat16[4, 4]:{seed}"


def sent_as(**digests: str) -> WeightMeta:
    """``a_b`` stands for the tensor a.b.weight."""
    names = tuple(f"l.{name.replace('_', '.')}.weight" for name in digests)
    return replace(META, names=names, digests=tuple(map(matrix, digests.values())))


def having(**digests: str) -> Evidence:
    """Like ``sent_as``, of the parameters of an engine."""
    return evidence(**{f"l.{n.replace('_', '.')}.weight": matrix(d) for n, d in digests.items()})


FIRST = sent_as(attn_q="q1", attn_k="k1", attn_o="o1")
SECOND = sent_as(attn_q="q2", attn_k="k2", attn_o="o2")


def test_updates_that_all_replicas_ignore_are_found_at_the_second_and_at_once_after_a_rebuild() -> (
    None
):
    freshness = Freshness(1)
    disk = having(attn_qkv="qk0", attn_o="o0")
    assert freshness.judge(FIRST, {0: disk, 1: disk}).wrong == {}
    for meta in (SECOND, replace(SECOND, reference=None)):
        found = freshness.judge(meta, {0: disk, 1: disk}).wrong
        assert sorted(found) == [0, 1]
        assert "change with what was sent: l.attn.o.weight, l.attn.qkv.weight" in str(found[1])


def test_matrices_that_never_followed_are_found_although_learned_ones_follow() -> None:
    freshness = Freshness(1)
    freshness.judge(FIRST, {0: having(attn_qkv="qk0", attn_o="o1")})
    found = freshness.judge(SECOND, {0: having(attn_qkv="qk0", attn_o="o2")}).wrong
    assert "did not change with what was sent: l.attn.qkv.weight" in str(found[0])


@pytest.mark.parametrize("module", ["experts", "experts.routed_experts"])
def test_fused_experts_that_never_followed_are_found(module: str) -> None:
    freshness = Freshness(1)
    name = f"l.mlp.{module}.w13_weight"
    first, second = (sent_as(mlp_experts_0_up=f"u{i}", mlp_gate=f"g{i}") for i in (1, 2))
    engine = {name: "bfloat16[2, 4, 4]:disk", "l.mlp.gate.weight": matrix("g1")}
    freshness.judge(first, {0: evidence(**engine)})
    found = freshness.judge(second, {0: evidence(**engine | {"l.mlp.gate.weight": matrix("g2")})})
    assert f"did not change with what was sent: {name}" in str(found.wrong[0])


def test_a_matrix_of_a_sent_ones_name_and_shape_has_to_change_by_itself() -> None:
    """Its values may be others, such as transposed ones, and an outdated one is never equal."""
    freshness = Freshness(1)
    freshness.judge(FIRST, {0: having(attn_qkv="half 1", attn_o="o1 transposed")})
    followed = {0: having(attn_qkv="half 2", attn_o="o2 transposed")}
    assert freshness.judge(SECOND, followed).wrong == {}
    third = sent_as(attn_q="q3", attn_k="k3", attn_o="o3")
    found = freshness.judge(third, {0: having(attn_qkv="half 3", attn_o="o2 transposed")}).wrong
    assert "did not change with what was sent: l.attn.o.weight" in str(found[0])


def divided(*parts: str) -> Evidence:
    """Workers that have parts of a joined matrix, and of the output's."""
    workers = (having(attn_qkv=part, attn_o=f"o{part}").loaded[0] for part in parts)
    return replace(having(), loaded=tuple(workers))


def test_a_part_of_a_divided_matrix_may_stay_while_that_of_another_worker_changes() -> None:
    freshness = Freshness(1)
    first, second = (
        replace(meta, digests=tuple(d.replace("4, 4", "8, 8") for d in meta.digests))
        for meta in (FIRST, SECOND)
    )
    freshness.judge(first, {0: divided("left 1", "right")})
    assert freshness.judge(second, {0: divided("left 2", "right")}).wrong == {}


def test_experts_that_never_followed_are_found_although_divided_matrices_follow() -> None:
    """The kind of a matrix counts, over all layers and workers."""
    freshness = Freshness(1)
    first, second = (sent_as(attn_q=f"q{i}", mlp_experts_0_up=f"u{i}") for i in (1, 2))
    engine = {"l.attn.qkv.weight": matrix("left 1"), "l.mlp.experts.w13_weight": matrix("disk")}
    freshness.judge(first, {0: evidence(**engine)})
    later = evidence(**engine | {"l.attn.qkv.weight": matrix("left 2")})
    found = freshness.judge(second, {0: later}).wrong
    assert "did not change with what was sent: l.mlp.experts.w13_weight" in str(found[0])


def test_a_matrix_of_which_kernels_use_a_packed_copy_may_stay() -> None:
    freshness, name = Freshness(1), "l.attn.o.weight"
    for meta, now in ((FIRST, "1"), (SECOND, "2")):
        loaded = {name: matrix("as at the start"), f"packed {name}": matrix(f"o{now} transposed")}
        assert freshness.judge(meta, {0: evidence(**loaded)}).wrong == {}


def test_a_matrix_that_every_worker_has_whole_has_to_change_in_each() -> None:
    freshness = Freshness(1)
    freshness.judge(FIRST, {0: divided("left 1", "right 1")})
    found = freshness.judge(SECOND, {0: divided("left 2", "right 1")}).wrong
    assert "did not change with what was sent: l.attn.o.weight" in str(found[0])


@pytest.mark.parametrize("name", ["l.attn.qkv.weight", "packed l.attn.qkv.weight", "l.attn.bias"])
def test_a_parameter_that_is_not_learned_and_disappears_is_found(name: str) -> None:
    freshness = Freshness(1)
    freshness.judge(FIRST, {0: evidence(**having(attn_o="o1").loaded[0], **{name: matrix("qk1")})})
    found = freshness.judge(SECOND, {0: having(attn_o="o2")}).wrong
    assert f"no longer has parameters: {name}" in str(found[0])


def test_a_parameter_that_kernels_begin_to_pack_has_not_disappeared() -> None:
    freshness, name = Freshness(1), "l.attn.qkv.weight"
    freshness.judge(FIRST, {0: evidence(**{name: matrix("qk1")})})
    assert freshness.judge(SECOND, {0: evidence(**{f"packed {name}": matrix("qk2")})}).wrong == {}


def test_scales_of_a_quantized_engine_may_stay_while_its_matrices_change() -> None:
    freshness = Freshness(1)
    for meta, now in ((FIRST, "1"), (SECOND, "2")):
        loaded = {"l.attn.qkv.weight": f"float8_e4m3fn[4, 12]:{now}"}
        loaded["l.attn.qkv.weight_scale"] = "float32[12, 1]:s"
        assert freshness.judge(meta, {0: evidence(**loaded)}).wrong == {}


def test_weights_that_were_quantized_otherwise_are_found_at_the_first_comparison() -> None:
    made = {f"quantized l.o.weight{end}": f"float32[4, 1]:{end}" for end in ("", "_scale")}
    meta = replace(META, quantized=made)
    right = {"l.o.weight": "float32[4, 1]:", "l.o.weight_scale": "float32[4, 1]:_scale"}
    wrong = right | {"l.o.weight_scale": "float32[4, 1]:old"}
    assert Freshness(1).judge(meta, {0: evidence(**right)}).wrong == {}
    found = Freshness(1).judge(meta, {0: evidence(**wrong)}).wrong
    assert "its engine quantized other weights than were sent" in str(found[0])
    assert "l.o.weight_scale" in str(found[0])


def test_an_engine_that_keeps_its_quantized_matrices_in_another_form_is_not_proved() -> None:
    """Its scales alone prove nothing."""
    sent = {"weight": "float8_e4m3fn[4, 1]:w", "weight_scale": "float32[4, 1]:s"}
    meta = replace(META, quantized={f"quantized l.o.{name}": one for name, one in sent.items()})
    packed = {"l.o.weight_packed": "int32[1]:w", "l.o.weight_scale": "float32[4, 1]:s"}
    found = Freshness(1).judge(meta, {0: evidence(**packed)}).wrong
    assert "keeps no matrix as the trainer quantizes it" in str(found[0])


def test_other_weights_in_the_form_of_the_trainers_are_named() -> None:
    meta = replace(META, quantized={"quantized l.o.weight": "float8_e4m3fn[4, 1]:new"})
    found = Freshness(1).judge(meta, {0: evidence(**{"l.o.weight": "float8_e4m3fn[4, 1]:old"})})
    assert "quantized other weights than were sent" in str(found.wrong[0])


def test_matrices_that_stay_while_what_is_sent_for_them_stays_are_fresh() -> None:
    """A frozen attention, and a trained norm."""
    freshness = Freshness(1)
    frozen = {"attn_q": "q", "attn_k": "k"}
    freshness.judge(sent_as(**frozen, norm="n1"), {0: having(attn_qkv="qk", norm="n1")})
    later = freshness.judge(sent_as(**frozen, norm="n2"), {0: having(attn_qkv="qk", norm="n2")})
    assert later.wrong == {}


def test_a_scale_that_the_engine_adds_may_stay_as_it_is() -> None:
    freshness = Freshness(1)
    for meta, now in ((FIRST, "o1"), (SECOND, "o2")):
        loaded = {"l.attn.o.weight": matrix(now), "l.attn.core.k_scale": "float32[]:one"}
        assert freshness.judge(meta, {0: evidence(**loaded)}).wrong == {}


def test_the_sync_after_the_first_is_due_if_matrices_are_not_learned() -> None:
    freshness, due = Freshness(100), []
    for meta, qk in ((FIRST, "half 1"), (SECOND, "half 2")):
        due.append(freshness.due())
        freshness.judge(meta, {0: having(attn_qkv=qk)})
    due.append(freshness.due())
    assert due == [True, True, False]


# ── when ───────────────────────────────────────────────────────────────────────────────────────


def test_the_first_sync_and_every_nth_after_it_are_compared() -> None:
    freshness, due = Freshness(3), []
    for _ in range(8):
        due.append(freshness.due())
        if due[-1]:
            freshness.judge(META, {0: evidence()})
    assert due == [True, False, False, True, False, False, True, False]


@pytest.mark.parametrize("found", [None, evidence(np.inf)], ids=["not compared", "wrong weights"])
def test_a_sync_without_a_comparison_or_with_wrong_weights_leaves_the_next_one_due(
    found: Evidence | None,
) -> None:
    freshness = Freshness(3)
    freshness.due()
    if found is not None:
        freshness.judge(META, {0: found})
    assert freshness.due()


# ── the sync ───────────────────────────────────────────────────────────────────────────────────


class Comparing(Sender):
    """Snapshots that are due have a reference."""

    def meta(self, compare: bool) -> WeightMeta:
        return META if compare else replace(META, reference=None)


class Compared(Receiver):
    """A replica: ``nats`` from the trainer; ``altered`` on its way, or silent."""

    def __init__(
        self, nats: float = 0.0, altered: bool = False, silent: bool = False, **loaded: str
    ):
        super().__init__()
        self.nats, self.altered, self.silent, self.loaded = nats, altered, silent, loaded
        self.asked: list[bool] = []  # whether it was paused then

    async def receive(self, meta: WeightMeta) -> None:
        if self.altered:
            raise WrongWeights("student", "worker 0 was given other tensors")

    async def evidence(self, rows: Any) -> Evidence:
        self.asked.append(self.paused)
        if self.silent:
            await asyncio.Event().wait()
        return evidence(self.nats, **self.loaded)


class World:
    """A sync to receivers, compared every second time."""

    def __init__(
        self, *receivers: Compared, on_wrong_weights: Any = "rebuild", every: int = 2
    ) -> None:
        named = {f"student/{index}": one for index, one in enumerate(receivers)}
        policy = Policy[Any](supervision=SupervisionConfig(max_restarts=1))
        self.members: MemberSet[Any] = MemberSet("rollout", named, policy)
        self.sender = Comparing()
        self.sync = BroadcastSync(
            self.sender,
            self.members,
            [1] * len(receivers),
            on_sync="keep",
            timeout_s=0.2,
            freshness=Freshness(every, on_wrong_weights),
        )

    async def push(self, version: int = 1) -> dict[str, float]:
        await self.sync.snapshot(version)
        return (await self.sync.push()).metrics

    async def rejoin(self, newcomer: Compared) -> None:
        """Member 0 is rebuilt. Raises why it is not."""

        async def rebuild(member: Member[Any]) -> Compared:
            await self.sync.rejoin(member.index, newcomer, 1)
            return newcomer

        self.members.policy = Policy[Any](
            supervision=SupervisionConfig(max_restarts=1), rebuild=rebuild, needed=99
        )
        member = self.members.all[0]
        self.members.fail(member, member.incarnation, RuntimeError("it died"))
        await self.members.mend(member)


async def test_replicas_are_asked_while_they_generate_at_the_syncs_that_are_due() -> None:
    receiver = Compared()
    world = World(receiver)
    for version in range(3):
        metrics = await world.push(version)
    assert world.sender.compared == [True, False, True]
    assert receiver.asked == [False, False]
    assert metrics["sync/wrong_weights"] == 0


@pytest.mark.parametrize(
    ("fault", "cause"), [({"nats": 9.0}, "by 9 nats"), ({"altered": True}, "other tensors")]
)
async def test_with_wrong_weights_a_replica_is_ejected_with_the_cause_and_others_go_on(
    fault: Any, cause: str
) -> None:
    wrong = Compared(**fault)
    world = World(Compared(), wrong)
    metrics = await world.push()
    assert [member.name for member in world.members.serving] == ["student/0"]
    assert cause in str(world.members["student/1"].failure)
    assert metrics["sync/wrong_weights"] == 1
    assert wrong.paused == wrong.altered  # one that was given other tensors is never resumed


@pytest.mark.parametrize("fault", [{"nats": 9.0}, {"altered": True}])
async def test_with_stop_a_replica_with_wrong_weights_ends_the_run(fault: Any) -> None:
    world = World(Compared(), Compared(**fault), on_wrong_weights="stop")
    with pytest.raises(WrongWeights, match="student"):
        await world.push()


async def test_a_replica_that_scores_no_rows_in_time_is_ejected_but_not_for_wrong_weights() -> None:
    world = World(Compared(), Compared(silent=True), on_wrong_weights="stop")
    metrics = await world.push()
    assert "no new token for 0.2 s" in str(world.members["student/1"].failure)
    assert metrics["sync/wrong_weights"] == 0


async def test_one_that_rejoins_is_compared_before_it_serves() -> None:
    world, newcomer = World(Compared(), Compared()), Compared(nats=9.0)
    await world.push()
    with pytest.raises(WrongWeights):
        await world.rejoin(newcomer)
    assert newcomer.asked == [False]
    assert [member.name for member in world.members.serving] == ["student/1"]


async def test_with_stop_who_rejoins_with_wrong_weights_ends_the_run_at_the_next_sync() -> None:
    world = World(Compared(), Compared(), on_wrong_weights="stop")
    await world.push(1)
    with pytest.raises(WrongWeights):
        await world.rejoin(Compared(nats=9.0))
    with pytest.raises(WrongWeights, match="by 9 nats"):
        await world.push(2)


async def test_with_stop_who_rejoins_and_does_not_answer_does_not_end_the_run() -> None:
    world = World(Compared(), Compared(), on_wrong_weights="stop")
    await world.push(1)
    with pytest.raises(WeightSyncError):
        await world.rejoin(Compared(silent=True))
    assert (await world.push(2))["sync/wrong_weights"] == 0


async def test_heartbeats_go_on_while_digests_are_compared() -> None:
    """``judge`` waits here until the event loop has run something else."""
    world, beat = World(Compared()), threading.Event()
    await world.sync.snapshot(1)
    freshness = world.sync._freshness
    judge, waited, loop = freshness.judge, [], asyncio.get_running_loop()

    def waiting(*given: Any) -> Any:
        loop.call_soon_threadsafe(beat.set)
        waited.append(beat.wait(5.0))
        return judge(*given)

    freshness.judge = waiting  # type: ignore[method-assign]
    await world.sync.push()
    assert waited == [True]


async def test_the_sync_after_a_rejoin_without_a_comparison_is_due() -> None:
    world = World(Compared(), every=100)
    await world.push(1)
    await world.push(2)
    await world.rejoin(Compared(nats=9.0))  # nobody has the trainer's rows any more
    await world.push(3)
    assert world.sender.compared == [True, False, True]
    assert "by 9 nats" in str(world.members.all[0].failure)


async def test_one_that_rejoins_without_a_comparison_of_rows_has_its_parameters_compared() -> None:
    world = World(Compared(), every=100)
    await world.push(1)
    await world.push(2)
    with pytest.raises(WrongWeights, match="other weights than were sent: norm"):
        await world.rejoin(Compared(norm="n0", packed="p1"))
