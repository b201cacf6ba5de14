"""The reference page matches the tables. (That it is up to date: test_project.)"""

from wattspan.config import ConfigSchema, environment_variable
from wattspan.config.writing import reference_page
from wattspan.model.settings import each_key
from wattspan.plugins import discover

TABLES = discover().schema.tables


def test_builtin_plugins_load() -> None:
    assert [str(broken) for broken in discover().broken] == []


def test_every_table_has_a_description() -> None:
    said = {where: table.__dict__.get("__doc__") or "" for where, table in TABLES.items()}
    assert [where for where, text in said.items() if not text.strip().endswith(".")] == []


def test_environment_variables_of_keys_are_unique() -> None:
    names = [environment_variable(dotted) for dotted, _ in each_key(TABLES)]
    assert len(names) == len(set(names))


def test_page_names_every_key_and_its_variable() -> None:
    text = reference_page(ConfigSchema().tables)
    for dotted, key in each_key(ConfigSchema().tables):
        assert f"### `{key.name}`" in text
        assert f"`{environment_variable(dotted)}`" in text
