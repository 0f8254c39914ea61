"""Bytes of a rank's step as torch's memory tracker counts them, for real or on fake tensors.

    StudentLoss ──two micro-batches, AdamW between, MemTracker or FSDPMemTracker──► Seen

The last micro-batch is measured: gradients and moments exist by then. Fake tensors have shapes
and no memory (``FakeTensorMode``), and a fake process group has any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.memory.step import Step, peak, states
from async_opd.memory.step import backward as backward_terms
from async_opd.memory.step import loss as loss_terms
from async_opd.models.model_size import ModelSize
from benchmarks.local_ranks import in_processes
from trainer.batches.packing import Packed
from trainer.layers import set_recomputation
from trainer.losses import build_objective
from trainer.losses.base import Tokens
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.attention import VARLEN, register
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh, reducing_last

CPU = torch.device("cpu")
SEQUENCES, K = 4, 16
GATHERED = ("Unsharded Param", "All Gather")
GRADIENTS = ("Gradient", "Sharded Grad", "Unsharded Grad", "Temp")
"""Between two micro-batches nothing else is temporary: full gradients are, in float32."""
STATES = {
    "parameters": ("Parameter", "Sharded Param"),
    "gradients": GRADIENTS,
    "moments": ("Optstate", "OptState"),
}
SMALL = 0.02
"""Terms below this share of the peak are not compared: row ids, rotary tables, scalars."""


@dataclass(frozen=True)
class Case:
    """A step: the ``config`` of transformers, ranks, tokens of a row and rows with a loss.

    ``ragged``: attention as on a GPU, by torch's varlen kernel, without a mask.
    """

    name: str
    config: Any
    train: TrainConfig
    tokens: int = 512
    responses: int = 256
    ragged: bool = False

    def step(self, size: ModelSize) -> Step:
        """The planner's input for it."""
        return Step(
            size,
            "cpu",
            ranks=self.train.ranks,
            tokens=self.tokens,
            responses=self.responses,
            half=self.train.dtype == "bfloat16",
            recompute=self.train.gradient_checkpointing,  # type: ignore[arg-type]
            mask=not self.ragged,
            reduces_once=self.train.ranks > 1 and self.train.reduce_gradients == "step",
        )

    def model(self) -> Any:
        """The student, with random weights, or without any on fake tensors."""
        from transformers import AutoModelForCausalLM

        register()
        self.config._attn_implementation = VARLEN if self.ragged else "sdpa"
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(self.config)
        set_recomputation(model, self.train, "cpu")
        return model


def size_of(model: Any) -> ModelSize:
    """As its files would say it."""
    shapes = [(name, tuple(p.shape), "F32") for name, p in model.named_parameters()]
    return ModelSize.of(model.config.to_dict(), shapes)


def row(case: Case) -> Packed:
    """Sequences of equal length; the last tokens have a loss."""
    n, length = case.responses, case.tokens // SEQUENCES
    tokens = Tokens(
        targets=torch.zeros(n, dtype=torch.int64),
        rollout_logprobs=torch.zeros(n),
        weights=torch.ones(n, dtype=torch.float64),
        teacher_logprobs=torch.zeros(n),
        teacher_ids=torch.arange(K).repeat(n, 1),
        teacher_topk_logprobs=torch.full((n, K), -5.0),
        teacher_rest_logprobs=torch.full((n,), -1.0),
        response_starts=torch.zeros(n, dtype=torch.int64),
    )
    return Packed(
        input_ids=torch.zeros(1, case.tokens, dtype=torch.int64),
        position_ids=torch.arange(length).repeat(SEQUENCES)[None],
        starts=torch.arange(0, case.tokens + 1, length, dtype=torch.int32),
        longest=length,
        rows=torch.arange(case.tokens - n, case.tokens),
        tokens=tokens,
    )


class _Fast:
    """Keeps the peak of the whole, not of every module, which takes most of a tracker's time."""

    _curr_mem_snap: Any
    _peak_mem: Any
    _peak_mem_snap: Any

    def _update_peak_stats(self, _: Any) -> None:
        for device, now in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < now["Total"]:
                self._peak_mem[device] = now["Total"]
                self._peak_mem_snap[device] = dict(now)


class OneRank(_Fast, MemTracker):
    """Of a student that is not sharded."""


class Sharded(_Fast, FSDPMemTracker):
    """Of a student that FSDP2 has sharded."""


