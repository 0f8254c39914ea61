"""Prompts p0, p1, …, some with images and some that cannot be sampled."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from async_opd.core.row import Media
from async_opd.core.samples import NO_VERSION, DeadLetter, Header, Prompt

TEACHERS = ("a", "b")
IMAGE_BYTES = 64


class FakePrompts:
    """Every third prompt has no image, the others one or two; some have the same as another.

    Those whose numbers are ``bad`` cannot be sampled. Without ``images`` none has any.
    """

    def __init__(
        self,
        cursor: int = 0,
        bad: Collection[int] | range = (),
        teachers: tuple[str, ...] = TEACHERS,
        images: bool = True,
    ) -> None:
        self.cursor, self.bad, self.teachers, self.images = cursor, bad, teachers, images

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        first, self.cursor = self.cursor, self.cursor + count
        return [self.one(number) for number in range(first, self.cursor)]

    def prompts(self, count: int) -> tuple[Prompt, ...]:
        """The next ones, of which all can be sampled."""
        found = self.next(count)
        return tuple(one for one in found if isinstance(one, Prompt))

    def one(self, number: int) -> Prompt | DeadLetter:
        if number not in self.bad:
            return self.find(f"p{number}")
        teacher = self.teachers[number % len(self.teachers)]
        return DeadLetter(Header(f"p{number}", 0, 0, NO_VERSION, teacher), "no tokens", "prompt")

    def read_ahead(self) -> None: ...

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    def find(self, uid: str) -> Prompt:
        number = int(uid[1:])
        teacher = self.teachers[number % len(self.teachers)]
        count = number % 3 if self.images else 0
        encoded = [bytes([one % 8]) * IMAGE_BYTES for one in range(number, number + count)]
        return with_images(Prompt(uid, teacher, teacher, np.zeros(2, np.int32)), *encoded)


def with_images(prompt: Prompt, *encoded: bytes) -> Prompt:
    """The prompt with these images."""
    hashes = [hashlib.sha256(one).hexdigest() for one in encoded]
    media = tuple(Media(h, len(one), 8, 8) for h, one in zip(hashes, encoded, strict=True))
    return replace(prompt, media=media, encoded=dict(zip(hashes, encoded, strict=True)))


def pictured(number: int) -> Prompt:
    """A prompt whose image no other prompt has."""
    plain = replace(FakePrompts().find(f"p{number}"), uid=f"e{number}")
    return with_images(plain, bytes([100 + number]) * IMAGE_BYTES)
