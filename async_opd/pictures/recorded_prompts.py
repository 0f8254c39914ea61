"""Prompts on their way to the pipeline: those with a recorded rollout leave thumbnails behind.

    PromptStream ──next──► Prompt ──► the pipeline
                             └── one of its n rollouts is recorded ──thread──► media/

Ranks choose the samples that they record by uid (``log.microscope``), so the driver knows them
before they are sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from async_opd.core.level import Level
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.core.uid import Uid, rollout_uid
from async_opd.data.prompts import PromptStream
from async_opd.microscope.folder import is_recorded
from async_opd.pictures.folder import Thumbnails


class RecordedPrompts:
    """A stream of prompts; see ``ReplayablePrompts``."""

    def __init__(
        self,
        prompts: PromptStream,
        thumbnails: Thumbnails,
        *,
        seed: int,
        share: float,
        n: int,
        notify: Callable[[str, Level], None],
    ) -> None:
        """``share`` of the samples are recorded, of groups of ``n``; ``notify`` gets warnings."""
        self._prompts, self._thumbnails = prompts, thumbnails
        self._seed, self._share, self._n = seed, share, n
        self._notify = notify

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the stream and of the thumbnails, which evaluations may have written too.

        Before, ``notify`` gets why images have none: not in ``next``, which a thread calls.
        """
        for note in self._thumbnails.notes():
            self._notify(note, "warning")
        return self._prompts.metrics | self._thumbnails.metrics

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        """The stream's next prompts. SourceError."""
        found = self._prompts.next(count)
        self._look_at(one for one in found if isinstance(one, Prompt))
        return found

    def read_ahead(self) -> None:
        """See ``PromptStream``."""
        self._prompts.read_ahead()

    def find(self, uid: Uid) -> Prompt:
        """An earlier prompt of the stream. KeyError."""
        found = self._prompts.find(uid)
        self._look_at([found])
        return found

    def _look_at(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            if prompt.media and self._is_recorded(prompt):
                self._thumbnails.keep_later(prompt.media, prompt.encoded)

    def _is_recorded(self, prompt: Prompt) -> bool:
        uids = (rollout_uid(prompt.uid, member) for member in range(self._n))
        return any(is_recorded(uid, self._seed, self._share) for uid in uids)
