"""The site of the docs in a headless chromium: `make test-pages`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.test_site import DOCS, build
from tests.pages.chromium import Browser, browser

SIZES = [(390, False), (390, True), (1280, False), (1280, True)]
#: Browser.open waits for a mark that the pages of a report set themselves.
READY = "addEventListener('load', () => { document.documentElement.dataset.ready = '1'; })"
#: What reaches beyond the right edge of the screen and cannot be scrolled to within a part.
WIDE = """(() => {
  const scrolls = one => one && one.matches('article *') &&
    (['auto', 'scroll'].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
  return [...document.querySelectorAll('article *')]
    .filter(one => one.getBoundingClientRect().right > innerWidth + 1 && !scrolls(one))
    .map(one => one.tagName + ': ' + one.textContent.trim().slice(0, 60));
})()"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as found:
        found.call("Page.addScriptToEvaluateOnNewDocument", source=READY)
        yield found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "html"
    done = build(DOCS, out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_no_page_overflows_or_complains(
    chrome: Browser, site: Path, width: int, dark: bool
) -> None:
    pages = sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)
    assert len(pages) > 40
    found = {}
    for page in pages:
        chrome.open(page, width, dark=dark)
        over = chrome.value("document.documentElement.scrollWidth") - width
        told = [*chrome.complaints(), *chrome.value(WIDE), *([f"{over} px"] if over > 0 else [])]
        told += [a for a in chrome.requests() if not a.startswith(("file:", "data:"))]
        if told:
            found[page.relative_to(site).as_posix()] = told
    assert found == {}


def test_the_pages_follow_the_systems_colours(chrome: Browser, site: Path) -> None:
    shades = []
    for dark in (False, True):
        chrome.open(site / "index.html", 1280, dark=dark)
        colour = chrome.value("getComputedStyle(document.body).backgroundColor")
        shades.append(sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(", "))))
    assert shades[0] > 600
    assert shades[1] < 150


def test_the_search_finds_a_name(chrome: Browser, site: Path) -> None:
    chrome.open(site / "search.html", 1280)
    found = chrome.value("""new Promise(done => {
      Search.performSearch('GateHistory');
      const look = () => {
        const links = [...document.querySelectorAll('#search-results li a')];
        links.length ? done(links.map(one => one.getAttribute('href'))) : setTimeout(look, 5);
      };
      look();
    })""")
    assert any(link.startswith("reference/gate_history.html") for link in found), found
