"""The learner: one batch of samples, one optimizer step. It decides, ranks compute.

    samples ──token_weights──► weight of each token ─┐
       └──assign_micro_batches──► parts of each rank ───────┴──► rank 0 … N-1: backward ──► values,
       norm
                                                                                │ finite?
                                                   rank 0 … N-1: apply ◄────────┘

Shares are those of the whole batch (``shares.py``), so that the gradient does not depend on how it
is split. Logits exist for one chunk of response rows at a time (``losses/chunked.py``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_opd.core.batch import cut
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from trainer.batches.micro_batches import assign_micro_batches
from trainer.batches.packing import Vocabularies, refuse_foreign_tokens, refuse_mixed_scores
from trainer.batches.repetition import repetition
from trainer.batches.token_weights import TokenWeight, TokenWeighting
from trainer.losses import Head, Objective
from trainer.losses.report import Metrics, concat_metrics, step_metrics
from trainer.rank import BackwardResult, MicroBatch, Rank
from trainer.rank_group import SINGLE_RANK, RankGroup
from trainer.saving.export import save_model
from trainer.saving.state import Tensors, state_shapes
from trainer.schedule import learning_rate
from trainer.student.check import check_student

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from async_opd.config.run_config import TrainConfig

CPU_ROW_TOKENS = 512
"""Longest packed row on a CPU: its attention is dense, quadratic in the row with everything that
the mask hides, and holds nothing that a wider row would keep busy."""


@dataclass(frozen=True)
class LearnerReport:
    """Metrics of one step, and why nothing was learned in it, if that is so."""

    metrics: dict[str, float]
    skipped: str = ""


class Learner:
    """Owns the first rank, and through it the others: what it does, they all do."""

    def __init__(
        self,
        model: Any,
        objective: Objective,
        train: TrainConfig,
        device: torch.device,
        token_weights: TokenWeighting | None = None,
        heads: Mapping[str, Head] | None = None,
        mesh: DeviceMesh | None = None,
        rank_group: RankGroup = SINGLE_RANK,
    ) -> None:
        """``token_weights`` say what each token weighs, by default 1 / (tokens of the batch).

        ``heads`` are the teachers', for objectives over the whole vocabulary. ``mesh`` and
        ``rank_group`` are of several ranks.
        """
        self._rank = Rank(model, objective, train, device, heads, mesh)
        self._rank_group = rank_group
        self._token_weighting = token_weights or TokenWeighting()
        self._train = train
        rows = self._rank.vocabulary
        self._vocabularies = Vocabularies(
            rows, {name: min(rows, head.vocabulary) for name, head in (heads or {}).items()}
        )
        self._row_tokens = train.tokens_per_micro_batch
        if device.type == "cpu":
            self._row_tokens = min(self._row_tokens, CPU_ROW_TOKENS)
        self._step = 0
        self._skipped = self._skipped_in_a_row = 0

    @property
    def model(self) -> Any:
        """The student; of several ranks its first shard."""
        return self._rank.model

    @property
    def computed_tokens(self) -> int:
        """Since the start, by this rank; grows with each micro-batch."""
        return self._rank.tokens

    def free_cache(self) -> None:
        """Gives memory of past steps back to the GPUs, for others on them."""
        self._on_all_ranks("free_cache")

    def train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        """One optimizer step, or an error that leaves weights, optimizer and step as they were.

        If loss or gradient is not finite or a metric of the loss is not a number: StageError, or a
        report that says so (``train.on_nonfinite``), and the step is made without learning.
        StageError for a token that is not in the student's vocabulary. TypeError for scores of
        several kinds, however they would be split. A batch without any response token has loss 0
        and changes no weight, but is a step.
        """
        refuse_mixed_scores(samples)
        refuse_foreign_tokens(samples, self._vocabularies)
        try:
            return self._train_batch(samples)
        finally:
            self._rank.clear()

    def _train_batch(self, samples: Sequence[Sample]) -> LearnerReport:
        started = time.perf_counter()
        whole = samples
        token_weights, rewards = self._token_weighting(whole)
        counted = [i for i, one in enumerate(token_weights) if one.weight or one.reward_weight]
        samples, token_weights = [whole[i] for i in counted], [token_weights[i] for i in counted]
        division = self._division(samples)
        micro_batches = [
            [_micro_batch(samples, token_weights, group) for group in groups] for groups in division
        ]
        computed = self._backward(micro_batches)
        trained = [
            sample.rollout
            for micro_batch in chain(*micro_batches)
            if micro_batch.counts
            for sample in micro_batch.samples
        ]
        runs = [(rollout.prompt.teacher, len(rollout.response_ids)) for rollout in trained]
        means = step_metrics(self._joined(computed), runs) | rewards
        norm, rate = computed[0].norm, learning_rate(self._step, self._train)
        fault = _not_finite(means, norm)
        if fault:
            self._skip(fault, samples)
        else:
            self._skipped_in_a_row = 0
        self._on_all_ranks("apply", None if fault else rate)
        self._step += 1
        metrics = {
            **means,
            "train/grad_norm": norm,
            "train/lr": rate,
            "train/skipped_steps": float(self._skipped),
            "train/micro_batches": float(sum(len(groups) for groups in division)),
            "train/compute_s": time.perf_counter() - started,
        }
        return LearnerReport(metrics | self._shape(whole), fault)

    def _division(self, samples: Sequence[Sample]) -> list[list[list[int]]]:
        """Indices of each micro-batch of each rank; several share what there is to compute."""
        lengths = [sample.rollout.tokens for sample in samples]
        if self._rank_group.ranks == 1:
            return assign_micro_batches(lengths, self._row_tokens, 1)
        some = [i for i, sample in enumerate(samples) if len(sample.rollout.response_ids)]
        found = assign_micro_batches(
            [lengths[i] for i in some], self._row_tokens, self._rank_group.ranks
        )
        return [[[some[i] for i in group] for group in groups] for groups in found]

    def _skip(self, fault: str, samples: Sequence[Sample]) -> None:
        """Counts a step that is left out. StageError if it may not be."""
        train = self._train
        self._skipped_in_a_row += 1
        if train.on_nonfinite == "skip" and self._skipped_in_a_row <= train.max_skipped:
            self._skipped += 1
            return
        before = f", after {train.max_skipped} steps left out" if self._skipped_in_a_row > 1 else ""
        uids = ", ".join(sample.rollout.uid for sample in samples)
        raise StageError(
            "trainer",
            f"step {self._step}{before}: {fault}; batch of {len(samples)}: {uids}",
            "lower train.lr, or look at what is in these samples; train.on_nonfinite: skip leaves "
            "out single steps",
        )

    def _shape(self, samples: Sequence[Sample]) -> dict[str, float]:
        """What the batch consists of: tokens, and samples cut off, empty or over the budget."""
        rollouts = [sample.rollout for sample in samples]
        count = max(len(rollouts), 1)
        lengths = [len(rollout.response_ids) for rollout in rollouts]
        over = sum(r.tokens > self._train.tokens_per_micro_batch for r in rollouts)
        return {
            "train/tokens": float(sum(rollout.tokens for rollout in rollouts)),
            "train/response_tokens": float(sum(lengths)),
            "train/mean_response_tokens": sum(lengths) / count,
            "train/std_response_tokens": float(np.std(lengths)) if lengths else 0.0,
            "train/truncated_share": sum(r.finish_reason == "length" for r in rollouts) / count,
            "train/empty_responses": float(lengths.count(0)),
            "train/over_budget": float(over),
            "train/repetition": sum(map(repetition, rollouts)) / count,
        }

    # ── whole weights and states, of all ranks ─────────────────────────────────────────────────

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Copies of the current weights under their checkpoint names, in the engines' dtype.

        bfloat16 from a GPU, float32 from a CPU. A head tied to the embedding is left out, as in
        the checkpoint.
        """
        with self._dispatched("join_weights_gather"):
            yield from self._rank.weights()

    def state(self) -> Tensors:
        """A copy of weights, optimizer and random states in host memory."""
        with self._dispatched("join_state_gather"):
            return self._rank.state()

    def restore(self, step: int, tensors: Tensors) -> None:
        """Goes on after ``step`` optimizer steps with the state of then."""
        shapes = state_shapes(self.model, tensors) if self._rank_group.ranks > 1 else {}
        with self._dispatched("load", shapes):
            self._rank.load(tensors)
        self._step = step

    def save(self, source: str, directory: str) -> None:
        """Writes the student in Hugging Face format; see ``trainer.saving.export``."""
        with self._dispatched("join_full_state_gather"):
            full_state = self._rank.full_state()
        save_model(self.model, source, directory, full_state)

    def check(self, longest: int | None = None) -> None:
        """StageError for an architecture whose logits this learner would compute wrongly.

        ``longest``: tokens of the longest sequence of the engines.
        """
        check_student(self.model, self._rank.device, self._rank.precision(), longest)

    # ── orders ─────────────────────────────────────────────────────────────────────────────────

    def _backward(self, micro_batches: Sequence[Sequence[MicroBatch]]) -> list[BackwardResult]:
        """Every rank computes its own parts, which the others are sent in messages before."""
        others = [
            list(cut(given, lambda micro_batch: micro_batch.nbytes)) for given in micro_batches[1:]
        ]
        for messages in zip_longest(*others, fillvalue=()):
            with self._dispatch("take", [(tuple(message),) for message in messages]) as taken:
                taken()
        with self._dispatch("backward", [() for _ in others]) as results:
            return [self._rank.backward(micro_batches[0]), *results()]

    def _on_all_ranks(self, method: str, *arguments: Any) -> None:
        """Every rank does the same."""
        self._on_each_rank(method, [arguments] * self._rank_group.ranks)

    def _on_each_rank(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Every rank does it with arguments of its own; what they return, rank 0 first."""
        with self._dispatch(method, arguments[1:]) as results:
            return [getattr(self._rank, method)(*arguments[0]), *results()]

    @contextmanager
    def _dispatched(self, method: str, *arguments: Any) -> Iterator[None]:
        """The other ranks do it meanwhile, all with the same arguments."""
        with self._dispatch(method, [arguments] * (self._rank_group.ranks - 1)) as results:
            yield
            results()

    @contextmanager
    def _dispatch(
        self, method: str, arguments: Sequence[tuple[Any, ...]]
    ) -> Iterator[Callable[[], list[Any]]]:
        """The other ranks have begun. Whatever breaks it off leaves them out of step."""
        results = self._rank_group.dispatch(method, arguments)
        try:
            yield results
        except BaseException:
            self._rank_group.mark_broken()
            raise

    def _joined(self, computed: Sequence[BackwardResult]) -> Metrics:
        """The values of all parts of all ranks, on this rank's device."""
        reports = [report for one in computed for report in one.reports]
        device = self._rank.device
        return concat_metrics(
            [{name: v.to(device) for name, v in report.items()} for report in reports]
        )


def _micro_batch(
    samples: Sequence[Sample], token_weights: Sequence[TokenWeight], group: Sequence[int]
) -> MicroBatch:
    """The samples of one teacher one after the other. An empty group keeps its rank in step."""
    if not group:
        return _filler(samples, token_weights)
    order = sorted(group, key=lambda index: samples[index].rollout.prompt.teacher)
    return MicroBatch(tuple(samples[i] for i in order), tuple(token_weights[i] for i in order))


def _filler(samples: Sequence[Sample], token_weights: Sequence[TokenWeight]) -> MicroBatch:
    """The shortest sample that has a response, without any weight."""
    some = (i for i, sample in enumerate(samples) if len(sample.rollout.response_ids))
    index = min(some, key=lambda i: samples[i].rollout.tokens)
    token_weight = replace(token_weights[index], weight=0.0, reward_weight=0.0)
    return MicroBatch((samples[index],), (token_weight,), counts=False)


def _not_finite(means: Mapping[str, float], norm: float) -> str:
    """What of a step is not finite; empty if all that must be is."""
    loss = means["loss/total"]
    broken = [key for key, value in means.items() if math.isnan(value)]
    if math.isfinite(loss) and math.isfinite(norm) and not broken:
        return ""
    seen = f"loss {loss}, gradient norm {norm}"
    return seen + (f", not a number: {', '.join(broken)}" if broken else "")
