"""The samples of a simulated run: the length of each response, and its teacher."""

from __future__ import annotations

import math

import numpy as np

from async_opd.tools.plan.setting import Lengths, Setting

CHUNK = 1 << 14


class Population:
    """Samples by number, in the order in which they are admitted; drawn by the seed as needed.

    The same number has the same length in every setting with the same lengths and seed, so that
    two settings differ by their behaviour, not by their random numbers.
    """

    def __init__(self, setting: Setting, seed: int) -> None:
        self.lengths: list[int] = []
        self.teachers: list[int] = []
        self.oldest: list[int] = []
        """The weight version of each sample's first token."""
        self._setting = setting
        self._length_random, self._teacher_random, self._again_random = np.random.default_rng(
            seed
        ).spawn(3)
        self._taken = 0

    def group(self) -> range:
        """The numbers of the next group."""
        n = self._setting.rollout.n
        start, self._taken = self._taken, self._taken + n
        while len(self.lengths) < self._taken:
            self.lengths += draw(self._setting.lengths, CHUNK, self._length_random).tolist()
        while len(self.teachers) < self._taken:
            self.teachers += self._draw_teachers()
            self.oldest += [0] * (len(self.teachers) - len(self.oldest))
        return range(start, self._taken)

    def again(self, sample: int) -> None:
        """Draws another length: the sample is sampled once more."""
        self.lengths[sample] = int(draw(self._setting.lengths, 1, self._again_random)[0])

    def _draw_teachers(self) -> list[int]:
        shares = [teacher.share for teacher in self._setting.teachers]
        n = self._setting.rollout.n
        groups = self._teacher_random.choice(len(shares), size=math.ceil(CHUNK / n), p=shares)
        return [int(teacher) for teacher in np.repeat(groups, n)]


def draw(lengths: Lengths, count: int, random: np.random.Generator) -> np.ndarray:
    """Draws ``count`` lengths from the distribution of ``Lengths.sample``."""
    location = math.log(lengths.mean) - lengths.sigma**2 / 2
    drawn = random.lognormal(location, lengths.sigma, count)
    return np.clip(np.rint(drawn), 1, lengths.most).astype(np.int64)
