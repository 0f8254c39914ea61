"""The compiled objective: kept where it is right and faster, and compiled a few times only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.trainer.oracle import Case, Identity, case, term
from trainer.losses import chunked, compiled
from trainer.losses.base import Tokens
from trainer.losses.chunked import chunked_loss
from trainer.losses.compiled import ObjectiveRun
from trainer.losses.kl import ForwardKL, ReverseKL
from trainer.losses.objective import Objective
from trainer.losses.terms import OnVocabulary
from trainer.notes import drain_notes

OBJECTIVE = Objective(term(ForwardKL(), "bucket"))


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Six rows are enough to be measured; nothing was noted before."""
    monkeypatch.setattr(compiled, "MIN_TRIED_ROWS", 6)
    drain_notes()
    yield
    drain_notes()


def clock(*seconds: float) -> Callable[[Callable[[], Any]], float]:
    """Seconds of the calls, in order: eager twice, then compiled twice."""
    times = iter(seconds)

    def took(call: Callable[[], Any]) -> float:
        call()
        return next(times)

    return took


def tried(form: Any, *seconds: float) -> tuple[ObjectiveRun, Case, int]:
    """A run after its first tile of 4 rows, of a chunk of 6; rows of a tile of it."""
    x = case(n=6, v=11)
    run = ObjectiveRun(OBJECTIVE, form, clock(*seconds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "TILE_BYTES", {"cpu": 4 * 11 * 8})
        before = x.logits.detach().clone()
        rows = run.tile_rows(before, x.tokens, None)
    assert torch.equal(before, x.logits)
    return run, x, rows


def broken(*_: Any) -> Any:
    raise RuntimeError("CppCompileError: no compiler\nlong output")


def wrong(logits: torch.Tensor, tokens: Tokens, teacher: Any) -> Any:
    found = OBJECTIVE(logits, tokens, teacher)
    logits.mul_(1.01)
    return found


TRIED: dict[str, tuple[Any, tuple[float, ...], bool, str]] = {
    "a faster one is kept and gets whole chunks": (
        OBJECTIVE.__call__,
        (1.0, 0.2, 9.0, 0.1),
        True,
        "the objective runs compiled: 4 rows take 100 ms compiled, 200 ms eager",
    ),
    "a slower one": (
        OBJECTIVE.__call__,
        (1.0, 0.1, 9.0, 0.2),
        False,
        "not compiled: 4 rows take 200 ms compiled, 100 ms eager",
    ),
    "one that fails": (
        broken,
        (1.0, 1.0),
        False,
        "compiling failed: RuntimeError: CppCompileError: no compiler",
    ),
    "one with another gradient": (wrong, (1.0, 1.0, 1.0, 0.1), False, "its gradient differs by"),
}


@pytest.mark.parametrize(("form", "seconds", "kept", "noted"), TRIED.values(), ids=TRIED)
def test_what_is_right_and_faster_is_kept_and_the_log_says_so(
    form: Any, seconds: tuple[float, ...], kept: bool, noted: str
) -> None:
    run, x, rows = tried(form, *seconds)
    assert (run.compiled is not None, run.is_compiled, rows) == (kept, kept, 6 if kept else 4)
    (said,) = drain_notes()
    assert noted in said
    assert "\n" not in said
    assert run.tile_rows(x.logits, x.tokens, None) == 6  # the clock has no further times


def test_without_memory_for_the_copies_it_is_kept_unmeasured() -> None:
    def full(call: Callable[[], Any]) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    x = case(n=6, v=11)
    run = ObjectiveRun(OBJECTIVE, OBJECTIVE.__call__, full)
    assert run.tile_rows(x.logits.detach().clone(), x.tokens, None) == 6
    assert run.compiled is not None
    assert "no memory was left" in drain_notes()[0]


def test_too_few_rows_are_not_measured_and_run_eagerly() -> None:
    def refused(*_: Any) -> Any:
        raise AssertionError("it ran")

    x = case(n=5, v=11)
    run = ObjectiveRun(OBJECTIVE, refused, clock())
    logits = x.logits.detach().clone()
    assert run.tile_rows(logits, x.tokens, None) == 5
    assert run(logits, x.tokens).keys() == OBJECTIVE(x.logits.detach().clone(), x.tokens).keys()


def test_a_later_failure_to_compile_computes_the_same_chunk_eagerly() -> None:
    from torch._dynamo.exc import FailOnRecompileLimitHit

    calls = []

    def once(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise FailOnRecompileLimitHit("Hard failure due to fullgraph=True")
        return OBJECTIVE(*given)

    run, x, _ = tried(once, 1.0, 0.2, 9.0, 0.1)
    ours, theirs = x.logits.detach().clone(), x.logits.detach().clone()
    run(ours, x.tokens, None)
    OBJECTIVE(theirs, x.tokens, None)
    assert torch.equal(ours, theirs)
    assert "FailOnRecompileLimitHit" in drain_notes()[-1]


def test_that_chunk_then_runs_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each eager operation makes another tensor of the size of its tile."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    rows: list[int] = []

    class Counted:
        def __call__(self, logits: torch.Tensor, *rest: Any) -> Any:
            rows.append(len(logits))
            return OBJECTIVE(logits, *rest)

    def fails(*_: Any) -> Any:
        raise FailOnRecompileLimitHit("Hard failure due to fullgraph=True")

    run, x, _ = tried(OBJECTIVE.__call__, 1.0, 0.2, 9.0, 0.1)
    counted: Any = Counted()
    run.objective, run.compiled = counted, fails
    monkeypatch.setattr(compiled, "TILE_BYTES", {"cpu": 4 * 11 * 8})
    found = run(x.logits.detach().clone(), x.tokens, None)
    assert rows == [4, 2]
    whole = OBJECTIVE(x.logits.detach().clone(), x.tokens, None)
    assert all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_failing_kernel_is_an_error() -> None:
    """It may have overwritten a part of the logits: nothing can be computed from them again."""
    calls = []

    def kernel(*given: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("CUDA error")
        return OBJECTIVE(*given)

    run, x, _ = tried(kernel, 1.0, 0.2, 9.0, 0.1)
    with pytest.raises(RuntimeError, match="CUDA error"):
        run(x.logits.detach().clone(), x.tokens, None)


def test_a_cpu_runs_the_objective_itself() -> None:
    assert ObjectiveRun.on(OBJECTIVE, "cpu").compiled is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["topk", "full"])
def test_ragged_sizes_are_compiled_a_few_times(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU runs it: through the chunks of batches of many sizes, with two teachers."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()  # compilations of one function are counted over all tests
    counter = CompileCounterWithBackend("aot_eager")
    objective = Objective(term(ReverseKL(), None)) if kind == "full" else OBJECTIVE
    form = compiled.compiled(objective, counter)
    run = ObjectiveRun(objective, form, clock(1.0, 0.2, 9.0, 0.1))
    monkeypatch.setattr(chunked, "objective_run", lambda *_: run)
    weight = torch.randn(11, 5, dtype=torch.float64)
    for n in [7, 1, 2, 3, 11, 4, 19, 6, 1, 25, 5, 8, 13, 2, 30, 16, 9]:
        x = case(n=n, v=11)
        if isinstance(objective.term, OnVocabulary):
            x = x.states()
        monkeypatch.setattr(chunked, "CHUNK_BYTES", {"cpu": 8 * 11 * 8 * 2})
        hidden = torch.randn(n, 5, dtype=torch.float64)
        heads = {"t": Identity(11), "u": Identity(11)}
        chunked_loss(hidden, weight, None, objective, x.tokens, heads=heads)
    assert run.compiled is not None
    computing = [graph for graph in counter.graphs if len(graph.graph.nodes) > 1]
    assert len(computing) == 2  # any number of rows, and one row
