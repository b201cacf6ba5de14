"""Location of a capper from a broken configuration."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from testbed.process_rights import without_root

from wattspan.cli import cli
from wattspan.cli.caps import load_usable
from wattspan.cli.options import ConfigurationOptions
from wattspan.config import AgentSettings, FlagValue

PLACES = '[agent]\nstate_dir = "/srv/state"\nrun_dir = "/srv/run"\n'
DEFAULT = AgentSettings().state_dir


class Usable(NamedTuple):
    state_dir: str
    run_dir: str
    certain: bool


def found(folder: Path, text: str, state_dir: str = "") -> Usable:
    path = folder / "config.toml"
    path.write_text(text)
    flags = {"agent.state_dir": FlagValue("--set", state_dir)} if state_dir else {}
    config, certain, _ = load_usable(ConfigurationOptions(path, flags))
    return Usable(config.agent.state_dir, config.agent.run_dir, certain)


@pytest.mark.parametrize("fault", ["[caps]\nfloor_wats = 1\n", "[cups]\n", "interval = 5\n"])
def test_directories_are_those_of_a_file_that_has_a_fault_elsewhere(
    fault: str, tmp_path: Path
) -> None:
    assert found(tmp_path, PLACES + fault) == ("/srv/state", "/srv/run", True)


def test_option_overrides_file(tmp_path: Path) -> None:
    assert found(tmp_path, PLACES + "[cups]\n", "/option").state_dir == "/option"


def test_option_value_with_an_invalid_file_is_not_a_guess(tmp_path: Path) -> None:
    told = found(tmp_path, "[agent\n", "/option")
    assert (told.state_dir, told.certain) == ("/option", True)


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
    assert not told.certain
    assert told.state_dir == DEFAULT


def test_default_of_a_valid_configuration_is_not_a_guess(tmp_path: Path) -> None:
    assert found(tmp_path, "[agent]\n").certain


def test_missing_named_file_makes_every_default_a_guess(tmp_path: Path) -> None:
    assert not load_usable(ConfigurationOptions(tmp_path / "none.toml")).certain


def test_user_without_the_right_is_refused_before_anything_else_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[cups]\n")
    tmp_path.chmod(0o755)
    with without_root():
        for command in ("restore", "accept"):
            words = ["caps", command, *(["--config", str(file)] if command == "restore" else [])]
            done = CliRunner().invoke(cli, words)
            assert done.exit_code == 6
            (line,) = done.stderr.splitlines()
            assert f"`sudo wattspan caps {command}`" in line
