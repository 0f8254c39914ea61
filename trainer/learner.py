"""The learner: one batch of samples, one optimizer step, on one rank or several.

    headers ──token_weights──► weight of each token ──┐
       └──assign_micro_batches──► each rank's indices ┴─► rank 0 … N-1: backward ──► sums, norm
                                                                                         │ finite?
                                                          rank 0 … N-1: apply ◄──────────┘

The learner decides and the ranks compute (``trainer.rank``). Token weights divide by totals of the
whole batch (``batches/token_weights.py``), so that the gradient does not depend on how the batch is
split. Logits exist for one chunk of response rows at a time (``losses/chunked.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from async_opd.core.errors import StageError
from async_opd.core.samples import Header, Sample
from async_opd.weight_sync.layout import HeldRow, Reference
from trainer.batches.balance import Balance, Balancing
from trainer.batches.batch_metrics import batch_metrics, masked_shares, repetition
from trainer.batches.micro_batches import Groups, MicroBatch, assign_micro_batches
from trainer.batches.micro_batches import planned as planned_of
from trainer.batches.packing import Vocabularies, refuse_foreign_tokens, refuse_mixed_scores
from trainer.batches.shares import Plan, hand_over
from trainer.batches.token_weights import TokenWeighting
from trainer.losses.mismatch import mismatch
from trainer.losses.report import not_finite, step_metrics
from trainer.notes import drain_notes
from trainer.rank import Rank
from trainer.rank_group import SINGLE_RANK, AllRanks, RankGroup, dispatched
from trainer.replay.keeper import Keeping
from trainer.saving.export import export_dtype, fault_of_saving
from trainer.saving.state import Files, TrainerState
from trainer.utilization import memory_metrics, utilization
from trainer.vision.images import Images, Samples

if TYPE_CHECKING:
    from async_opd.config.sections.train import TrainConfig

CPU_ROW_TOKENS = 512
"""Longest packed row on a CPU. Attention of whole rows is quadratic in them and computes what the
mask hides too; a longer row would keep no processor busier."""


def learning_rate(step: int, train: TrainConfig) -> float:
    """The rate of step ``step`` (0-based): linear warm-up, then constant or a cosine to the end.

    The first step of a warm-up has lr / warmup_steps. With a cosine the last step (steps - 1) has
    lr · min_lr_ratio, if at least two steps follow the warm-up.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.lr
    span = max(train.steps - 1 - train.warmup_steps, 1)
    progress = min((step - train.warmup_steps) / span, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * cosine)


@dataclass(frozen=True)
class LearnerReport:
    """Metrics of one step; ``skipped`` is the reason if the step changed no weights, else empty.

    ``notes`` are the first rank's lines for the run's log.
    """

    metrics: dict[str, float]
    skipped: str = ""
    notes: tuple[str, ...] = ()


