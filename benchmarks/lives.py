"""Random lives of a run: processes that are killed, interrupted and go on, judged by their files.

    python -m benchmarks.lives --minutes M [--first SEED]
    python -m benchmarks.lives --seed N

A life (``tests/lives``) is one run directory, in which one process after the other runs the real
``run``, pipeline, queue, batcher, checkpoints and mirror over fake engines and a fake learner, in
this process, until all steps are trained. Its seed decides everything: batches, weight versions,
the staleness threshold, leased headers or payloads, images, evaluations, rollbacks and the mirror;
and when the queue or the trainer dies, a signal arrives, the process is killed or its machine is
lost. An oracle that reads nothing but the run directory and the mirror's bucket then judges it.

Prints the seed, the events and the wrong facts of each life with any, and one JSON line last:
``runs``, ``violations`` (of so many runs) and ``processes``. ``--seed`` repeats one life and prints
its ``run.log``. Exit code 1 with a violation. About four lives a second on a core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.lives.life import Life


def lived(life: Life, shown: bool = False) -> list[str]:
    """Violations that the oracle finds in a life; ``shown`` prints its ``run.log``."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "life"
        found = life.live(folder)
        if shown:
            print((folder / "run" / "run.log").read_text())
    return found


def within(seconds: float, first: int) -> Iterator[int]:
    """Seeds, until the time is over."""
    end = time.monotonic() + seconds
    return itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(first))


def live(seeds: Iterable[int], shown: bool = False) -> dict[str, int]:
    """Lives all seeds; prints what is wrong. Returns the counts."""
    counts = {"runs": 0, "violations": 0, "processes": 0}
    for seed in seeds:
        life = Life.of(seed)
        found = lived(life, shown)
        counts["runs"] += 1
        counts["violations"] += bool(found)
        counts["processes"] += len(life.processes)
        if found or shown:
            print(life, *found, f"→ python -m benchmarks.lives --seed {seed}", "", sep="\n")
    return counts


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    logging.disable()  # of tasks that a killed process has left
    warnings.simplefilter("ignore")
    if arguments.seed is not None:
        counts = live([arguments.seed], shown=True)
    else:
        counts = live(within(arguments.minutes * 60, arguments.first))
    print(json.dumps(counts))
    return int(counts["violations"] > 0)


if __name__ == "__main__":
    sys.exit(main())
