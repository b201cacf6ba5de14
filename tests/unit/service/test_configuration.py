"""Sockets on which an agent or a command looks for the capper, and the second of spans."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.capper.host_directory import HostClaim, HostDirectory
from wattspan.config import AgentSettings, Config, SettingOrigin, SpansSettings
from wattspan.http.sockets import other_loopback
from wattspan.model.settings import Listen
from wattspan.service.configuration import capper_addresses, second_listener

SYSTEM = Path("/run/wattspan-capper/capper.sock")


@pytest.fixture
def host(tmp_path: Path) -> HostDirectory:
    """A host on which another agent's capper serves."""
    claim = HostClaim(tmp_path / "host")
    claim.publish(tmp_path / "other" / "capper.sock", tmp_path / "journal")
    return HostDirectory(tmp_path / "host")


def paths(config: Config, host: HostDirectory | None, **options: bool) -> list[Path]:
    return [place.path for place in capper_addresses(config, host, **options)]


def own(tmp_path: Path) -> Config:
    return Config(agent=AgentSettings(run_dir=str(tmp_path / "own")))


def test_agent_with_a_run_directory_tries_its_own_capper_first(
    tmp_path: Path, host: HostDirectory
) -> None:
    expected = [tmp_path / "own/capper.sock", tmp_path / "other/capper.sock"]
    assert paths(own(tmp_path), host, emulated=False) == expected
    assert paths(own(tmp_path), host) == expected


@pytest.mark.needs_root
def test_default_agent_of_root_tries_the_serving_capper_before_the_systems(
    tmp_path: Path, host: HostDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a connection to the system's socket would start the system's capper
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert paths(Config(), host, emulated=False) == [tmp_path / "other/capper.sock", SYSTEM]


def test_emulated_agent_uses_its_own_capper_only(tmp_path: Path) -> None:
    assert paths(own(tmp_path), None, emulated=True) == [tmp_path / "own/capper.sock"]


def test_command_that_restores_limits_uses_no_other_agents_capper(
    tmp_path: Path, host: HostDirectory
) -> None:
    assert paths(own(tmp_path), host, shared=False) == [tmp_path / "own/capper.sock"]


def test_missing_link_leaves_the_usual_sockets(tmp_path: Path) -> None:
    assert paths(own(tmp_path), HostDirectory(tmp_path / "none")) == [tmp_path / "own/capper.sock"]


@pytest.mark.parametrize(
    ("http", "asked", "forward", "expected"),
    [
        ("127.0.0.1:4318", False, "", "[::1]:4318"),
        ("127.0.0.1:4318", True, "", "[::1]:4318"),  # as the file of the package shows it
        ("127.0.0.1:4319", True, "", None),
        ("", True, "", None),
        ("127.0.0.1:4318", False, "http://[::1]:4318", None),  # the collector
        ("127.0.0.1:4318", False, "http://[::1]:4319", "[::1]:4318"),
        ("127.0.0.1:4318", False, "nonsense", "[::1]:4318"),
    ],
)
def test_spans_have_a_second_listener_at_the_default_address_only(
    http: str, forward: str, expected: str | None, *, asked: bool
) -> None:
    if other_loopback(SpansSettings().http) is None:
        pytest.skip("this host has no IPv6")
    origins = {"spans.http": SettingOrigin("file", "a file")} if asked else {}
    spans = SpansSettings(http=Listen(http), forward=forward)
    assert second_listener(Config(spans=spans, origins=origins)) == expected
