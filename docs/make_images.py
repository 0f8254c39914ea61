"""Makes the images of docs/report.md: a report and a comparison of simulated runs, in Chromium.

    PYTHONPATH=. python docs/make_images.py

The runs are the real pipeline in virtual time (tests/report/pages.py); their accuracies are made
up. The images are 8-bit PNGs of the upper part of each page.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from async_opd.report.comparison import comparison
from async_opd.report.forecast import forecast
from async_opd.report.recorded_run import read_recorded_run
from async_opd.report.run_report import report
from async_opd.report.verdict import judge
from tests.report.browser import chromium, opened
from tests.report.pages import write_full_run

IMAGES = Path(__file__).resolve().parent / "images"
SHOTS = (
    ("report", 1280, "light", 1500),
    ("report", 1280, "dark", 1500),
    ("report", 390, "light", 1500),
    ("compare", 1280, "light", 1200),
)


def main() -> None:
    """Makes the runs, their pages and the images."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made, contextlib.chdir(made):
        folder = Path("runs")
        one = read_recorded_run(write_full_run(folder / "teachers-2", factor=1.6, hostile=False))
        other = read_recorded_run(write_full_run(folder / "slow-trainer", 1, 3.0, hostile=False))
        verdict = judge(one)
        pages = {"report": folder / "report.html", "compare": folder / "compare.html"}
        pages["report"].write_text(report(one, verdict, str(forecast(one, verdict))))
        pages["compare"].write_text(comparison([one, other]))
        with chromium() as browser:
            for name, width, scheme, height in SHOTS:
                with opened(browser, pages[name], width, scheme) as (page, _):
                    clip = {"x": 0, "y": 0, "width": width, "height": height}
                    file = IMAGES / f"{name}-{width}-{scheme}.png"
                    page.screenshot(path=file, full_page=True, clip=clip)
                    print(file, f"{file.stat().st_size >> 10} KiB")


if __name__ == "__main__":
    main()
