"""Content of the package before its installation."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest
from testbed.debian_root import package, the_package
from testbed.process_rights import umask
from testbed.program import wattspan
from testbed.requirements import ROOT

from wattspan.util.files import INSTALLED_PAGES

pytestmark = pytest.mark.needs_debian


def _told(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def _digest(file: Path) -> str:
    """pytest takes minutes to show the difference of two packages."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package") / "opened"
    subprocess.run(["dpkg-deb", "--raw-extract", the_package(), folder], check=True)
    return folder


@pytest.mark.exhaustive
def test_package_build_is_reproducible(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    once = _digest(the_package())
    with umask(0o077):
        again = package(
            tmp_path / "again", TZ="Asia/Tokyo", TMPDIR=str(tmp_path / "elsewhere"), LANG="C.UTF-8"
        )
    assert _digest(again) == once


@pytest.mark.exhaustive
def test_package_depends_on_its_build_python() -> None:
    minor = _told("/usr/bin/python3", "-c", "import sys; print(sys.version_info.minor)").strip()
    depends = _told("dpkg-deb", "--field", the_package(), "Depends")
    assert f"python3 (>= 3.{minor}), python3 (<< 3.{int(minor) + 1})" in depends


def test_package_files_belong_to_root() -> None:
    listed = [
        line.split(maxsplit=5) for line in _told("dpkg-deb", "-c", the_package()).splitlines()
    ]
    assert {line[1] for line in listed} == {"root/root"}
    modes = {line[0] for line in listed}
    assert modes == {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x", "lrwxrwxrwx", "-rw-r-----"}
    assert [line[5] for line in listed if line[0] == "-rw-r-----"] == ["./etc/wattspan/config.toml"]


def test_conffiles_are_the_editable_files(opened: Path) -> None:
    listed = (opened / "DEBIAN" / "conffiles").read_text().split()
    assert listed == ["/etc/default/wattspan", "/etc/wattspan/config.toml"]


def test_units_are_those_of_the_tree_and_name_installed_pages(opened: Path) -> None:
    named = set[str]()
    for path in (ROOT / "systemd").glob("*.s*"):
        unit = (opened / "usr/lib/systemd/system" / path.name).read_text()
        assert unit.replace(f"{INSTALLED_PAGES}/docs/", "docs/") == path.read_text()
        named |= set(re.findall(r"\S*docs/\S+\.md", unit))
    assert named == {f"{INSTALLED_PAGES}/docs/reference/units.md"}
    assert (opened / "etc/default/wattspan").read_bytes() == (
        ROOT / "systemd/wattspan.env"
    ).read_bytes()


def test_package_has_the_manual_and_the_documentation(opened: Path) -> None:
    manual = gzip.decompress((opened / "usr/share/man/man1/wattspan.1.gz").read_bytes())
    assert manual.startswith(b'.TH WATTSPAN 1 "20')
    assert len(manual) > 20_000
    pages = opened / str(INSTALLED_PAGES).lstrip("/")
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        assert (pages / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_package_has_no_build_paths(opened: Path) -> None:
    places = (str(ROOT).encode(), b"/stage/opt/wattspan")
    found = [
        str(path.relative_to(opened))
        for path in opened.rglob("*")
        if path.is_file() and not path.is_symlink() and any(p in path.read_bytes() for p in places)
    ]
    assert found == []


def test_every_module_is_compiled_and_no_build_tool_is_carried(opened: Path) -> None:
    site = next((opened / "opt/wattspan/lib").glob("python3.*/site-packages"))
    modules = set(site.rglob("*.py"))
    compiled = {
        path.parents[1] / f"{path.name.partition('.')[0]}.py" for path in site.rglob("*.pyc")
    }
    assert modules == compiled
    assert not [path.name for path in site.iterdir() if path.name in {"pip", "setuptools", "wheel"}]
    assert {p.name for p in (opened / "opt/wattspan/bin").iterdir()} >= {"python3", "wattspan"}
    assert (opened / "usr/bin/wattspan").readlink() == Path("/opt/wattspan/bin/wattspan")


def test_packaged_configuration_has_commented_defaults(opened: Path, tmp_path: Path) -> None:
    shipped = (opened / "etc/wattspan/config.toml").read_text()
    (tmp_path / "shipped").write_text(shipped)
    settings, _, emulation = shipped.partition("# any machine.\n")
    awake = re.sub(r"(?m)^# (\w+ = )", r"\1", settings)
    assert awake != settings
    (tmp_path / "awake").write_text(awake)
    shown = {
        wattspan("config", "show", "--config", str(path)).stdout
        for path in (tmp_path / "shipped", tmp_path / "awake", Path(os.devnull))
    }
    assert len(shown) == 1
    assert len(shown.pop()) > 0
    (tmp_path / "emulated").write_text(re.sub(r"(?m)^# ([\w\[]+( =|\]))", r"\1", emulation))
    told = wattspan("config", "show", "--config", str(tmp_path / "emulated")).stdout
    assert 'profile = "laptop"' in told
