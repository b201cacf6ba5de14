"""The installed program works without its source tree, for every user."""

from __future__ import annotations

import email
import json
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from testbed.program import ENVIRONMENT
from testbed.requirements import ROOT
from testbed.sources import tracked
from testbed.waiting import eventually
from testbed.wheels import build, environment

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist and the wheel of the present tree; others may change that meanwhile."""
    tree = tmp_path_factory.mktemp("tree")
    for path in tracked():
        copy = tree / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    out = build(tree, tmp_path_factory.mktemp("built"))
    shutil.rmtree(tree)
    return out


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (made,) = built.glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, sdist: Path) -> Path:
    """Built from the unpacked sdist, which is deleted: nothing can lead back to a source tree."""
    folder = tmp_path_factory.mktemp("sources")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    (made,) = build(source, tmp_path_factory.mktemp("wheel"), "wheel").glob("*.whl")
    shutil.rmtree(folder)
    return made


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """`wattspan` in an environment that has the wheel, the locked packages and nothing else."""
    return environment(tmp_path_factory.mktemp("installed") / "venv", wheel) / "wattspan"


def called(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        list(map(str, command)),
        env=ENVIRONMENT,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def python(program: Path, code: str) -> str:
    done = called(program.parent / "python", "-I", "-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ------------------------------------------------------------------------------ content


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def about(wheel: Path) -> Message:
    (name,) = (name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(contents(wheel)[name])


def test_sdist_builds_the_wheel_that_the_tree_builds(wheel: Path, built: Path) -> None:
    direct = built / wheel.name
    ours, theirs = contents(direct), contents(wheel)
    assert [
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    ] == []


def test_wheel_holds_both_packages_their_types_and_the_services_files(wheel: Path) -> None:
    names = set(contents(wheel))
    assert {"wattspan/py.typed", "wattspan_exporters/py.typed"} <= names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"wattspan", "wattspan_exporters", f"wattspan-{PROJECT['version']}.dist-info"}
    for path in (ROOT / "systemd").rglob("*"):
        if path.is_file():
            carried = f"wattspan/installation/systemd/{path.relative_to(ROOT / 'systemd')}"
            assert contents(wheel)[carried] == path.read_bytes()


def test_sdist_can_be_tested_and_packaged(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "tests/conftest.py",
        "tests/unit/project/test_project.py",
        "Makefile",
        "scripts/lock",
        "systemd/wattspan.service",
        "packaging/container/Containerfile",
        "packaging/kubernetes/base/kustomization.yaml",
    ):
        assert needed in inside


def test_wheel_metadata_matches_the_project(wheel: Path) -> None:
    told = about(wheel)
    assert (told["Name"], told["Version"]) == ("wattspan", PROJECT["version"])
    assert told["License-Expression"] == "Apache-2.0"
    assert told["Requires-Python"] == PROJECT["requires-python"]
    assert set(told.get_all("Classifier", [])) == set(PROJECT["classifiers"])
    needs = [need for need in told.get_all("Requires-Dist", []) if "extra ==" not in need]
    wanted = {re.split(r"[>=]", need)[0].lower() for need in PROJECT["dependencies"]}
    assert {re.split(r"[>=]", need)[0].lower() for need in needs} == wanted
    assert not [need for need in told.get_all("Requires-Dist", []) if "@" in need]


def test_every_python_that_is_promised_is_named(wheel: Path) -> None:
    named = {c.rpartition(" ")[2] for c in about(wheel).get_all("Classifier", []) if ":: 3." in c}
    assert PROJECT["requires-python"].removeprefix(">=") in named


# ------------------------------------------------------------------------- for operators


def test_installed_program_comes_from_the_wheel(program: Path) -> None:
    done = called(program, "--version")
    assert done.stdout == f"wattspan {PROJECT['version']}\n", done.stderr
    where = python(program, "import wattspan, wattspan_exporters as e; print(wattspan, e)")
    assert where.count(str(program.parents[1])) == 2


def test_doctor_finds_every_installed_part(program: Path) -> None:
    done = called(program, "doctor", "--emulate", "laptop", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["version"] == PROJECT["version"]
    assert told["readable_counters"] > 0


def test_agent_runs_and_ends(program: Path, tmp_path: Path) -> None:
    settings = [
        *("--set", f"agent.state_dir={tmp_path / 'state'}"),
        *("--set", f"agent.run_dir={tmp_path / 'run'}"),
        *("--set", "exporters.prometheus.listen=127.0.0.1:0", "--set", "spans.enabled=false"),
    ]
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [program, "run", "--emulate", "laptop", *settings], env=ENVIRONMENT, cwd="/", stderr=log
        ) as agent,
    ):
        try:
            told = eventually(lambda: _serving(tmp_path / "log"), "the agent serves")
            if shutil.which("curl"):  # without energy before the first interval
                eventually(
                    lambda: "hw_host_energy_joules_total" in called("curl", "-sf", told).stdout,
                    "the host has energy",
                )
        finally:
            agent.terminate()
        assert agent.wait(20) == 0


def _serving(log: Path) -> str:
    found = re.search(r"Serving (http://\S+/metrics)", log.read_text())
    return found[1] if found else ""


def test_wheel_has_the_service_files(program: Path) -> None:
    done = called(program, "service", "install", "--print")
    assert "==> /usr/local/lib/systemd/system/wattspan.service <==" in done.stdout
    assert f"ExecStart={program} run\n" in done.stdout
    assert "/usr/bin/wattspan" not in done.stdout


def test_environment_below_tmp_is_rejected_for_a_service(program: Path) -> None:
    if not str(program).startswith(("/tmp/", "/var/", "/home/", "/root/")):
        pytest.skip("the tests' folders are where a service could run from")
    done = called(program, "service", "install", "--dry-run")
    assert done.returncode == 1
    assert "The services cannot run wattspan: the program" in done.stderr
    assert "/usr/local/lib/wattspan/bin/pip install PATH`" in done.stderr
    assert "Traceback" not in done.stderr


# -------------------------------------------------------------------- for application authors


@pytest.fixture(scope="module")
def loaded(program: Path) -> frozenset[str]:
    """The modules of an application that OpenTelemetry instruments, wattspan being installed."""
    code = """
import json, sys
from importlib import metadata
(found,) = metadata.entry_points(group="opentelemetry_post_instrument", name="wattspan")
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
found.load()()
with trace.get_tracer("app").start_as_current_span("work"):
    pass
print(json.dumps(sorted(sys.modules)))
"""
    return frozenset(json.loads(python(program, code).splitlines()[-1]))


def test_application_spans_are_announced_by_entry_point(loaded: frozenset[str]) -> None:
    assert "wattspan.otel" in loaded


def test_application_loads_no_agent_module(loaded: frozenset[str]) -> None:
    ours = {name.split(".")[1] for name in loaded if name.startswith("wattspan.")}
    assert ours <= {"otel", "sdk"}
    # psutil is not among them: OpenTelemetry's SDK loads it itself where there is one.
    heavy = {"click", "rich", "msgspec", "pynvml", "prometheus_client", "h11", "pyRAPL"}
    assert not heavy & {name.partition(".")[0] for name in loaded}
    assert "wattspan_exporters" not in loaded
