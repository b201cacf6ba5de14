"""The reference page says what the tables say, and the tables say everything."""

from pathlib import Path

import pytest

from wattspan.config import Schema, variable
from wattspan.config.reference import page
from wattspan.plugins import discover
from wattspan.settings import each_key

PAGE = Path(__file__).parents[2] / "docs/reference/configuration.md"
TABLES = discover().schema.tables


def test_no_installed_plugin_is_broken() -> None:
    assert [str(broken) for broken in discover().broken] == []


@pytest.mark.parametrize("where", TABLES)
def test_every_table_says_what_it_is(where: str) -> None:
    assert (TABLES[where].__dict__.get("__doc__") or "").strip().endswith(".")


@pytest.mark.parametrize(
    ("dotted", "key"), list(each_key(TABLES)), ids=lambda value: str(value)[:40]
)
def test_every_key_says_what_it_is_for(dotted: str, key: object) -> None:
    assert getattr(key, "doc", "").endswith("."), f"{dotted} has no `about`"


def test_no_two_keys_share_a_variable() -> None:
    names = [variable(dotted) for dotted, _ in each_key(TABLES)]
    assert len(names) == len(set(names))


def test_the_page_is_what_the_command_prints() -> None:
    assert PAGE.read_text() == page(TABLES), "run: wattspan config reference > " + str(PAGE)


def test_the_page_of_the_agents_own_tables_names_every_key() -> None:
    text = page(Schema().tables)
    for dotted, key in each_key(Schema().tables):
        assert f"### `{key.name}`" in text
        assert f"`{variable(dotted)}`" in text
