"""Wheel, source archive and package on each supported Debian, as it comes and without network."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.debian_machine import PYTHON, UNITS
from testbed.debian_releases import PYTHONS, TEST_LOCK, TREE, Checkout
from testbed.debian_root import another_version
from testbed.requirements import ROOT

pytestmark = pytest.mark.needs_debian_releases

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
WHEEL = f"./dist/wattspan-{VERSION}-py3-none-any.whl"
SDIST = f"./dist/wattspan-{VERSION}.tar.gz"
USER = "alice"
HOME = Path("/home", USER)
VENV = HOME / "venv"

IMPORTED = """
import importlib, pkgutil
names = []
for top in ("wattspan", "wattspan_exporters"):
    package = importlib.import_module(top)
    names += [m.name for m in pkgutil.walk_packages(package.__path__, f"{top}.")]
for name in names:
    if not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(names))
"""
TESTED = (
    *("attribution", "config", "http", "installation", "model", "otlp", "sdk", "storage", "util"),
    "cli/test_service.py",
)
"""Parts of tests/unit that touch what differs between releases of Python and Debian."""


@pytest.fixture(scope="module", params=PYTHONS)
def checkout(request: pytest.FixtureRequest) -> Iterator[Checkout]:
    """A machine of the release, on which an administrator has set the checkout up."""
    with Checkout(request.param) as checkout:
        checkout.run("useradd", "--create-home", "--shell", "/bin/sh", USER)
        checkout.run("scripts/environment", "run")
        checkout.run("scripts/build-dist")
        yield checkout


@pytest.fixture(scope="module")
def environment(checkout: Checkout) -> Path:
    """The programs of an environment of an ordinary user, with the wheel."""
    checkout.run("python3", "-m", "venv", VENV, user=USER)
    checkout.run(VENV / "bin/pip", "install", "--quiet", f"{WHEEL}[grpc]", user=USER)
    return VENV / "bin"


def test_release_has_the_python_that_is_named(checkout: Checkout) -> None:
    told = checkout.run("python3", "--version").stdout
    assert told.startswith(f"Python {checkout.python}.")


# ------------------------------------------------------------------------------ pip and pipx


def test_wheel_is_installed_by_pip(checkout: Checkout, environment: Path) -> None:
    told = checkout.run(environment / "wattspan", "--version", folder=HOME, user=USER)
    assert told.stdout == f"wattspan {VERSION}\n"
    words = ("doctor", "--emulate", "laptop", "--json")
    found = json.loads(
        checkout.run(environment / "wattspan", *words, folder=HOME, user=USER).stdout
    )
    assert found["readable_counters"] > 0


def test_sdist_is_installed_by_pip(checkout: Checkout, environment: Path) -> None:
    pip = (environment / "pip", "install", "--quiet", "--no-deps", "--force-reinstall")
    checkout.run(*pip, SDIST, user=USER)
    told = checkout.run(environment / "wattspan", "--version", folder=HOME, user=USER)
    assert told.stdout == f"wattspan {VERSION}\n"


def test_every_module_compiles_and_loads_without_a_warning(
    checkout: Checkout, environment: Path
) -> None:
    python = (environment / "python", "-I", "-W", "error")
    site = HOME / f"venv/lib/python{checkout.python}/site-packages"
    packages = (site / "wattspan", site / "wattspan_exporters")
    checkout.run(*python, "-m", "compileall", "-q", "-f", *packages, folder=HOME, user=USER)
    told = checkout.run(*python, "-c", IMPORTED, folder=HOME, user=USER)
    assert int(told.stdout) > 300


def test_demo_of_the_wheel_measures(checkout: Checkout, environment: Path) -> None:
    words = ("demo", "--plain", "--duration", "10s", "--listen", "127.0.0.1:0")
    told = checkout.run(environment / "wattspan", *words, folder=HOME, user=USER)
    assert "NVIDIA H100 80GB HBM3 0" in told.stdout
    assert told.stdout.endswith("Done. The emulated host and its files are removed.\n")


def test_newer_wheel_replaces_an_older_one_and_back(checkout: Checkout, environment: Path) -> None:
    name = re.sub(r"\d+\.\d+\.\d+", "9.0.0", WHEEL)
    checkout.run("sed", "-i", f's/^version = "{VERSION}"$/version = "9.0.0"/', "pyproject.toml")
    try:
        checkout.run(".venv/bin/python", "-m", "hatchling", "build", "-t", "wheel", "-d", "dist")
    finally:
        checkout.run("sed", "-i", f's/^version = "9.0.0"$/version = "{VERSION}"/', "pyproject.toml")
    for wheel, version in ((name, "9.0.0"), (WHEEL, VERSION)):
        checkout.run(environment / "pip", "install", "--quiet", wheel, user=USER)
        told = checkout.run(environment / "wattspan", "--version", folder=HOME, user=USER)
        assert told.stdout == f"wattspan {version}\n"


@pytest.mark.parametrize("file", [WHEEL, SDIST])
def test_pipx_installs_the_command(checkout: Checkout, file: str) -> None:
    checkout.run("pipx", "install", "--force", file, user=USER)
    program = HOME / ".local/bin/wattspan"
    assert checkout.run(program, "--version", user=USER).stdout == f"wattspan {VERSION}\n"


# --------------------------------------------------------------------------- what may be missing


@pytest.fixture
def bare(checkout: Checkout) -> Iterator[Path]:
    """A folder with the files that make an environment, without one."""
    folder = Path("/srv/bare")
    checkout.run("mkdir", folder)
    checkout.run("cp", "-r", "scripts", "requirements", "pyproject.toml", folder)
    yield folder
    checkout.run("rm", "-r", folder)


def test_python_without_venv_is_one_sentence(checkout: Checkout, bare: Path) -> None:
    library = f"/usr/lib/python{checkout.python}"
    without = (
        f"mount -t tmpfs none /mnt && cp -a {library} /mnt/lib && rm -r /mnt/lib/ensurepip"
        f" && mount --bind /mnt/lib {library} && exec scripts/environment run"
    )
    told = checkout.run("unshare", "--mount", "sh", "-c", without, folder=bare, code=1)
    assert told.stderr == (
        "python3 cannot make virtual environments: install Debian's "
        f"python{checkout.python}-venv, or name another interpreter with PYTHON=.\n"
    )


def test_host_without_network_is_told_what_is_missing(checkout: Checkout, bare: Path) -> None:
    told = checkout.run(
        "scripts/environment", "run", folder=bare, code=1, variables={"PIP_RETRIES": "0"}
    )
    assert told.stderr.endswith(
        "The pinned packages could not be installed into .venv: see pip's message above; it needs"
        " a package index.\n"
    )


# --------------------------------------------------------------------------------- the package


@pytest.fixture(scope="module")
def package(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package that the release's own Python was bound into, installed."""
    checkout.run("scripts/build-deb")
    root = checkout.machine.root.path
    (built,) = (root / TREE.relative_to("/") / "dist").glob("*.deb")
    kept = tmp_path_factory.mktemp("package") / built.name
    kept.write_bytes(built.read_bytes())
    said = checkout.machine.install(kept)
    assert "does not run" not in said
    return kept


