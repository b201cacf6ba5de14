"""The places of the documentation's pages that messages name."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.util.files import located_pages

WEB = "https://code.example/wattspan/blob/main/"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    page = tmp_path / "docs/how-to/see-spans.md"
    page.parent.mkdir(parents=True)
    page.touch()
    return tmp_path


def test_installed_page_has_its_path(installed: Path) -> None:
    text = located_pages("No span: see docs/how-to/see-spans.md.", installed, WEB)
    assert text == f"No span: see {installed}/docs/how-to/see-spans.md."


def test_page_that_is_not_installed_has_its_public_address(installed: Path) -> None:
    text = located_pages("docs/reference/caps.md, docs/tutorial.md", installed, WEB)
    assert text == f"{WEB}docs/reference/caps.md, {WEB}docs/tutorial.md"


def test_page_without_a_place_has_its_path_in_the_repository(tmp_path: Path) -> None:
    text = "see docs/reference/caps.md"
    assert located_pages(text, tmp_path, "") == text


@pytest.mark.parametrize("public", ["", WEB])
def test_place_is_not_replaced_again(installed: Path, public: str) -> None:
    once = located_pages("docs/tutorial.md, docs/how-to/see-spans.md", installed, public)
    assert located_pages(once, installed, public) == once


@pytest.mark.parametrize("text", ["../docs/tutorial.md", "/usr/docs/a.md", "mydocs/a.md", "docs/"])
def test_other_paths_stay(text: str, tmp_path: Path) -> None:
    assert located_pages(text, tmp_path, WEB) == text
