"""Makes the images of docs/report.md and docs/microscope.md, in Chromium.

    async_opd run examples/quickstart.yaml --run-dir runs/shown
    PYTHONPATH=. python docs/make_images.py runs/shown

The report is that of the run, and so is its section of tokens, if the run has recorded some
(``log.microscope.share=0.05``); the comparison is of two simulated runs:
the real pipeline in virtual time (tests/tools/report/pages.py), with accuracies that are made up.
The images are 8-bit PNGs of the upper part of each page or section.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from async_opd.tools.report.comparison import comparison
from async_opd.tools.report.forecast import forecast
from async_opd.tools.report.recorded_run import read_recorded_run
from async_opd.tools.report.run_report import report
from async_opd.tools.report.verdict import judge
from tests.tools.report.browser import chromium, opened
from tests.tools.report.pages import write_full_run

IMAGES = Path(__file__).resolve().parent / "images"
SCHEMES = ("light", "dark")
LOOKS = ((1400, "light"), (1400, "dark"), (420, "light"), (420, "dark"))
SHOTS = (
    *(("report", "header", *look, 1500) for look in LOOKS),
    *(("pools", "#pools", *look, 1500) for look in LOOKS),
    *(("lives", "figure:has(#chart-life)", *look, 1100) for look in LOOKS),
    *(("tokens", "#tokens", width, scheme, 1100) for width in (1280, 390) for scheme in SCHEMES),
    ("compare", "header", 1400, "light", 1200),
)
"""Name of the image, where in the page it begins, width, colour scheme and height."""


def main(run_dir: str) -> None:
    """Makes the pages and the images."""
    IMAGES.mkdir(exist_ok=True)
    one = read_recorded_run(Path(run_dir))
    verdict = judge(one)
    shown = report(one, verdict, str(forecast(one, verdict)))
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        folder = Path("runs")
        others = (("teachers-2", 0, 1.6), ("slow-trainer", 1, 3.0))
        runs = [write_full_run(folder / name, *made, hostile=False) for name, *made in others]
        pages = {"report": folder / "report.html", "compare": folder / "compare.html"}
        pages["report"].write_text(shown)
        pages["compare"].write_text(comparison([read_recorded_run(run) for run in runs]))
        with chromium() as browser:
            for name, place, width, scheme, height in SHOTS:
                file = pages.get(name, pages["report"])
                with opened(browser, file, width, scheme) as (page, _):
                    if not page.locator(place).count():
                        continue
                    top = page.locator(place).first.bounding_box()["y"]
                    clip = {"x": 0, "y": max(top - 16, 0), "width": width, "height": height}
                    image = IMAGES / f"{name}-{width}-{scheme}.png"
                    page.screenshot(path=image, full_page=True, clip=clip)
                    print(image, f"{image.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main(*sys.argv[1:])
