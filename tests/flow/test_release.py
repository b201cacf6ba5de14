"""``make release`` gives the same files everywhere, and refuses what is not a release."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from testbed.requirements import PACKAGING, ROOT
from testbed.sources import tracked

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_packaging]

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
SECTION = "- The first release of the test."
HIDDEN = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "SOURCE_DATE_EPOCH", "TAG"}


def clone(folder: Path) -> Path:
    """The present tree as one commit of a fixed time, with a section of the version."""
    for path in tracked():
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    (folder / "packaging/helm/kubernetes").symlink_to("../kubernetes")
    changelog = folder / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    if f"## [{VERSION}]" not in text:
        heading = f"## [Unreleased]\n\n## [{VERSION}] - 2026-01-01\n\n{SECTION}\n"
        changelog.write_text(text.replace("## [Unreleased]\n", heading, 1), encoding="utf-8")
    (folder / ".venv").symlink_to(sys.prefix)
    (folder / ".venv-packaging").symlink_to(PACKAGING.parents[1])
    script = folder / "scripts/tool-environment"  # installs nothing here
    script.write_text("#!/bin/sh\n")
    run(folder, "git", "init", "--quiet")
    (folder / ".git/info/exclude").write_text(".venv\n.venv-packaging\n")
    run(folder, "git", "add", "--all")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    run(folder, "git", *author, "commit", "--quiet", "--all", "--message", "A release")


def run(folder: Path, *command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    dates = dict.fromkeys(("GIT_AUTHOR_DATE", "GIT_COMMITTER_DATE"), "2026-01-02T03:04:05Z")
    return subprocess.run(
        command,
        cwd=folder,
        env=kept | dates | settings,
        capture_output=True,
        text=True,
        check=command[0] == "git",
        timeout=300,
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clone(tmp_path_factory.mktemp("first") / "tree")


@pytest.fixture(scope="module")
def released(tree: Path) -> Path:
    done = run(tree, "scripts/build-dist", "--release", TAG=f"v{VERSION}")
    assert done.returncode == 0, done.stderr
    return tree / "dist"


def test_another_place_time_zone_and_mask_give_the_same_bytes(
    released: Path, tmp_path: Path
) -> None:
    other = clone(tmp_path / "a much longer path" / "tree")
    for path in (other / one.relative_to(ROOT) for one in tracked()):
        os.utime(path, (1, 1))
        path.chmod(path.stat().st_mode & 0o700)  # as the mask 077 leaves it
        path.parent.chmod(0o700)
    run(other, "git", "config", "core.fileMode", "false")
    command = ["sh", "-c", "umask 077; exec scripts/build-dist --release"]
    done = run(other, *command, TZ="Asia/Tokyo", PYTHONHASHSEED="7", LC_ALL="C.UTF-8")
    assert done.returncode == 0, done.stderr
    ours, theirs = (
        {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
        for folder in (released, other / "dist")
    )
    assert ours == theirs


def test_release_has_wheel_sources_chart_sbom_and_checksums(released: Path) -> None:
    sums = dict(
        reversed(line.split("  ")) for line in (released / "SHA256SUMS").read_text().splitlines()
    )
    assert sums == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in released.glob("wattspan-*")
    }
    assert sums.keys() == {
        f"wattspan-{VERSION}-py3-none-any.whl",
        f"wattspan-{VERSION}.tar.gz",
        f"wattspan-{VERSION}.tgz",
        f"wattspan-{VERSION}.cdx.json",
    }
    changes = (released / "CHANGES.md").read_text(encoding="utf-8")
    assert SECTION in changes
    assert "## [" not in changes


def test_sbom_names_every_locked_package_of_the_program(released: Path) -> None:
    bill = json.loads((released / f"wattspan-{VERSION}.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    subject = bill["metadata"]["component"]
    assert (subject["name"], subject["version"]) == ("wattspan", VERSION)
    text = (ROOT / "requirements/run.txt").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, re.MULTILINE))
    assert {one["name"].lower(): one["version"] for one in bill["components"]} == locked
    assert all(one["purl"].startswith("pkg:pypi/") for one in bill["components"])
    assert bill["metadata"]["timestamp"] == "2026-01-02T03:04:05+00:00"  # of the commit


def test_chart_has_the_manifests_in_place_of_the_link(released: Path) -> None:
    with tarfile.open(released / f"wattspan-{VERSION}.tgz") as archive:
        members = {one.name: one for one in archive.getmembers()}
    assert all(name == "wattspan" or name.startswith("wattspan/") for name in members)
    assert members["wattspan/kubernetes/base/daemonset.yaml"].isreg()
    assert members["wattspan/Chart.yaml"].isreg()
    assert not [name for name, one in members.items() if one.issym() or one.islnk()]


@pytest.mark.parametrize("case", ["tag", "changes", "section", "usage"])
def test_what_is_no_release_is_refused_with_its_remedy(case: str, tmp_path: Path) -> None:
    tree = clone(tmp_path / "tree")
    arguments, settings, message = ["--release"], {}, ""
    match case:
        case "tag":
            settings, message = {"TAG": "v9.9.9"}, f"tag v{VERSION}, or change the version"
        case "changes":
            (tree / "README.md").write_text("changed")
            message = "commit or remove what `git status` lists"
        case "section":
            shutil.copy(ROOT / "CHANGELOG.md", tree)
            text = (tree / "CHANGELOG.md").read_text(encoding="utf-8")
            (tree / "CHANGELOG.md").write_text(text.replace(f"## [{VERSION}]", "## [0.0.0]"))
            commit(tree)
            message = f'no section "## [{VERSION}]"'
        case _:
            arguments, message = ["--relase"], "usage: "
    done = run(tree, "scripts/build-dist", *arguments, **settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert not (tree / "dist").exists()
