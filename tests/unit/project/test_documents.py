"""The pages of the documentation: every link and anchor leads somewhere, every page is reached."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from testbed.requirements import ROOT
from testbed.sources import documents, parsed, tracked

DOCS = ROOT / "docs"
START = [
    DOCS / "start" / f"{reader}.md"
    for reader in ("operator", "application-author", "platform-engineer", "researcher")
]
LINK = re.compile(r"(?<!\\)\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")
SOURCES = {".py", ".toml", ".yml", ".yaml", ".js", ".service", ".json"}
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
ROWS = re.compile(r"<!-- rows of (\w+) -->(.*?)<!-- end of rows -->", re.DOTALL)
LOCATED = (
    "agent/wattspan/cli/tune/reasons.toml",  # by explanation.py
    "exporters/wattspan_exporters/page/static/",  # by the live page
)
"""Texts whose reader replaces the paths of pages by `located_pages`."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def prose(path: Path) -> str:
    """The text of a page without its blocks of code, in which a `#` begins a comment."""
    return FENCE.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> frozenset[str]:
    """The anchors of the headings of a page, as GitHub makes them."""
    titles, found = list[str](), set[str]()
    for title in re.findall(r"^#+ (.+?) *$", prose(path), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        bare = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        same = titles.count(bare)
        titles.append(bare)
        found.add(f"{bare}-{same}" if same else bare)
    return frozenset(found)


@cache
def links(path: Path) -> tuple[tuple[Path, str], ...]:
    """The file and the anchor of each link of a page within the project."""
    found = LINK.findall(prose(path))
    return tuple(((path.parent / page if page else path).resolve(), at) for page, at in found)


def test_every_link_in_a_document_leads_somewhere() -> None:
    found = [(page, *link) for page in documents() for link in links(page)]
    assert len(found) > 500
    assert [(name(page), name(to)) for page, to, _ in found if not to.exists()] == []


def test_every_anchor_of_a_link_is_a_heading_of_its_page() -> None:
    found = [(page, *link) for page in documents() for link in links(page) if link[1]]
    assert len(found) > 100
    lost = [(name(p), f"{name(to)}#{at}") for p, to, at in found if at not in anchors(to)]
    assert lost == []


def test_every_page_that_the_sources_name_exists_with_its_heading() -> None:
    """Messages, rules and units name pages of docs/, some below a public address."""
    named = re.compile(r"(docs/[\w./-]+\.md)(?:#([\w-]+))?")
    folders = ("agent", "exporters", "dashboards", "packaging", "systemd")
    files = [p for f in folders for p in (ROOT / f).rglob("*.*") if p.suffix in SOURCES]
    found = [
        (name(path), ROOT / page, at)
        for path in files
        for page, at in named.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(found) > 40
    assert [one for one in found if not one[1].exists()] == []
    assert [one for one in found if one[2] and one[2] not in anchors(one[1])] == []


def test_messages_name_the_place_of_a_page() -> None:
    """A path in the repository helps nobody on a host with the package."""
    named = {
        name(path)
        for path in tracked()
        if path.relative_to(ROOT).parts[0] in {"agent", "exporters"} and path.suffix in SOURCES
        if any("docs/" in text and ".md" in text for text in messages(path))
    }
    located = {one for one in named if "located_pages(" in (ROOT / one).read_text("utf-8")}
    assert len(located) >= 2
    assert {one for one in named - located if not one.startswith(LOCATED)} == set()


def messages(path: Path) -> Iterator[str]:
    """The strings of a module without docstrings; of other sources the lines without comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        return
    tree = parsed(path)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value


def test_every_page_is_reached_from_the_index() -> None:
    reached, ahead = set(), [DOCS / "index.md", *START]
    while ahead:
        page = ahead.pop()
        if page not in reached and page.suffix == ".md" and page.is_relative_to(DOCS):
            reached.add(page)
            ahead += [to for to, _ in links(page)]
    assert sorted(map(name, set(DOCS.rglob("*.md")) - reached)) == []


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "index.md"], ids=name)
def test_entrance_leads_to_every_start_page(page: Path) -> None:
    assert [name(one) for one in START if one not in {to for to, _ in links(page)}] == []


@pytest.mark.parametrize("page", START, ids=lambda page: page.stem)
def test_start_page_is_short_and_has_five_next_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 400
    steps = re.findall(r"^\d\. \[", text.partition("\n## Next\n")[2], re.MULTILINE)
    assert len(steps) == 5


def test_rows_on_a_page_of_results_are_those_of_the_complete_table() -> None:
    tables = (ROOT / "benchmarks" / "tables.md").read_text(encoding="utf-8")
    found = ROWS.findall((DOCS / "accuracy.md").read_text(encoding="utf-8"))
    assert len(found) >= 5
    for script, rows in found:
        complete = tables.split(f"<!-- begin {script} -->")[1].split("<!-- end ")[0].splitlines()
        assert [row for row in rows.strip().splitlines() if row not in complete] == [], script


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("429", "429"),
        ("`GET /v1/energy`", "get-v1energy"),
        ("`of=devices`: energy of devices", "ofdevices-energy-of-devices"),
        ("Output of [tune](x.md#y)", "output-of-tune"),
    ],
)
def test_anchor_of_a_title_is_that_of_github(title: str, anchor: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# {title}\n\n```sh\n# no heading\n```\n\n## {title}\n")
    assert anchors(page) == {anchor, f"{anchor}-1"}
