"""Compiled decoder layers: losses and gradients of eager ones, few graphs, eager where it fails.

Most run what torch traces and differentiates without Inductor's kernels, which take a minute.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from async_opd.config.sections.train import LoraConfig, TrainConfig
from async_opd.weight_sync.layout import held_rows
from benchmarks.local_ranks import in_processes
from tests.trainer import families
from tests.trainer.models import VOCABULARY, kept_gradients, new_rank, random_sample, tiny_model
from trainer.follower import Follower
from trainer.layers import CompiledLayers, compile_layers, recompute_activations
from trainer.learner import Learner
from trainer.notes import drain_notes
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec
from trainer.student.adapters import add_adapters
from trainer.student.sharding import join_mesh

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TRACED = "aot_eager"
CASES: dict[str, dict[str, Any]] = {
    "all kept": {},
    "recomputed": {"gradient_checkpointing": "full"},
    "recomputed in part": {"gradient_checkpointing": "selective"},
    "adapters": {"lora": LoraConfig(rank=4), "gradient_checkpointing": "full"},
    "parameters in host memory": {"offload": "parameters", "gradient_checkpointing": "full"},
}
BATCHES = [
    [random_sample(10 * step + i, size, k=6) for i, size in enumerate(sizes)]
    for step, sizes in enumerate([(5, 9, 3, 4), (30, 2, 7, 1), (11, 12, 13, 3)])
]
Seen = list[dict[str, torch.Tensor]]
"""Of each batch the loss, and the gradients by name."""


@pytest.fixture(autouse=True)
def without_graphs() -> None:
    """No graph of another test, and none of its notes."""
    torch.compiler.reset()
    drain_notes()


def rank_of(
    name: str = "all kept", backend: Any = None, mesh: Any = None, make: Any = tiny_model
) -> Any:
    """A rank whose layers are compiled by the ``backend``, or eager for None; its ``gradients``."""
    train = TrainConfig(tokens_per_micro_batch=40, max_grad_norm=1e9, **CASES[name])
    model = make()
    if train.lora is not None:
        add_adapters(model, train.lora)
    if train.gradient_checkpointing != "auto":
        recompute_activations(model, train.gradient_checkpointing)

    def filled() -> None:
        if backend is not None:
            layers.append(compile_layers(model, backend))

    layers: list[CompiledLayers] = []
    with pytest.MonkeyPatch.context() as patch:
        if mesh is not None:  # one rank that offloads is sharded too
            patch.setattr("trainer.student.placed.offloads", lambda train, device: train.offload)
        rank: Any = new_rank(model, train, mesh=mesh, fill=filled)
    rank.student.layers = next(iter(layers), None)
    rank.gradients = kept_gradients(rank)
    return rank


def found_by(rank: Any, rank_group: RankGroup = SINGLE_RANK) -> tuple[Seen, list[str]]:
    """Losses and gradients of every batch, all by the same weights; the notes."""
    learner, seen, notes = Learner(rank, rank_group=rank_group), [], []
    learner.lr_factor = 0.0
    for batch in BATCHES:
        report = learner.train_batch(batch)
        notes += report.notes
        loss = torch.tensor(report.metrics["loss/total"])
        seen.append({"loss": loss, **rank.gradients})
    return seen, notes


def close(found: Seen, expected: Seen) -> bool:
    """Whether each loss and gradient is within 1e-5 of its norm."""
    return all(
        one.keys() == other.keys()
        and all((one[name] - other[name]).norm() <= 1e-5 * other[name].norm() for name in other)
        for one, other in zip(found, expected, strict=True)
    )


class Restarted(Follower):
    """A follower that gets a new rank for each case."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    async def begin(self, name: str, backend: str) -> None:
        super().__init__(rank_of(name, backend, self._mesh))


