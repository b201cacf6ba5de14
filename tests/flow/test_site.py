"""``make site``: a strict build of all pages, which load nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from testbed.requirements import ROOT

pytestmark = pytest.mark.needs_site

LOADED = {"src", "srcset", "data", "poster"}
"""Attributes whose address a browser loads, of any element; ``href`` it loads of links only."""


class Addresses(HTMLParser):
    """Addresses that a page loads, addresses it leads to, and anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "href" and tag == "a":
                self.links.append(value or "")
            elif name in LOADED or (name == "href" and tag in {"link", "use", "image"}):
                self.loaded.append(value or "")
            elif name == "id":
                self.anchors.add(value or "")


@cache
def addresses(page: Path) -> Addresses:
    found = Addresses()
    found.feed(page.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, ROOT / "scripts" / "site.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "html"


def pages(site: Path) -> Iterator[Path]:
    return (page for page in site.rglob("*.html") if page.name != "404.html")


def test_every_page_of_the_documentation_is_built(site: Path) -> None:
    index = {"README.html": "index.html"}
    for source in (ROOT / "docs").rglob("*.md"):
        built = source.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / built.with_name(index.get(built.name, built.name))).exists(), source


def test_browser_loads_nothing_from_elsewhere(site: Path) -> None:
    loaded = {url for page in pages(site) for url in addresses(page).loaded}
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        loaded |= set(re.findall(r"url\(\s*[\"']?([^\"')]+)", text))
        loaded |= set(re.findall(r"@import\s+[\"']([^\"']+)", text))
    assert len(loaded) > 10
    remote = [url for url in loaded if urlsplit(url).scheme != "data" and urlsplit(url).netloc]
    assert remote == []
    schemes = {urlsplit(url).scheme for url in loaded}
    assert schemes <= {"", "data"}


def test_links_lead_to_pages_with_their_anchors(site: Path) -> None:
    lost = []
    for page in pages(site):
        for url in addresses(page).links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment) if target.suffix == ".html" else ""
            if not target.exists() or (anchor and anchor not in addresses(target).anchors):
                lost.append((page, url))
    assert lost == []


def test_search_finds_pages_and_no_files_of_the_repository(site: Path) -> None:
    index = (site / "search.json").read_text(encoding="utf-8")
    assert "reference/metrics.html" in index
    assert "wattspan_span_energy_joules_total" in index
    assert "prometheus/alerts.yml.html" not in index


def test_build_fails_on_a_lost_link(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/index.md").write_text("# A\n\n[lost](lost.md)\n")
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "a"\ndocs_dir = "pages"\n')
    generator = ROOT / ".venv-site" / "bin" / "zensical"
    done = subprocess.run(
        [generator, "build", "--strict"], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.returncode != 0
