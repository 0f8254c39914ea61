"""One self-contained HTML page: sections with text, tables and charts; no network, no eval.

Everything that comes from a run is escaped here, in ``text`` or in the JSON of the charts. The
scripts are vl-convert's bundle of Vega and page.js; the page's policy allows these two by their
digests and no other script, and no request of any kind.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from async_opd.core.errors import ConfigError
from async_opd.core.printable import escaped
from async_opd.tools.report.charts import Chart


@dataclass(frozen=True)
class Section:
    """A part of the page with an entry in its navigation; ``html`` is escaped already."""

    key: str
    title: str
    html: str
    charts: tuple[Chart, ...] = ()


def page(title: str, head: str, sections: Sequence[Section]) -> str:
    """The whole page. ConfigError if the extra ``report`` is not installed."""
    charts = {chart.key: chart.spec for section in sections for chart in section.charts}
    own = files("async_opd.tools.report")
    scripts = [_bundle(), own.joinpath("page.js").read_text(encoding="utf-8")]
    style = own.joinpath("page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{one.key}">{text(one.title)}</a>' for one in sections)
    body = "".join(
        f'<section aria-labelledby="{one.key}"><h2 id="{one.key}">{text(one.title)}</h2>{one.html}'
        f"{figures(one.charts)}</section>"
        for one in sections
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f'<header><div class="in">{head}</div></header>\n'
        f'<nav aria-label="Sections"><div class="in">{links}</div></nav>\n'
        f"<main>{body}</main>\n"
        f'<script type="application/json" id="charts">{inert(charts)}</script>\n'
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def text(value: str) -> str:
    """Text of a run for an element or an attribute, without control characters."""
    return escape(escaped(value))


def figures(charts: Sequence[Chart]) -> str:
    """Each chart with its title, its note, and its numbers as a table that can be opened."""
    if not charts:
        return ""
    wide = {charts[-1].key} if len(charts) % 2 else set[str]()
    return '<div class="charts">' + "".join(_figure(c, c.key in wide) for c in charts) + "</div>"


def _figure(chart: Chart, wide: bool) -> str:
    return (
        f"<figure{' class=wide' * wide}><figcaption><h3>{text(chart.title)}</h3>"
        f"<p>{text(chart.note)}</p></figcaption>"
        f'<div class="chart" id="chart-{chart.key}" data-title="{text(chart.title)}"></div>'
        f'<details><summary>Numbers<span class="hidden"> of {text(chart.title)}</span></summary>'
        f"{table(chart.columns, chart.rows)}</details></figure>"
    )


def table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by keyboard, too."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Table"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def tiles(found: Iterable[tuple[str, str]]) -> str:
    """Key figures: (name, value)."""
    cells = (f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in found)
    return f'<dl class="tiles">{"".join(cells)}</dl>'


def paragraphs(found: Iterable[str], kind: str = "") -> str:
    """A paragraph for each text that is not empty."""
    opening = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{opening}{text(one)}</p>" for one in found if one)


def folded(title: str, content: str) -> str:
    """Preformatted text that can be opened."""
    return (
        f"<details><summary>{text(title)}</summary>"
        f'<pre tabindex="0">{text(content)}</pre></details>'
    )


def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, from the installed vl-convert."""
    try:
        import vl_convert
    except ImportError:
        remedy = 'pip install "async-opd[report]"'
        message = "vl-convert-python, whose charts the page has, is not installed"
        raise ConfigError.of("", message, remedy, "async_opd report") from None
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script")


def _policy(scripts: Iterable[str]) -> str:
    """Content-Security-Policy: these scripts, styles of the page, and nothing from outside."""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(one).decode()}'" for one in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def inert(value: Any) -> str:
    """JSON that cannot end its script element."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
