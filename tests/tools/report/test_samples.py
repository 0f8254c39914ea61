"""The images of samples on a report's page: bounded, and those that lack are counted."""

from __future__ import annotations

from pathlib import Path

from async_opd.core.row import Media
from async_opd.pictures import MEDIA, Thumbnails
from async_opd.tools.report.samples import MOST_CHARS, Gallery
from tests.data.pictures import BLUE, RED
from tests.pictures.test_pictures import media

HOSTILE = '"><script>'


def kept(folder: Path) -> list[Media]:
    images = [media(RED), media(BLUE)]
    Thumbnails(folder / MEDIA, 1 << 20).keep(images, {media(o).sha256: o for o in (RED, BLUE)})
    return images


def test_images_are_data_urls_with_their_place_and_size_as_words(tmp_path: Path) -> None:
    html = Gallery(tmp_path).html(kept(tmp_path), "p/0")
    assert html.count('<img src="data:image/png;base64,') == 2
    assert 'alt="Image 2 of 2, 8 x 4 pixels"' in html
    assert 'aria-label="Images of p/0"' in html
    assert Gallery(tmp_path).html([], "p/0") == ""
    assert "<script" not in Gallery(tmp_path).html([Media(HOSTILE, 9, 8, 4)], HOSTILE)


def test_images_beyond_the_pages_room_are_counted_and_keep_their_size(tmp_path: Path) -> None:
    images = kept(tmp_path)
    first = Gallery(tmp_path)
    first.html(images[:1], "p/0")
    gallery = Gallery(tmp_path, left=MOST_CHARS - first.left)
    html = gallery.html(images, "p/0")
    assert html.count("<img") == 1
    assert "<span>&lt;image 8x4&gt;</span>" in html
    (note,) = gallery.notes()
    assert note.startswith("1 images are left out: a page has at most 1 MiB")
    assert gallery.notes() == []


def test_an_image_without_a_thumbnail_is_counted_and_has_its_size(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path)
    assert "&lt;image 640x480&gt;" in gallery.html([Media("a" * 64, 9, 640, 480)], "p/0")
    (note,) = gallery.notes()
    assert note.startswith("1 images have no thumbnail")
