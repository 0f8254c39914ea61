"""Host memory of each rank while it loads its part of a student, over the bytes of that part.

    bfloat16 files ──N gloo ranks, each──► modules on meta ──sharded──► own slices, in float32

Counted is private memory (``RssAnon`` of /proc/self/status), sampled every 2 ms, beyond what the
process has once it has imported everything and joined the others: pages of the files, which the
kernel maps and drops as it likes, do not count. ``load_peak_ratio`` is the peak until all weights
are read, over the bytes of the rank's own parameters; the worst rank of all runs.
``check_peak_ratio`` is the peak of the passes that check the student's logits afterwards: they
gather the embedding, the head and one block at a time in float32, which training gathers too. Freed
memory that the C library keeps counts, too.

``python -m benchmarks.load_memory`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from benchmarks.local_ranks import in_processes
from benchmarks.random_model import make_model
from trainer.losses import build_objective
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.check import check_student
from trainer.student.loading import EmptyStudent
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh, own_part

CPU = torch.device("cpu")
INTERVAL_S = 0.002
MAKE_S = 300.0
"""Bound of writing a random model."""


@dataclass(frozen=True)
class LoadMemory:
    """Bytes of one rank: of its parameters, and at most while loading and while checking."""

    share: int
    load_peak: int
    check_peak: int


class PrivatePeak:
    """The most private memory of this process while the block runs, beyond that at its start."""

    def __enter__(self) -> PrivatePeak:
        self._ended = threading.Event()
        self._start = self._most = private_bytes()
        self._sampling = threading.Thread(target=self._sample, daemon=True)
        self._sampling.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._sampling.join()
        self._most = max(self._most, private_bytes())

    @property
    def nbytes(self) -> int:
        """The peak so far."""
        return self._most - self._start

    def _sample(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._most = max(self._most, private_bytes())


def private_bytes() -> int:
    """Memory of this process that no file backs."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon: this is not Linux >= 4.5")


def load_memory(model: Path, ranks: int) -> LoadMemory:
    """Of the first rank, which has the most rows of an uneven division."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - imported before the start

    def measured(spec: RankSpec | None) -> LoadMemory:
        torch.set_num_threads(1)
        mesh = None if spec is None else join_mesh(spec, CPU)
        objective, train = build_objective(ForwardKLConfig()), TrainConfig()
        with PrivatePeak() as loading:
            student = EmptyStudent(model)
            PlacedStudent(
                student.model, objective, train, CPU, mesh=mesh, fill=lambda: student.fill(CPU)
            )
        share = sum(own_part(p.detach()).nbytes for p in student.model.parameters())
        with PrivatePeak() as checking:
            check_student(student.whole())
        return LoadMemory(share, loading.nbytes, share + checking.nbytes)

    def lead(spec: RankSpec | None, _: RankGroup) -> LoadMemory:
        return measured(spec)

    def follow(spec: RankSpec) -> Any:
        measured(spec)

    found: LoadMemory = in_processes(ranks, lead, follow, 600)
    return found


def model_in_child(path: Path, **sizes: Any) -> None:
    """``make_model`` in a separate process.

    Memory that this process had used and freed would be the ranks' from the start: they are forked.
    RuntimeError where it fails or takes longer than ``MAKE_S``.
    """

    def make() -> None:
        torch.set_num_threads(1)  # a pool of threads that this process has used is not in a fork
        make_model(path, **sizes)

    child = multiprocessing.get_context("fork").Process(target=make)
    child.start()
    child.join(MAKE_S)
    if child.exitcode != 0:
        child.kill()
        raise RuntimeError(f"no model was made: exit code {child.exitcode} after {MAKE_S:g} s")


def figures(layers: int = 12, ranks: Sequence[int] = (1, 2, 4)) -> dict[str, Any]:
    """The figures of the module, for a model of about 50 MB a layer in float32."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model_in_child(model, vocabulary=8192, layers=layers, hidden=1024, half=True)
        seen = {count: load_memory(model, count) for count in ranks}
    for count, one in seen.items():
        print(f"{count} ranks: {one}", flush=True)
    peaks = {count: round(one.load_peak / one.share, 3) for count, one in seen.items()}
    return {
        "load_model_mb": round(seen[ranks[0]].share * ranks[0] / 1e6),
        "load_peak_ratio": max(peaks.values()),
        "load_peak_ratios": peaks,
        "check_peak_ratio": round(max(one.check_peak / one.share for one in seen.values()), 3),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    given = parser.parse_args()
    print(json.dumps(figures(given.layers, given.ranks)))


if __name__ == "__main__":
    main()
