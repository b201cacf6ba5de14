"""The sources of the documentation's site, without its generator."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from testbed.requirements import ROOT

DOCS = ROOT / "docs"
SITE = runpy.run_path(str(ROOT / "scripts" / "site.py"))
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


@cache
def configured() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads(SITE["configuration"]())["project"]
    return settings


def pages(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
        return
    for one in navigation.values() if isinstance(navigation, dict) else navigation:
        yield from pages(one)


def test_navigation_has_every_page_once_in_three_layers() -> None:
    assert [*map(list, configured()["nav"])] == [["Guides"], ["Reference"], ["Evidence"]]
    assert sorted(pages(configured()["nav"])) == sorted(
        str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")
    )


def test_site_loads_nothing_from_elsewhere_and_states_the_version() -> None:
    assert configured()["theme"]["font"] is False
    assert configured().keys().isdisjoint({"plugins", "extra_javascript"})
    assert "@" not in configured()["copyright"]


def test_links_to_the_repository_are_staged(tmp_path: Path) -> None:
    SITE["stage"](tmp_path)
    assert not (tmp_path / "tests").exists()
    for page, name in {
        "repository/SECURITY.md": "# Security",
        "repository/dashboards/prometheus/alerts.yml.md": "````yml",
        "repository/tests/field/caps/index.md": "# `tests/field/caps/`",
    }.items():
        assert name in (tmp_path / page).read_text(encoding="utf-8")
    links = [
        (page, page.parent / target)
        for page in tmp_path.rglob("*.md")
        for target in re.findall(
            r"\]\((?![a-z]+:)([^)#\s]+)", FENCE.sub("", page.read_text(encoding="utf-8"))
        )
    ]
    assert len(links) > 500
    assert [link for link in links if not link[1].exists()] == []


@pytest.mark.parametrize("text", ["- item\n\n  ```sh\n  a\n  ```\n", "1. item\n\n   more\n"])
def test_narrow_indentation_is_found(text: str) -> None:
    assert narrow(text)


def narrow(text: str) -> list[str]:
    """Blocks of list items with less than four spaces: other parsers end the list there."""
    return re.findall(r"\n\n {1,3}\S.*", re.sub(r"(?m)^```.*?^```$", "", text, flags=re.DOTALL))


def test_blocks_of_list_items_have_four_spaces() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md")}
    assert {path: found for path, text in texts.items() if (found := narrow(text))} == {}
