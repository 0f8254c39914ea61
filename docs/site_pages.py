"""The hooks of mkdocs.yml: files of the repository that the docs link to are pages of the site.

``CONTRIBUTING.md`` is the page ``repository/CONTRIBUTING.md``; an example is a page that shows its
text, a folder one that shows the texts of all its files. Links to them lead there.
"""

from __future__ import annotations

import re
from os.path import normpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])[^)#\s]+")
IN_NAV = ("CONTRIBUTING.md", "CHANGELOG.md")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".ipynb": "json"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file outside of docs/ that a page of docs/ links to."""
    from mkdocs.structure.files import File, InclusionLevel

    names = set(IN_NAV)
    for file in files.documentation_pages():
        targets = (target(file.src_uri, link) for link in LINK.findall(file.content_string))
        names.update(name for name in targets if outside(name))
    for name in sorted(names):
        shown = InclusionLevel.INCLUDED if name in IN_NAV else InclusionLevel.NOT_IN_NAV
        page = File.generated(config, page_of(name), content=text_of(name), inclusion=shown)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links between docs/ and the files outside of it to the pages of the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        name = target(here, link[0])
        return relpath(page_of(name), Path(here).parent) if (ROOT / name).exists() else link[0]

    return LINK.sub(moved, markdown)


def target(page: str, link: str) -> str:
    """The file of the repository, from its root, that a link on a page of the site means."""
    outer = page.removeprefix("repository/")
    return normpath(Path(outer if outer != page else f"docs/{page}").parent / link)


def outside(name: str) -> bool:
    """Whether a file of the repository exists and lies outside of docs/."""
    return not name.startswith(("docs/", "..")) and (ROOT / name).exists()


def page_of(name: str) -> str:
    """The page of the site that shows a file of the repository."""
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return f"repository/{name}" if name.endswith(".md") else f"repository/{name}.md"


def text_of(name: str) -> str:
    """The page of a file outside of docs/: a Markdown file itself, or texts of files."""
    path = ROOT / name
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    kept = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    blocks = [
        f"## {one.relative_to(ROOT)}\n\n````{LANGUAGES[one.suffix]}\n{one.read_text('utf-8')}\n````"
        for one in kept
        if one.suffix in LANGUAGES
    ]
    return "\n\n".join([f"# {name}", *blocks])