def test_package_measures_on_the_release(checkout: Checkout, package: Path) -> None:
    machine = checkout.machine
    assert machine.measuring() > 0
    assert machine.active("wattspan.service")
    told = checkout.run("wattspan", "--version", user="wattspan")
    assert told.stdout == f"wattspan {VERSION}\n"
    found = checkout.run("wattspan", "doctor", "--json", user="wattspan")
    assert json.loads(found.stdout)["readable_counters"] == 4
    assert machine.host.run(PYTHON, "--version").stdout.startswith(f"Python {checkout.python}.")


def test_systemd_of_the_release_knows_every_directive(checkout: Checkout, package: Path) -> None:
    units = [f"/usr/lib/systemd/system/{unit}" for unit in UNITS]
    told = checkout.run("systemd-analyze", "verify", *units)
    ours = [line for line in told.stderr.splitlines() if "wattspan" in line]
    assert ours == []


def test_manual_is_shown(checkout: Checkout, package: Path) -> None:
    told = checkout.run("man", "wattspan", variables={"MANPAGER": "cat", "MANWIDTH": "80"})
    assert told.stdout.startswith("WATTSPAN(1)")
    assert "wattspan doctor" in told.stdout


def test_package_has_no_file_of_the_environment_builder(checkout: Checkout, package: Path) -> None:
    opt = checkout.machine.root.path / "opt/wattspan"
    assert {path.name for path in opt.iterdir()} == {"bin", "lib", "lib64", "pyvenv.cfg"}


def test_package_is_upgraded_and_downgraded(
    checkout: Checkout, package: Path, tmp_path: Path
) -> None:
    machine = checkout.machine
    before = machine.measuring()
    for archive, words in (
        (another_version(package, "9.0", tmp_path), ()),
        (package, ("--allow-downgrades",)),
    ):
        machine.install(archive, *words)
        after = machine.measuring()
        assert after >= before
        before = after


# --------------------------------------------------------------------------------------- tests


def test_tests_pass_on_the_python_of_the_release(checkout: Checkout) -> None:
    if checkout.python == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip("`make test` runs them on this Python")
    pip = (".venv/bin/pip", "install", "--quiet", "--no-deps", "--require-hashes")
    checkout.run(*pip, "--requirement", TEST_LOCK)
    options = ("-q", "-p", "no:cacheprovider", "-m", "not slow and not exhaustive")
    parts = [f"tests/unit/{name}" for name in TESTED]
    told = checkout.run(".venv/bin/python", "-m", "pytest", *options, *parts)
    assert re.search(r"^\d{3,} passed", told.stdout, re.MULTILINE), told.stdout