class Learner:
    """Owns rank 0, and has the other ranks of its group do the same as rank 0."""

    def __init__(
        self,
        rank: Rank,
        token_weights: TokenWeighting | None = None,
        rank_group: RankGroup = SINGLE_RANK,
    ) -> None:
        """By default every token weighs 1 / (tokens of the batch)."""
        self._rank, self._rank_group, self.sight = rank, rank_group, rank.student.sight
        self._ranks = AllRanks(rank, rank_group)
        self._state = TrainerState(self._ranks, rank.model)
        self._balancing = Balancing(token_weights or TokenWeighting())
        self._train, self._sharing = rank.train, rank.train.context_parallel
        most = rank.train.tokens_per_micro_batch
        self._row_tokens = min(most, CPU_ROW_TOKENS) if rank.device.type == "cpu" else most
        self.lr_factor = 1.0  # of the rates of ``train``
        self.version = 0  # the trainer's weight version in the next step
        self.unchanged = True  # whether no step has changed the weights since they got it
        self.comparable = True  # whether samples have the probabilities that the student gave
        self._keeping = Keeping(partial(self._ranks.each, "keep"))
        self._step = self._skipped = self._consecutive_skips = 0

    @property
    def model(self) -> Any:
        """The student; where it is sharded, rank 0's shard."""
        return self._rank.model

    @property
    def vocabularies(self) -> Vocabularies:
        """Rows of the student's head and of those that it shares with teachers'."""
        return self._rank.student.vocabularies

    @property
    def computed_tokens(self) -> int:
        """Tokens that rank 0 has computed since the start; grows with each micro-batch."""
        return self._rank.tokens

    def free_cache(self) -> None:
        """Returns the GPU memory that torch caches, for other processes on the same GPUs."""
        self._ranks.each("free_cache")

    def offload(self) -> None:
        """Moves weights and optimizer of all ranks to host memory; see Rank.offload."""
        self._ranks.each("offload")

    def onload(self) -> None:
        """Moves them back to the ranks' devices, for the next step."""
        self._ranks.each("onload")

    def train_batch(self, samples: Sequence[Sample], images: Images = None) -> LearnerReport:
        """One optimizer step, or an error that leaves weights, optimizer and step as they were.

        A loss or gradient norm that is not finite, or a metric that is NaN, is a StageError; under
        ``train.on_nonfinite: skip`` the step is counted and the report's ``skipped`` names the
        cause. StageError for a token outside the student's vocabulary. TypeError for scores of
        several kinds, even if no micro-batch would mix them. A batch without any response token has
        loss 0 and changes no weight, but is a step.
        """
        plan = self.plan([sample.header for sample in samples])
        refuse_foreign_tokens(samples, self.vocabularies)
        own = hand_over(plan, samples, images, self._rank_group)
        return self.train(plan, own, sum(repetition(sample.rollout) for sample in samples))

    def train(
        self, plan: Plan, own: Sequence[MicroBatch], repeated: float, number: int | None = None
    ) -> LearnerReport:
        """The step on a planned batch, of which rank 0 has its ``own`` micro-batches.

        The other ranks have theirs by the batch's ``number`` (see Follower.fetch). ``repeated`` is
        the sum of the responses' repetition. For the rest see ``train_batch``.
        """
        started = time.perf_counter()
        rate = learning_rate(self._step, self._train) * self.lr_factor
        weighting = self._balancing.weighting
        oldest = weighting.oldest(self.version)
        factors = self._balancing.factors(plan.headers, oldest)
        plan = replace(plan, factors=factors, oldest=oldest)
        unchanged = self.unchanged
        means, norm, fault = self._compute(plan, own, rate, number)
        recorded = self._recorded(fault)
        if fault:
            self._skip(fault, [plan.headers[i] for i in plan.counted])
        else:
            self._consecutive_skips = 0
        self._step += 1
        seconds, flops = time.perf_counter() - started, plan.flops(self._rank)
        metrics = {
            **means,
            **self._balancing.trained(means, fault),
            **weighting.masked(plan.headers, oldest),
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/skipped_steps": float(self._skipped),
            "train/micro_batches": float(sum(map(len, plan.micro_batches))),
            "train/compute_s": seconds,
            "train/repetition": repeated / max(len(plan.headers), 1),
            **utilization(flops, seconds, self._rank_group.ranks, self._rank.peak_tflops),
            **recorded,
        }
        metrics |= batch_metrics(plan.headers, self._train.tokens_per_micro_batch)
        notes = drain_notes()
        if self._rank.keeper is not None:
            given = plan.headers, metrics, self.lr_factor, fault, unchanged
            kept = self._keeping.keep(self._step, *given)
            metrics, notes = metrics | kept[0], notes + kept[1]
        return LearnerReport(metrics, fault, notes)

    def train_again(self, plan: Plan, samples: Samples) -> LearnerReport:
        """The step on a planned batch; rank 0 has the samples, by index, of all micro-batches."""
        return self.train(plan, hand_over(plan, samples, None, self._rank_group), 0.0)

    def compared(
        self, what: Literal["platform", "weight_digests", "student.kernels", "flush_records"]
    ) -> list[Any]:
        """Each rank's answer of this method of Rank, or of its student."""
        return self._ranks.each(what)

    def plan(self, headers: Sequence[Header], supervised: bool = False) -> Plan:
        """Which rank computes what of a batch. TypeError for scores of several kinds."""
        refuse_mixed_scores(header.scores for header in headers)
        weighting = TokenWeighting() if supervised else self._balancing.weighting
        token_weights, rewards = weighting(headers)
        counted = [i for i, one in enumerate(token_weights) if one.weight or one.reward_weight]
        groups = self._groups(headers, counted)
        planned = [[planned_of(headers, token_weights, g, counted) for g in own] for own in groups]
        made = [tuple(replace(one, supervised=supervised) for one in own) for own in planned]
        return Plan(tuple(headers), tuple(made), tuple(counted), rewards)

    def supervise(
        self, samples: Sequence[Sample], rate: float, images: Images = None
    ) -> dict[str, float]:
        """One step on the mean cross entropy of the response tokens, which counts as no step.

        StageError, without a change of weights, for a loss or gradient norm that is not finite.
        """
        refuse_foreign_tokens(samples, self.vocabularies)
        self.unchanged, started = False, time.perf_counter()
        plan = self.plan([sample.header for sample in samples], supervised=True)
        own = hand_over(plan, samples, images, self._rank_group)
        means, norm, fault = self._compute(plan, own, rate)
        if fault:
            raise StageError("trainer", f"a cold start's step: {fault}", "lower cold_start.lr")
        return {
            "loss": means["loss/total"],
            "grad_norm": norm,
            "response_tokens": float(sum(len(one.rollout.response_ids) for one in samples)),
            "compute_s": time.perf_counter() - started,
        }

    def forget_moments(self) -> None:
        """Resets every rank's optimizer; see Rank.forget_moments."""
        self._ranks.each("forget_moments")

    def _compute(
        self, plan: Plan, own: Sequence[MicroBatch], rate: float, number: int | None = None
    ) -> tuple[dict[str, float], float, str]:
        """Gradients, and the optimizer step if they are finite: metrics, gradient norm, fault.

        After an error rank 0 holds no gradients. The other ranks may, so that the group is broken.
        """
        group = self._rank_group
        try:
            version = self.version if self.unchanged and self.comparable else None
            how = plan.factors, version, plan.oldest
            with dispatched(group, "backward", [(number, *how)] * (group.ranks - 1)) as results:
                computed = [self._rank.backward(own, *how), *results()]
            means = step_metrics([one.sums for one in computed])
            moves = len(means) > 1  # of no tokens there is a total of 0 alone
            means |= plan.rewards | masked_shares([one.turns for one in computed])
            means |= mismatch([one.gaps for one in computed], self._sharing)
            fault = not_finite(means, computed[0].norm)
            moved = rate if moves and not fault else None
            means |= memory_metrics(self._ranks.each("apply", moved))
            self.unchanged = self.unchanged and moved is None
        except BaseException:
            group.mark_broken()
            self._rank.apply(None)
            raise
        return means, computed[0].norm, fault

    def _recorded(self, fault: str) -> dict[str, float]:
        """Has all ranks write what they recorded of the step; metrics, none without a recorder."""
        if self._rank.recorder is None:
            return {}
        counts = self._ranks.each("record", self._step + 1, self.version, fault)
        return {name: sum(one[name] for one in counts) for name in counts[0]}

    def _groups(self, headers: Sequence[Header], counted: Sequence[int]) -> list[Groups]:
        """The indices of each micro-batch of each group of ranks that share rows.

        Several ranks compute no sample without a response: no loss depends on it.
        """
        ranks = self._rank_group.ranks
        some = [i for i in counted if ranks == 1 or headers[i].response_tokens]
        lengths = [headers[i].tokens for i in some]
        costs = [self._rank.cost(headers[i]) for i in some]
        assigned = assign_micro_batches(lengths, self._row_tokens, ranks // self._sharing, costs)
        return [[[some[i] for i in group] for group in groups] for groups in assigned]

    def _skip(self, fault: str, headers: Sequence[Header]) -> None:
        """Counts a step that changed no weights. StageError if ``train`` allows no more of them."""
        train = self._train
        self._consecutive_skips += 1
        if train.on_nonfinite == "skip" and self._consecutive_skips <= train.max_skipped:
            self._skipped += 1
            return
        before = f", after {train.max_skipped} skipped steps" if self._consecutive_skips > 1 else ""
        uids = ", ".join(header.uid for header in headers)
        raise StageError(
            "trainer",
            f"step {self._step}{before}: {fault}; batch of {len(headers)}: {uids}",
            "lower train.lr, or look at these samples; train.on_nonfinite: skip skips single steps",
        )

    # ── weights, which rank 0 gathers while the others join; state, of which each has a part ────

    def named_weights(self, copied: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the current weights under their checkpoint names, in the engines' dtype.

        bfloat16 from a GPU, float32 from a CPU. A head tied to the embedding is left out, as in
        the checkpoint. Without ``copied`` each is valid until the next is asked for.
        """
        with self._ranks.beside("weights.join_gather", "sent") as joined:
            yield from self._rank.weights.sent(copied)
            joined()

    def reference(self, rows: Sequence[HeldRow]) -> Reference:
        """The current weights' log-probabilities of held rows; see ``trainer.student.reference``.

        Of several ranks all compute them together.
        """
        found: Reference = self._ranks.each("student.reference", tuple(rows))[0]
        return found

    def capture(self, version: int) -> int:
        """See TrainerState.capture."""
        return self._state.capture(self._step, version, self._balancing.balance.text())

    def write(self, folder: str) -> Files:
        """See TrainerState.write."""
        return self._state.write(folder)

    def restore(self, folder: str) -> tuple[int, int]:
        """See TrainerState.load; returns the step and the version."""
        stamp = self._state.load(folder)
        self._step, self._balancing.balance = stamp.step, Balance.of(stamp.balance)
        self.unchanged = False  # samples of its version may be of weights some steps before
        return stamp.step, stamp.version

    def adopt(self, folder: str, step: int) -> None:
        """Each rank reads its part of a model's weights, which are those after the step."""
        self._ranks.each("state.adopt", folder)
        self._step = step
        self.unchanged = False  # as after ``restore``

    def save(self, source: str, directory: str) -> None:
        """Writes the student in Hugging Face format; see ``trainer.saving.export``.

        An error of writing is raised when all is gathered: the ranks stay in step.
        """
        dtype = export_dtype(self._train.export_dtype, source)
        with self._ranks.beside("weights.join_gather", "exported", dtype) as joined:
            weights = self._rank.weights.exported(dtype)
            fault = fault_of_saving(self.model, source, directory, weights, dtype)
            joined()
        if self._rank.recorder is not None or self._rank.keeper is not None:
            self._ranks.each("flush_records")
        if fault is not None:
            raise fault
