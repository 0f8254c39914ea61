"""The images of samples on a page: thumbnails as data URLs, of bounded size in all."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

from async_opd.core.row import Media
from async_opd.files.foreign import Place
from async_opd.pictures.folder import read_thumbnail, titled
from async_opd.tools.report.page import text

MOST_CHARS = 1 << 20
"""Characters of all data URLs of a page, beside 1 MB of scripts."""


@dataclass
class Gallery:
    """Shows images of a run directory while ``left`` characters suffice."""

    run_dir: Place
    left: int = MOST_CHARS
    left_out: int = 0
    """Images that found no room on the page."""
    unkept: int = 0
    """Images without a thumbnail in the run directory."""

    def html(self, images: Sequence[Media], uid: str) -> str:
        """The images of a sample, in order; '' for none. One that is not shown has its size."""
        if not images:
            return ""
        shown = "".join(self._figure(image, i, len(images)) for i, image in enumerate(images, 1))
        label = text(f"Images of {uid}")
        opening = f'<div class="images" tabindex="0" role="group" aria-label="{label}">'
        return f"{opening}{shown}</div>"

    def notes(self) -> list[str]:
        """The images that the page lacks, since the last call."""
        found = []
        if self.left_out:
            found.append(
                f"{self.left_out} images are left out: a page has at most {MOST_CHARS >> 20} MiB "
                "of them. They are in media/ of the run directory."
            )
        if self.unkept:
            found.append(
                f"{self.unkept} images have no thumbnail in media/ of the run directory "
                "(log.thumbnails_mib)."
            )
        self.left_out = self.unkept = 0
        return found

    def _figure(self, image: Media, number: int, count: int) -> str:
        size = f"{image.width} x {image.height} pixels"
        shown = self._url(str(image.sha256))
        if shown is None:
            return f"<span>{text(titled(image))}</span>"
        alt = f"Image {number} of {count}, {size}"
        return f'<img src="{shown}" alt="{text(alt)}" title="{text(size)}">'

    def _url(self, sha256: str) -> str | None:
        found = read_thumbnail(self.run_dir, sha256)
        if found is None:
            self.unkept += 1
            return None
        kind, content = found
        url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
        if len(url) > self.left:
            self.left_out += 1
            return None
        self.left -= len(url)
        return url
