"""The site of docs/ (`make docs`): built without a warning, nothing from other hosts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tools.report.browser import CHROMIUM, OVERFLOWING, chromium

pytest.importorskip("material", reason="the extra docs is not installed")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [str(path.relative_to(DOCS)) for path in sorted(DOCS.rglob("*.md"))]
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "form": "action"}
"""Attributes whose address a browser opens by itself; of links those that do not navigate."""
COUNTED = ("h1", "h2", "h3", "table", "tr", "li", "pre", "code", "strong", "em", "img")


class Elements(HTMLParser):
    """Counts the elements of a page, and keeps the addresses that a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A link that is canonical or leads to other pages is not loaded."""
        found = dict(attrs)
        self.counts[tag] += 1
        at = LOADED.get(tag)
        if tag == "link" and found.get("rel") not in ("canonical", "next", "prev"):
            at = "href"
        self.loaded.append((at and found.get(at)) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site is built: a warning, as of a broken link, is an error."""
    to = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(to)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return to


def body(site: Path, page: str) -> str:
    """The HTML of a page's own text."""
    text = (site / page).with_suffix(".html").read_text()
    return text[text.index("<article") : text.index("</article")]


def test_nothing_of_a_page_is_loaded_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        addresses = Elements(page.read_text()).loaded
        assert [one for one in addresses if re.match(r"\w+:|//", one)] == [], page
    for sheet in site.rglob("*.css"):
        named = re.findall(r"(?:url\(|@import)\s*[\"']?(https?:|//)", sheet.read_text())
        assert named == [], sheet


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_elements_that_it_has_on_github(site: Path, page: str) -> None:
    """The Markdown of the site takes no list without an empty line before it, for example."""
    from markdown_it import MarkdownIt

    github = MarkdownIt("commonmark").enable("table").render((DOCS / page).read_text())
    expected, shown = Elements(github).counts, Elements(body(site, page)).counts
    assert {tag: shown[tag] for tag in COUNTED} == {tag: expected[tag] for tag in COUNTED}


def test_a_link_to_a_file_outside_of_the_docs_leads_to_a_page_that_shows_it(site: Path) -> None:
    page = "repository/examples/recipes/domain_recovery.yaml.html"
    assert f'href="{page}"' in body(site, "recipes.md")
    assert 'href="../architecture.html"' in body(site, "repository/CONTRIBUTING.md")
    recipe = (ROOT / "examples/recipes/domain_recovery.yaml").read_text()
    shown = re.sub(r"<[^>]+>", "", (site / page).read_text())
    assert recipe.splitlines()[0] in shown


@pytest.fixture(scope="module")
def browser(site: Path) -> Iterator[Any]:
    """After ``site``: playwright's event loop runs on, and no other may run beside it."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with chromium() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_window_and_takes_the_readers_colours(
    browser: Any, site: Path, width: int, scheme: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index.html", "architecture.html", "config.html"):
        page.goto((site / name).as_uri())
        page.wait_for_selector("body[data-md-color-scheme]", state="attached")
        expected = {"light": "default", "dark": "slate"}[scheme]
        assert page.locator("body").get_attribute("data-md-color-scheme") == expected
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, (name, page.evaluate(OVERFLOWING)[:5])
    assert [url for url in asked if not url.startswith("file:")] == []
    context.close()
