"""The settings that an agent publishes, and a client's configuration from them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.process_rights import umask, without_root

from wattspan.config import (
    AgentSettings,
    Config,
    ConfigSchema,
    PublishedAgent,
    SettingOrigin,
    SpansSettings,
    find_published,
    load,
    publish,
    withdraw,
)
from wattspan.config.published import PUBLISHED_FILE, PUBLISHED_KEYS
from wattspan.model.settings import keys
from wattspan.plugins import discover
from wattspan.ports import ConfigError
from wattspan.service.configuration import published_agent

RUN = {"agent.run_dir": "/srv/run", "agent.state_dir": "/srv/state"}


def found(folder: Path) -> PublishedAgent:
    return find_published((str(folder / "none"), str(folder)))


def client(published: PublishedAgent, default: Path, **environ: str) -> Config:
    return load(environ=environ, default=default, published=published)


@pytest.fixture
def hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that this process may not read during the test."""
    monkeypatch.setattr(Path, "exists", os.path.exists)  # as from Python 3.14 on
    path = tmp_path / "config.toml"
    path.write_text("")
    path.chmod(0)
    with without_root():
        yield path


def test_published_settings_are_found_again(tmp_path: Path) -> None:
    agent = PublishedAgent("", "1.0", 42, True, RUN)
    path = publish(tmp_path, agent)
    assert found(tmp_path) == PublishedAgent(str(path), "1.0", 42, True, RUN)


def test_published_file_is_readable_for_everybody_whatever_the_umask(tmp_path: Path) -> None:
    with umask(0o077):
        path = publish(tmp_path, PublishedAgent())
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == [PUBLISHED_FILE]


def test_other_keys_are_neither_published_nor_used(tmp_path: Path) -> None:
    publish(tmp_path, PublishedAgent(settings={"spans.forward_headers": "s3cret", **RUN}))
    path = tmp_path / PUBLISHED_FILE
    assert "s3cret" not in path.read_text()
    path.write_text(path.read_text().replace("agent.state_dir", "cost.file"))
    assert found(tmp_path).settings == {"agent.run_dir": "/srv/run"}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"version": 1}', '{"settings": {"a": [1]}}'])
def test_invalid_published_file_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / PUBLISHED_FILE).write_text(text)
    assert found(tmp_path) == PublishedAgent()


def test_agent_withdraws_its_own_file_only(tmp_path: Path) -> None:
    publish(tmp_path, PublishedAgent(pid=42))
    withdraw(tmp_path, 43)
    assert found(tmp_path).pid == 42
    withdraw(tmp_path, 42)
    assert list(tmp_path.iterdir()) == []
    withdraw(tmp_path, 42)


def test_no_published_key_is_a_secret_or_names_one() -> None:
    schema = discover().schema
    for dotted in PUBLISHED_KEYS:
        where, _, name = dotted.rpartition(".")
        assert not keys(schema.tables[where])[name].secret
        assert not name.endswith(("_file", "_key", "headers"))


def test_agent_publishes_the_places_where_it_serves(tmp_path: Path) -> None:
    config = Config(
        agent=AgentSettings(run_dir=str(tmp_path)),
        spans=SpansSettings(forward_headers="authorization=s3cret"),
        exporters=load(environ={}, default=tmp_path / "none", schema=discover().schema).exporters,
    )
    addresses = ("http://127.0.0.1:4711/metrics", f"{tmp_path}/api.sock")
    agent = published_agent(config, addresses, emulated=False)
    assert agent.settings["exporters.prometheus.listen"] == "127.0.0.1:4711"
    assert agent.settings["agent.run_dir"] == str(tmp_path)
    assert agent.pid == os.getpid()
    assert "s3cret" not in str(agent)
    silent = published_agent(config, (), emulated=True)
    assert silent.settings["exporters.prometheus.listen"] == ""


# ------------------------------------------------------------------------------------- clients


def test_published_settings_rank_above_defaults_and_below_file_and_environment(
    tmp_path: Path,
) -> None:
    agent = PublishedAgent("/run/agent.json", settings={**RUN, "agent.api": False})
    file = tmp_path / "config.toml"
    file.write_text('[agent]\nstate_dir = "/of/file"\n')
    config = client(agent, file, WATTSPAN_AGENT_API="true")
    assert (config.agent.run_dir, config.agent.state_dir) == ("/srv/run", "/of/file")
    assert config.agent.api
    assert config.origin("agent.run_dir") == SettingOrigin("agent", "/run/agent.json")
    assert config.hidden is None


def test_published_default_is_no_origin(tmp_path: Path) -> None:
    agent = PublishedAgent("/run/agent.json", settings={"agent.run_dir": AgentSettings().run_dir})
    assert client(agent, tmp_path / "none").origins == {}


def test_published_setting_of_an_absent_plugin_is_ignored(tmp_path: Path) -> None:
    agent = PublishedAgent("/run/a", settings={"exporters.prometheus.listen": "127.0.0.1:1"})
    schema = ConfigSchema(checks_plugins=False)
    config = load(environ={}, default=tmp_path / "none", published=agent, schema=schema)
    assert config.exporters == {}


def test_unreadable_default_is_no_fault_of_a_client(hidden: Path) -> None:
    config = client(PublishedAgent("/run/agent.json", settings=RUN), hidden)
    assert (config.hidden, config.path) == (hidden, None)
    assert config.agent.state_dir == "/srv/state"
    assert config.warnings == ()


def test_client_without_a_published_file_says_that_defaults_apply(hidden: Path) -> None:
    (warning,) = client(PublishedAgent(), hidden).warnings
    assert f"{hidden} is not readable for this user" in warning
    assert "the defaults apply" in warning


def test_unreadable_default_is_a_fault_of_the_agent_itself(hidden: Path) -> None:
    with pytest.raises(ConfigError, match="permission denied"):
        load(environ={}, default=hidden)
    faults: list[str] = []
    load(environ={}, default=hidden, faults=faults)
    assert "permission denied" in faults[0]


def test_unreadable_named_file_is_a_fault_of_a_client(hidden: Path) -> None:
    with pytest.raises(ConfigError, match="permission denied"):
        load(hidden, environ={}, published=PublishedAgent("/run/agent.json", settings=RUN))
