"""Where a capper was, by a configuration that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from wattspan.cli.caps import FallbackConfiguration, load_fallback
from wattspan.config import AgentSettings

PLACES = '[agent]\nstate_dir = "/srv/state"\nrun_dir = "/srv/run"\n'
DEFAULT = AgentSettings().state_dir


def found(folder: Path, text: str, *settings: str, **environ: str) -> FallbackConfiguration:
    path = folder / "config.toml"
    path.write_text(text)
    return load_fallback(path, settings, environ)


@pytest.mark.parametrize("fault", ["[caps]\nfloor_wats = 1\n", "[cups]\n", "interval = 5\n"])
def test_directories_are_those_of_a_file_that_has_a_fault_elsewhere(
    fault: str, tmp_path: Path
) -> None:
    told = found(tmp_path, PLACES + fault)
    agent = told.config.agent
    assert (agent.state_dir, agent.run_dir) == ("/srv/state", "/srv/run")
    assert not told.guessed


def test_option_overrides_environment_and_environment_overrides_file(tmp_path: Path) -> None:
    environ = {"WATTSPAN_AGENT_STATE_DIR": "/environment", "WATTSPAN_CAPS_FLOOR": "low"}
    option = "agent.state_dir = /option"
    assert found(tmp_path, PLACES, **environ).config.agent.state_dir == "/environment"
    assert found(tmp_path, PLACES, option, **environ).config.agent.state_dir == "/option"


def test_option_value_with_an_invalid_file_is_not_a_guess(tmp_path: Path) -> None:
    told = found(tmp_path, "[agent\n", WATTSPAN_AGENT_STATE_DIR="/environment")
    assert told.config.agent.state_dir == "/environment"
    assert not told.guessed


@pytest.mark.parametrize(
    "text",
    [
        "[agent\n",
        '[agent]\nstate_dri = "/srv/state"\n',
        '[agnet]\nstate_dir = "/srv/state"\n',
        "agent = 3\n",
        "[agent]\nstate_dir = 3\n",
    ],
)
def test_default_is_a_guess_if_the_file_is_invalid_at_the_key(text: str, tmp_path: Path) -> None:
    told = found(tmp_path, text)
    assert told.guessed
    assert told.config.agent.state_dir == DEFAULT


def test_default_is_not_a_guess_if_the_fault_is_elsewhere(tmp_path: Path) -> None:
    assert not found(tmp_path, "[caps]\nfloor_wats = 1\n").guessed


def test_missing_named_file_makes_every_default_a_guess(tmp_path: Path) -> None:
    assert load_fallback(tmp_path / "none.toml", (), {}).guessed
    assert not load_fallback(None, (), {}, default=tmp_path / "none.toml").guessed