def on_ranks(
    cases: list[str], backend: str, file: Path, ranks: int = 2, replicate: int = 1
) -> dict[str, tuple[Seen, list[str]]]:
    """What ranks that share the student, or so many copies of it, found by case."""

    def lead(spec: RankSpec | None, rank_group: RankGroup) -> None:
        assert spec is not None
        mesh, found = join_mesh(spec, CPU, replicate), {}
        for name in cases:
            begun = rank_group.dispatch("begin", [(name, backend)] * (ranks - 1))
            rank = rank_of(name, backend, mesh)
            begun()
            found[name] = found_by(rank, rank_group)
        torch.save(found, file)

    in_processes(ranks, lead, lambda spec: Restarted(join_mesh(spec, CPU, replicate)), 500)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("recomputed in part", tiny_model),
        ("all kept", families.gemma3),  # windows in some layers, normed queries, another scale
    ],
)
def test_compiled_layers_have_the_losses_and_gradients_of_eager_ones(name: str, make: Any) -> None:
    found, notes = found_by(rank_of(name, TRACED, make=make))
    assert close(found, found_by(rank_of(name, make=make))[0])
    assert notes == []


@pytest.mark.long
@pytest.mark.whole
def test_inductors_kernels_have_them_on_one_rank_and_on_two(tmp_path: Path) -> None:
    expected, _ = found_by(rank_of("recomputed"))
    ranks = on_ranks(["recomputed"], "inductor", tmp_path / "found.pt")["recomputed"]
    for found, notes in (found_by(rank_of("recomputed", "inductor")), ranks):
        assert close(found, expected)
        assert notes == []


@pytest.mark.long
@pytest.mark.whole
def test_two_copies_on_two_ranks_each_have_those_of_one_with_eager_layers(tmp_path: Path) -> None:
    cases = ["all kept", "adapters", "parameters in host memory"]
    for name, (found, notes) in on_ranks(cases, TRACED, tmp_path / "found.pt", 4, 2).items():
        assert close(found, found_by(rank_of(name))[0]), name
        assert notes == []


def test_layers_and_rows_of_all_lengths_share_a_few_graphs() -> None:
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    found_by(rank_of(backend=counting))
    assert len(graphs) == 2  # a row of several sequences has a mask, that of one has none


def test_layers_that_cannot_be_compiled_run_eagerly_and_the_log_says_so() -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("g++ was not found")

    rank = rank_of("recomputed", no_compiler)
    assert rank.student.kernels()["decoder layers"] == "compiled"
    found, (said,) = found_by(rank)
    assert rank.student.kernels()["decoder layers"] == "eager"
    assert close(found, found_by(rank_of())[0])
    assert said.startswith("decoder layers run eagerly, not compiled: BackendCompilerFailed")
    assert "no_compiler" in said


def test_a_backward_pass_that_cannot_be_compiled_is_found_before_it() -> None:
    from torch._dynamo.backends.common import aot_autograd

    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no memory to compile")

    backend = aot_autograd(fw_compiler=lambda graph, _: graph, bw_compiler=no_compiler)
    found, notes = found_by(rank_of(backend=backend))
    assert close(found, found_by(rank_of())[0])
    assert len(notes) == 1


def test_too_many_graphs_end_compiling_and_the_log_says_which_guard_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainer.layers.MAX_GRAPHS", 1)
    found, (said,) = found_by(rank_of(backend="eager"))
    assert close(found, found_by(rank_of())[0])
    assert "more than 1 graphs, " in said
    assert "attention_mask" in said


def test_a_model_without_such_layers_says_so() -> None:
    bare = tiny_model()
    bare.model.layers = torch.nn.ModuleList()
    drain_notes()
    compile_layers(bare)
    assert drain_notes() == (
        "train.compile has no effect: Qwen3ForCausalLM has no layers to compile",
    )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"context_parallel": 2, "ranks": 2}, "'context_parallel': a graph holds no exchange"),
        ({"routing": "replay"}, "'routing' replay"),
    ],
)
def test_what_compiled_layers_do_not_allow_is_refused(other: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"'compile' with {reason}"):
        TrainConfig(compile=True, **other)


def test_the_noise_of_held_rows_is_that_of_eager_layers() -> None:
    """Hooks that come after the compilation are skipped by compiled layers."""
    rows = held_rows(VOCABULARY, 60)
    compiled = rank_of(backend="eager")
    Learner(compiled).train_batch(BATCHES[0])
    eager = rank_of()
    Learner(eager).train_batch(BATCHES[0])
    noise = eager.student.reference(rows).noise["text"]
    assert compiled.student.reference(rows).noise["text"] == pytest.approx(noise, rel=1e-3)
    assert compiled.student.layers is not None
    assert compiled.student.layers.is_compiled