def measured(case: Case, mesh: Any = None) -> dict[str, int]:
    """Bytes by the terms of ``planned``."""
    model = case.model()
    model.to = lambda *_: model  # a fake parameter has no data to move
    once = case.train.reduce_gradients == "step"
    # fake ranks agree on no value
    with patch("trainer.student.placed.all_reduce_once", lambda *_: once):
        placed = PlacedStudent(
            model, build_objective(ForwardKLConfig()), case.train, CPU, mesh=mesh
        )
    rank, student, packed = Rank(placed), placed.loss, row(case)

    def micro_batch() -> None:
        with placed.precision():
            loss, _ = student(packed)
        torch.autograd.backward(loss * placed.ranks)

    micro_batch()
    rank.optimizer.step()  # the gradients stay: moments and gradients are there as of a step's end
    if once:
        rank.optimizer.zero_grad(set_to_none=True)
    tracker: Any = OneRank() if mesh is None else Sharded(student, rank.optimizer)
    if mesh is None:
        tracker.track_external(student, rank.optimizer)
    seen: dict[str, Bytes] = {}

    def see(now: str, highest: str = "") -> None:
        """Keeps what there is ``now``, and the highest since the last call."""
        seen[highest] = _named(tracker.get_tracker_snapshot("peak")[CPU])
        seen[now] = _named(tracker.get_tracker_snapshot()[CPU])
        tracker._peak_mem.clear()

    head = student.head
    with tracker:
        for last in reducing_last(student, (False, True)) if once else (True,):
            if last:
                tracker.reset_mod_stats()
                see("between")
                head.register_forward_pre_hook(lambda *_: see("head", "forward"), prepend=True)
                head.register_forward_hook(lambda *_: see("after", "loss"))
            micro_batch()
        see("end", "backward")
    return _terms(seen)


Bytes = dict[str, int]


def _named(found: dict[Any, int]) -> Bytes:
    return {str(getattr(key, "value", key)): nbytes for key, nbytes in found.items()}


def _gathered(found: Bytes) -> int:
    return sum(found.get(name, 0) for name in GATHERED)


def _terms(seen: dict[str, Bytes]) -> Bytes:
    between, head, loss, back = (seen[k] for k in ("between", "head", "loss", "backward"))
    found = {term: sum(between.get(n, 0) for n in names) for term, names in STATES.items()}
    held = sum(found.values())
    return {
        **found,
        "activations": head["Total"] - between["Total"] - _gathered(head),
        "logits": loss["Total"] - head["Total"] - (_gathered(loss) - _gathered(head)),
        "gathered parameters": _gathered(back),
        "backward": back["Total"] - held - _gathered(back),
        "peak": max(seen[phase]["Total"] for phase in ("forward", "loss", "backward")),
    }


def planned(step: Step) -> Bytes:
    """States; activations after the forward pass; the loss beside them; the backward pass.

    ``backward`` is all but states and gathered parameters; ``peak`` all at the highest moment.
    """
    at_loss, back = loss_terms(step), backward_terms(step)
    gathered = back.pop("gathered parameters", 0)
    return {
        **states(step),
        "activations": at_loss["activations"] + at_loss.get("bfloat16 copies", 0),
        "logits": at_loss["logits"],
        "gathered parameters": gathered,
        "backward": sum(back.values()),
        "peak": sum(peak(step).values()),
    }


def ratios(case: Case, mesh: Any = None) -> dict[str, float]:
    """Planned over measured, for each term that is not small."""
    found = measured(case, mesh)
    expected = planned(case.step(size_of(case.model())))
    return {
        term: expected[term] / nbytes
        for term, nbytes in found.items()
        if abs(nbytes) > SMALL * found["peak"]
    }


@contextmanager
def fake_ranks(ranks: int) -> Iterator[Any]:
    """Fake tensors, and the mesh of a fake process group; None for one rank."""
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        mesh = None
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
            mesh = init_device_mesh("cpu", (ranks,))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield mesh


def gloo_ratios(case: Case) -> dict[str, float]:
    """``ratios`` in the first of real ranks over gloo; the others compute the same row."""

    def lead(spec: RankSpec | None, _: RankGroup) -> dict[str, float]:
        assert spec is not None
        return ratios(case, join_mesh(spec, CPU))

    def follow(spec: RankSpec) -> Any:
        ratios(case, join_mesh(spec, CPU))

    found: dict[str, float] = in_processes(case.train.ranks, lead, follow, 300)
    return found
