"""The chunked loss on a GPU, beside the matrix products that nothing can do without.

bfloat16, 8192 tokens, hidden 2048, vocabulary 151,936. The floor is the time of the products alone,
at full size and without anything in between: student's logits and both gradients, and for the full
vocabulary the teacher's logits too. Target: at most 1.3 times the floor.

Not yet run on a GPU. ``python -m benchmarks.losses --gpu`` prints one JSON object last: for each
case ``floor_ratio``, ``ours_ms``, ``floor_ms``, ``straightforward_ms``, ``peak_mib``,
``straightforward_peak_mib`` and ``difference`` (largest relative one of loss and gradients).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch

from benchmarks.loss_problem import Problem, difference, ours, problem, straightforward

TOKENS, HIDDEN, VOCABULARY = 8192, 2048, 151_936


def milliseconds(work: Callable[[], object], repeats: int = 10, warm_up: int = 3) -> float:
    """Median time of the work on the device."""
    times = []
    for repeat in range(warm_up + repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if repeat >= warm_up:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def floor(x: Problem) -> float:
    """Milliseconds of the products alone."""
    hidden, weight = x.hidden.detach(), x.weight.detach()
    logits = hidden @ weight.t()
    products: list[Callable[[], object]] = [
        lambda: torch.mm(hidden, weight.t(), out=logits),
        lambda: logits @ weight,
        lambda: logits.t() @ hidden,
    ]
    if x.teacher is not None:
        products.append(products[0])
    return sum(milliseconds(product) for product in products)


def peak_mib(work: Callable[[], object]) -> float:
    """Most memory above what was there before."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(case: str) -> dict[str, float]:
    """All figures of a case."""
    x = problem(case, TOKENS, VOCABULARY, HIDDEN, "cuda", torch.bfloat16)

    def fresh(way: Callable[[Problem], object]) -> Callable[[], object]:
        def work() -> None:
            x.hidden.grad = x.weight.grad = None
            way(x)

        return work

    found = {
        "floor_ms": floor(x),
        "ours_ms": milliseconds(fresh(ours)),
        "straightforward_ms": milliseconds(fresh(straightforward)),
        "peak_mib": peak_mib(fresh(ours)),
        "straightforward_peak_mib": peak_mib(fresh(straightforward)),
        "difference": difference(x),
    }
    found["floor_ratio"] = found["ours_ms"] / found["floor_ms"]
    return {key: round(value, 4) for key, value in found.items()}


def main() -> None:
    """Needs a GPU with 32 GiB: the straightforward way takes most of it."""
    if not torch.cuda.is_available():
        raise SystemExit("no GPU: leave out --gpu to measure on the CPU")
    print(json.dumps({case: measure(case) for case in ("topk", "full_vocab")}))


if __name__ == "__main__":
    main()
