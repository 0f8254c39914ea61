"""Reports and comparisons in a real browser: drawn, legible, reachable by keyboard, inert."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from async_opd.tools.report.comparison import comparison
from async_opd.tools.report.recorded_run import read_recorded_run
from async_opd.tools.report.run_report import report
from async_opd.tools.report.verdict import judge
from tests.tools.report.browser import CHROMIUM, CONTRASTS, OVERFLOWING, chromium, opened
from tests.tools.report.pages import write_full_run

pytest.importorskip("vl_convert", reason="the extra report is not installed")
pytest.importorskip("playwright", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
CONTRAST = 4.5
LOOKS = [(width, scheme) for width in (390, 1280) for scheme in ("light", "dark")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    one = read_recorded_run(write_full_run(folder / "one"))
    other = read_recorded_run(write_full_run(folder / "other", seed=1, factor=3.0))
    files = {"report": folder / "report.html", "compare": folder / "compare.html"}
    files["report"].write_text(report(one, judge(one), "The plan predicts +20 %."))
    files["compare"].write_text(comparison([one, other]))
    return files


@pytest.fixture(scope="module")
def browser(pages: dict[str, Path]) -> Iterator[Any]:
    """After ``pages``: playwright's event loop runs on, and no other may run beside it."""
    with chromium() as found:
        yield found


@pytest.fixture(params=["report", "compare"])
def file(request: pytest.FixtureRequest, pages: dict[str, Path]) -> Path:
    return pages[request.param]


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_a_page_is_drawn_legibly_without_a_word_on_the_console(
    browser: Any, file: Path, width: int, scheme: str
) -> None:
    with opened(browser, file, width, scheme) as (page, said):
        charts = page.locator(".chart").count()
        assert charts >= 4
        assert page.locator(".chart svg").count() == charts
        page.evaluate("document.querySelectorAll('details').forEach((d) => d.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERFLOWING) == []
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 100
        assert [found for found in contrasts if found[0] < CONTRAST] == []
        assert said == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_bars_of_a_life_distinguish_work_from_waiting_by_their_height_and_say_what_they_are(
    browser: Any, pages: dict[str, Path], width: int
) -> None:
    heights = """(key) => [...document.getElementById(`chart-${key}`)
      .querySelectorAll('[aria-roledescription="bar"]')]
      .map((b) => [/: (work|waiting)/.exec(b.ariaLabel)[1], b.getBBox().height])"""
    with opened(browser, pages["report"], width, "light") as (page, said):
        for key in ("life", "lives"):
            found = page.evaluate(heights, key)
            assert {kind for kind, _ in found} == {"work", "waiting"}
            work = min(height for kind, height in found if kind == "work")
            assert work > 3 * max(height for kind, height in found if kind == "waiting")
        page.locator('#chart-lives [aria-label*="is scored"]').last.hover()
        told = page.locator("#vg-tooltip-element").inner_text()
        assert "is scored" in told
        assert "slowest" in told
        page.locator("figure:has(#chart-lives) summary").press("Enter")
        table = page.locator("figure:has(#chart-lives) table")
        assert table.get_by_text("second slowest").count() >= 5
        assert page.evaluate(OVERFLOWING) == []
        assert said == []


def test_a_script_in_a_text_of_the_run_does_not_run(browser: Any, file: Path) -> None:
    with opened(browser, file, 1280, "light") as (page, said):
        for point in page.locator(".chart").all():
            point.hover()
        assert page.title() != "ran"
        assert page.locator('img:not([src^="data:image/png;base64,"])').count() == 0
        assert said == []


def test_the_policy_stops_a_script_and_a_request_that_are_put_into_the_page(
    browser: Any, pages: dict[str, Path], tmp_path: Path
) -> None:
    evil = '<script>document.title = "ran"</script><img src="https://example.org/x.png">'
    changed = tmp_path / "changed.html"
    changed.write_text(pages["report"].read_text().replace("</main>", f"{evil}</main>"))
    with opened(browser, changed, 1280, "light") as (page, said):
        assert page.title() != "ran"
        assert sum("Content Security Policy" in line for line in said) >= 2


def test_the_keyboard_reaches_links_and_tables(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"], 1280, "light") as (page, _):
        wanted = page.locator("nav a").count() + page.locator("summary").count()
        reached = set()
        for _ in range(3 * wanted):
            page.keyboard.press("Tab")
            reached.add(
                page.evaluate(
                    "((document.activeElement.closest('.sample') ? 'SAMPLE ' : '') "
                    "+ document.activeElement.tagName + ' ' "
                    "+ document.activeElement.textContent.slice(0, 60))"
                )
            )
        assert sum(one.startswith(("A ", "SUMMARY ")) for one in reached) == wanted
        assert any(one.startswith("SAMPLE SPAN ") for one in reached)
        page.locator("summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("details").first.get_attribute("open") is not None
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "scroll"


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_images_of_samples_are_drawn_named_and_reached_by_keyboard(
    browser: Any, pages: dict[str, Path], width: int, scheme: str
) -> None:
    with opened(browser, pages["report"], width, scheme) as (page, said):
        drawn = page.locator(".images img")
        assert drawn.count() >= 6
        sizes = drawn.evaluate_all("all => all.map((one) => [one.naturalWidth, one.width])")
        assert all(natural == 256 and 200 < shown <= 258 for natural, shown in sizes)
        assert drawn.first.get_attribute("alt") == "Image 1 of 2, 320 x 200 pixels"
        assert page.locator(".images span").first.inner_text() == "<image 64x48>"
        page.locator(".answer .images").first.focus()
        label = page.evaluate("document.activeElement.getAttribute('aria-label')")
        assert label == "Images of 0:0#0/0"
        assert said == []


def test_tokens_are_shown_by_pointer_and_by_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    with opened(browser, pages["report"], 1280, "light") as (page, said):
        sample = page.locator(".sample").first
        tokens, panel = sample.locator(".tok"), sample.locator(".panel")
        tokens.nth(2).hover()
        assert panel.locator("tr", has_text="at").first.inner_text().split() == ["at", "2"]
        assert panel.locator("table").count() == 4
        tokens.nth(2).focus()
        page.keyboard.press("ArrowRight")
        assert panel.locator("tr", has_text="at").first.inner_text().split() == ["at", "3"]
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert panel.locator("tr", has_text="at").first.inner_text().split() == ["at", "1"]
        assert sample.locator('.tok[tabindex="0"]').count() == 1
        colours = (
            "() => [...document.querySelectorAll('.tok')]"
            ".map((t) => getComputedStyle(t).backgroundColor)"
        )
        by_loss = page.evaluate(colours)
        page.locator('input[value="gap"]').check()
        assert len(set(by_loss)) > 2
        assert page.evaluate(colours) != by_loss
        assert page.evaluate(OVERFLOWING) == []
        assert [found for found in page.evaluate(CONTRASTS) if found[0] < CONTRAST] == []
        assert said == []


def test_the_charts_follow_the_colour_scheme(browser: Any, pages: dict[str, Path]) -> None:
    label = ".chart svg text"
    with opened(browser, pages["report"], 1280, "light") as (page, _):
        light = page.locator(label).first.get_attribute("fill")
        page.emulate_media(color_scheme="dark")
        page.wait_for_selector("html[data-drawn]", state="attached")
        page.wait_for_function(
            f"(was) => document.querySelector('{label}')?.getAttribute('fill') !== was", arg=light
        )
