"""The image's recipe names existing files, and its build makes the program."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT

from wattspan.cli import cli

FOLDER = ROOT / "packaging" / "container"
GUIDE = ROOT / "docs" / "how-to" / "run-in-a-container.md"
RECIPE = (FOLDER / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", RECIPE, re.MULTILINE)


def copied() -> list[str]:
    """Files of the source tree in the build stage."""
    return [
        name for line in instructions("COPY") if "--from" not in line for name in line.split()[:-1]
    ]


def services() -> dict[str, dict[str, Any]]:
    composed = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))
    return dict(composed["services"])


def test_copied_paths_exist_and_are_not_ignored() -> None:
    ignored = (FOLDER / "Containerfile.dockerignore").read_text().splitlines()
    let_in = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored
    for name in copied():
        assert (ROOT / name).exists(), name
        assert any(fnmatch.fnmatch(name, pattern) for pattern in let_in), name


def test_stages_follow_each_other_and_the_last_is_not_root() -> None:
    assert len(instructions("FROM")) == 2
    last = RECIPE[RECIPE.rindex("\nFROM ") :]
    assert re.search(r"^COPY --from=build (\S+) \1$", last, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", last, re.MULTILINE) == ["59949:59949"]
    assert "--uid 59949" in last
    assert "--gid 59949" in last


def test_image_is_of_this_version_everywhere() -> None:
    assert f"VERSION={VERSION}" in instructions("ARG")
    named = re.findall(r"wattspan:(\d+\.\d+\.\d+)", RECIPE)
    composed = {one["image"] for one in services().values() if "image" in one}
    assert {f"wattspan:{tag}" for tag in named} | composed == {f"wattspan:{VERSION}"}


def test_image_runs_commands_of_the_program() -> None:
    assert instructions("ENTRYPOINT") == ['["wattspan"]']
    assert instructions("CMD")[-1] == '["run"]'
    assert CliRunner().invoke(cli, ["run", "--help"]).exit_code == 0


def test_service_environment_holds_known_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for one in services().values():
        for name, value in one.get("environment", {}).items():
            if name.startswith("WATTSPAN_"):
                monkeypatch.setenv(name, value)
    done = CliRunner().invoke(cli, ["config", "show"])
    assert done.exit_code == 0, done.output
    assert 'sysfs = "/host/sys"' in done.output


def test_no_service_has_a_capability_or_can_write_to_the_host() -> None:
    agent = services()["agent"]
    assert agent["cap_drop"] == ["ALL"]
    assert "cap_add" not in agent
    assert "privileged" not in agent
    assert agent["read_only"] is True
    assert "no-new-privileges:true" in agent["security_opt"]
    binds = [one for one in agent["volumes"] if isinstance(one, dict)]
    written = [one["source"] for one in binds if not one.get("read_only")]
    assert written == ["/run/wattspan"]
    assert services()["agent-gpu"]["extends"] == {"service": "agent"}


def test_mounts_below_host_files_are_read_only() -> None:
    binds = [one for one in services()["agent"]["volumes"] if isinstance(one, dict)]
    read = {one["target"]: one.get("bind") for one in binds if one.get("read_only")}
    # the engine applies it to unmounted directories only
    forced = {"propagation": "rprivate", "recursive": "readonly"}
    assert read == {"/host/sys": forced, "/sys/fs/cgroup": forced}


def test_socket_directory_belongs_to_the_documented_user() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    (user, group) = re.findall(r'`user: "(\d+):(\d+)"`', guide)[0]
    (line,) = re.findall(r"^d (\S+) (\d+) (\d+) (\d+)$", guide, re.MULTILINE)
    (shared,) = (
        one["target"]
        for one in services()["agent"]["volumes"]
        if isinstance(one, dict) and not one.get("read_only")
    )
    assert line == (shared, "0755", user, group)
    assert instructions("USER")[-1] == f"{user}:{group}"


@pytest.mark.exhaustive
def test_build_stage_builds_the_program_from_copied_files(tmp_path: Path) -> None:
    """Its script, run on the copied files only, by this machine's Python."""
    sources, target = tmp_path / "sources", tmp_path / "opt" / "wattspan"
    for name in copied():
        place = sources / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            hidden = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, place, ignore=hidden)
        else:
            shutil.copy(ROOT / name, place)
    done = subprocess.run(
        [sources / "packaging" / "container" / "install.sh", sources, target],
        env={**ENVIRONMENT, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode and re.search(
        "NewConnectionError|name resolution|Network is unreachable", done.stderr
    ):
        pytest.skip("no package index to install from")
    assert done.returncode == 0, done.stderr
    shutil.rmtree(sources)
    ran = subprocess.run(
        [target / "bin" / "wattspan", "--version"], env=ENVIRONMENT, capture_output=True, text=True
    )
    assert ran.stdout == f"wattspan {VERSION}\n", ran.stderr
    assert not list(target.glob("bin/pip*"))
