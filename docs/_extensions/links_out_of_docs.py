"""Links between the pages and the files beside docs/.

Links in Markdown are relative to the file, so that they work where files are read as files. Some
files outside of docs/ are pages of the site, which include them:

    CHANGELOG.md  ◄──include── docs/project/changelog.md        a link to CHANGELOG.md from any page
                                                                leads to project/changelog
A link in an included file is made relative to the page that includes it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PROJECT = DOCS.parent
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")

#: Files of the project and the page of the site for each.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "examples/README.md": "project/examples.md",
}


def absent() -> list[str]:
    """Pages whose file does not exist: they are left out."""
    return [page for file, page in PAGES.items() if not (PROJECT / file).is_file()]


def relative(text: str, file: Path, page: Path) -> str:
    """The links of a file as they are written in a page.

    Args:
        text: what the file says.
        file: where it lies.
        page: the page of the site that shows it, the file itself or one that includes it.
    """

    def rewrite(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(file.parent / link[1]))
        if not target.exists():
            return link[1]
        inside = target.relative_to(PROJECT).as_posix() if target.is_relative_to(PROJECT) else ""
        if inside in PAGES:
            target = DOCS / PAGES[inside]
        return Path(os.path.relpath(target, page.parent)).as_posix()

    return LINK.sub(rewrite, text)


def on_page(app: Any, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    content[0] = relative(content[0], page, page)


def on_include(app: Any, path: Path, parent: str, content: list[str]) -> None:
    file = Path(os.path.normpath(DOCS / path))
    page = DOCS / PAGES.get(file.relative_to(PROJECT).as_posix(), f"{parent}.md")
    content[0] = relative(content[0], file, page)


def setup(app: Any) -> dict[str, Any]:
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True}
