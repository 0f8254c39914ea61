"""The trainer's cost of recording tokens: steps with ``log.microscope`` against steps without.

One learner (``benchmarks.trainer``'s model and batches: top-64 scores, float32, one thread) takes
turns: a step that records, one that does not, one that does not, one that records, … The step's
records are written to a disk before the next one begins, by the recorder's own thread, whose CPU
seconds count. Texts come from a real tokenizer of as many words as the model's vocabulary has.

    microscope_share      CPU seconds of steps in which one sample in a hundred is recorded
                          (``log.microscope.share: 0.01``) over those without, less 1: the median of
                          the blocks of four steps
    microscope_interval   95 % of the medians of 2,000 draws of as many blocks, with replacement
    all_share             the same where every sample is recorded
    ms_per_sample         CPU ms of a recorded sample, from the steps that record all
    kib_per_sample        KiB of a sample on the disk

``python -m benchmarks.microscope [--blocks N]`` prints one JSON object last. About 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from async_opd.config.sections.log import MicroscopeConfig
from async_opd.core.samples import Sample
from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.models.tokenizer import Text
from benchmarks.cpu_costs import interval
from benchmarks.trainer import VOCABULARY, Packing, lengths, sample
from trainer.recorder import Recorder

SHARE = 0.01


def text_of(folder: Path) -> Text:
    """A tokenizer of as many words as there are ids."""
    words = {f"word{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="word0")).save(str(folder / "tokenizer.json"))
    return Text(folder)


def recorder(folder: Path, share: float) -> Recorder:
    """As ``trainer`` makes it, with the config's own bounds."""
    given = MicroscopeConfig(share=share)
    writer = RecordWriter(folder / MICROSCOPE, 0, int(given.max_mib * 2**20))
    return Recorder(writer, seed=0, share=share, top_k=given.top_k, speller=lambda: text_of(folder))


def batches(size: int, median: int) -> Iterator[list[Sample]]:
    """Batches of samples with different uids, of which the recorder chooses."""
    draw, index = np.random.default_rng(0), 0
    while True:
        drawn = lengths(draw, size, median, equal=False)
        yield [sample(draw, index + offset, tokens) for offset, tokens in enumerate(drawn)]
        index += size


def cost(
    packing: Packing, made: Recorder, source: Iterator[list[Sample]], blocks: int
) -> tuple[list[float], float]:
    """A share for each block, and the CPU seconds that recording adds to a step, in the mean."""

    def seconds(recorded: bool, samples: Sequence[Sample]) -> float:
        packing.record(made if recorded else None)
        started = time.process_time()
        packing.step(samples)
        made.flush()
        return time.process_time() - started

    shares, added = [], []
    for number in range(blocks + 1):
        # Both sides of a pair compute the same batch: lengths differ from one batch to the next.
        first, second = next(source), next(source)
        on = [seconds(True, first)]
        off = [seconds(False, first), seconds(False, second)]
        on.append(seconds(True, second))
        if number:  # the first block warms up
            shares.append(sum(on) / sum(off) - 1)
            added.append((sum(on) - sum(off)) / 2)
            print(f"  {sum(on):.2f} s, {sum(off):.2f} s: {shares[-1]:+.4f}", flush=True)
    return shares, statistics.fmean(added)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("batch", 64), ("median", 64), ("blocks", 10)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    torch.set_num_threads(1)
    source = batches(sizes.batch, sizes.median)
    packing = Packing()
    with tempfile.TemporaryDirectory() as some, tempfile.TemporaryDirectory() as every:
        print("one sample in a hundred", flush=True)
        shares, _ = cost(packing, recorder(Path(some), SHARE), source, sizes.blocks)
        print("every sample", flush=True)
        of_all, added_s = cost(packing, recorder(Path(every), 1.0), source, sizes.blocks)
        files = list((Path(every) / MICROSCOPE).iterdir())
        kib = sum(file.stat().st_size for file in files) / 1024 / len(files) / sizes.batch
    found = {
        "microscope_share": round(statistics.median(shares), 4),
        "microscope_interval": interval(shares),
        "all_share": round(statistics.median(of_all), 4),
        "ms_per_sample": round(1000 * added_s / sizes.batch, 2),
        "kib_per_sample": round(kib, 1),
        "blocks": len(shares),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
