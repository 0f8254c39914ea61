"""Prompts as a vLLM engine takes them: with their images, rendered once for all their rollouts.

    short ids, encoded bytes ──engine's own renderer──► expanded ids, pixels, places
                                  (once a prompt)              │
    n rollouts, or a rollout to score ◄── one request each ────┘

The engine does not compare placeholders and images, so this does. Requests name an image by its
SHA-256 and the engine's salt: the engine's cache of older weights is never found again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from async_opd.core.errors import RolloutFault
from async_opd.core.row import Media
from async_opd.core.samples import Prompt
from async_opd.core.sequence import Int32
from async_opd.media.cache import MediaCache
from async_opd.media.decode import decode

KEPT_BYTES = 256 << 20
"""Bytes of pixels that an engine's process keeps of rendered prompts, roughly."""
PIXEL_BYTES = 12
"""Three colors of a pixel in float32; resizing changes their number."""
IMAGE = "image"


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt with the tokens that the engine computes, and what it computes them from.

    ``prompt`` has the expanded ids as ``token_ids``, and the short ones in ``teacher_ids`` unless
    its teacher reads others. ``rendered`` is the engine's own input; None without images.
    """

    prompt: Prompt
    rendered: Mapping[str, Any] | None = None

    def request(self, salt: str, then: Sequence[int] = ()) -> dict[str, Any]:
        """The engine's input: the prompt, and the tokens ``then`` behind it.

        ``salt`` separates what the engine caches; empty: it may share all.
        """
        ids = [*self.prompt.token_ids.tolist(), *then]
        salted = {"cache_salt": salt} if salt else {}
        if self.rendered is None:
            return {"prompt_token_ids": ids, **salted}
        hashes = [f"{one.sha256}/{salt}" for one in self.prompt.media]
        return {**self.rendered, "prompt_token_ids": ids, "mm_hashes": {IMAGE: hashes}, **salted}


class EnginePrompts:
    """Renders prompts for one engine, whose ``renderer`` is that of vLLM's ``AsyncLLM``.

    ``placeholder`` is the token that stands for an image in short prompts; None: the engine takes
    no images. For one event loop.
    """

    def __init__(
        self, stage: str, renderer: Any, placeholder: int | None, media: MediaCache | None
    ) -> None:
        self._stage = stage
        self._renderer = renderer
        self._placeholder = placeholder
        self._media = media
        self._kept: OrderedDict[tuple[bytes, tuple[Media, ...]], asyncio.Task[Any]] = OrderedDict()

    def of_images(self, encoded: Mapping[str, bytes]) -> EnginePrompts:
        """The same for prompts with these images, given by SHA-256; it keeps nothing rendered."""

        async def fetch(hashes: Sequence[str]) -> Mapping[str, bytes]:
            return {one: encoded[one] for one in hashes if one in encoded}

        media = MediaCache(fetch, max_bytes=0)
        return EnginePrompts(self._stage, self._renderer, self._placeholder, media)

    async def of(self, prompt: Prompt) -> EnginePrompt:
        """The prompt for the engine, whose ``token_ids`` are short.

        RolloutFault if it has not one placeholder an image, or an image that the engine refuses;
        what MediaCache.get raises.
        """
        ids = prompt.token_ids
        places = 0 if self._placeholder is None else int((ids == self._placeholder).sum())
        if places != len(prompt.media):
            raise self._fault(
                prompt,
                f"has {places} placeholders for {len(prompt.media)} images (token "
                f"{self._placeholder})",
            )
        if not prompt.media:
            return EnginePrompt(prompt)
        rendered = await self._rendered(prompt)
        expanded = np.asarray(rendered["prompt_token_ids"], np.int32)
        short = ids if prompt.teacher_ids is None else prompt.teacher_ids
        return EnginePrompt(replace(prompt, token_ids=expanded, teacher_ids=short), rendered)

    async def _rendered(self, prompt: Prompt) -> Mapping[str, Any]:
        """The engine's input of a prompt, made once while it is kept."""
        key = (prompt.token_ids.tobytes(), prompt.media)
        task = self._kept.get(key)
        if task is None:
            task = asyncio.create_task(self._render(prompt), name=f"images of {prompt.uid}")
            self._kept[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        self._kept.move_to_end(key)
        found: Mapping[str, Any] = await asyncio.shield(task)
        return found

    def _settle(self, key: Any, done: asyncio.Task[Any]) -> None:
        """Keeps what was rendered, and drops a failure and what was not asked for longest."""
        if done.cancelled() or done.exception() is not None:
            self._kept.pop(key, None)
        left = KEPT_BYTES
        for old in reversed(list(self._kept)):
            left -= sum(PIXEL_BYTES * one.width * one.height for one in old[1])
            if left < 0 and old != key and self._kept[old].done():
                del self._kept[old]

    async def _render(self, prompt: Prompt) -> Mapping[str, Any]:
        if self._media is None:
            raise self._fault(prompt, "has images, and this engine was given no way to get them")
        encoded = await self._media.get(prompt.media, prompt.uid)
        ids: Int32 = prompt.token_ids
        try:
            images = await asyncio.to_thread(lambda: list(map(decode, encoded)))
            asked = {
                "prompt_token_ids": ids.tolist(),
                "multi_modal_data": {IMAGE: images},
                "multi_modal_uuids": {IMAGE: [one.sha256 for one in prompt.media]},
            }
            (rendered,) = await self._renderer.render_cmpl_async([asked])
        except ValueError as error:  # vLLM's refusals are of this kind
            raise self._fault(prompt, f"cannot be rendered: {error}") from error
        found = len(rendered.get("mm_placeholders", {}).get(IMAGE, ()))
        if found != len(prompt.media):
            cause = f"was rendered with {found} images, and has {len(prompt.media)}"
            raise self._fault(prompt, cause)
        return {**rendered}

    def _fault(self, prompt: Prompt, cause: str) -> RolloutFault:
        remedy = "correct the row or the chat template, or take the row out"
        return RolloutFault(self._stage, f"prompt {prompt.uid} {cause}", remedy)
