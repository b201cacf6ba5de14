"""The package goes, and so does everything of it; first of all the caps."""

from __future__ import annotations

import shutil

import pytest
from testbed.debian_machine import CONFIG, CPU_MAY_BE_CAPPED, UNITS, Machine
from testbed.debian_root import DebianRoot, the_package
from testbed.fixtures import entered

pytestmark = pytest.mark.needs_debian

CHANGED_BY_ANYBODY = (
    # The user stays, so that its number is never somebody else's.
    *("etc/passwd", "etc/group", "etc/shadow", "etc/gshadow"),
    # records of boots and packages
    *("etc/machine-id", "var/log", "var/lib/dpkg", "var/lib/apt", "var/lib/systemd", "var/cache"),
    *("etc/.pwd.lock", "tmp", "var/tmp", "root", "run", "dev", "var/lib/private"),
)


machine = entered(Machine)


def _left(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Paths that were created, removed or changed, except those changed by any package."""
    return [
        path
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
        and not any(path.rstrip("-").startswith(one) for one in CHANGED_BY_ANYBODY)
    ]


def test_removal_restores_caps_and_purge_leaves_no_files(
    machine: Machine,
) -> None:
    before = machine.root.files()
    machine.install(the_package())
    machine.configure(CPU_MAY_BE_CAPPED)
    machine.measuring()
    machine.hold_a_cap()

    machine.apt("remove", "wattspan")

    assert machine.restored()
    machine.host.systemctl("stop", "holder.service", check=False)
    assert machine.processes() == []
    for unit in UNITS:
        assert machine.host.property(unit, "ActiveState") == "inactive"
        assert machine.host.property(unit, "LoadState") == "not-found"
    kept = machine.root.path
    assert (kept / CONFIG.lstrip("/")).read_text() == CPU_MAY_BE_CAPPED
    assert (kept / "var/lib/wattspan").is_dir()
    assert not (kept / "opt/wattspan").exists()

    machine.apt("purge", "wattspan")

    assert _left(before, machine.root.files()) == []
    run = machine.host.run("find", "/run", "-name", "*wattspan*").stdout
    assert run == ""
    assert machine.host.run("getent", "passwd", "wattspan").stdout.endswith("/nologin\n")


@pytest.mark.exhaustive
def test_package_installs_without_systemd() -> None:
    with DebianRoot() as root:
        before = root.files()
        (name,) = root.put(the_package())
        done = root.run("dpkg", "--install", name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "wattspan" in root.run("wattspan", "--version").stdout
        checked = root.run("wattspan", "config", "check")
        assert checked.returncode == 0, checked.stderr
        assert "comes before" not in done.stdout + done.stderr
        units = root.path / "usr/local/lib/systemd/system"
        units.mkdir(parents=True)
        (units / "wattspan.service").write_text("[Service]\n")
        again = root.run("dpkg", "--install", name)  # as after an interrupted installation
        assert again.returncode == 0, again.stdout + again.stderr
        assert f"/{units.relative_to(root.path)}/wattspan.service comes before" in again.stderr
        stands = root.run("wattspan", "service", "status")
        assert stands.returncode == 1
        assert "takes precedence over the package" in stands.stdout
        shutil.rmtree(units.parent)
        gone = root.run("dpkg", "--purge", "wattspan")
        assert gone.returncode == 0, gone.stdout + gone.stderr
        assert _left(before, root.files()) == []


def test_removal_restores_caps_with_a_broken_configuration(
    machine: Machine,
) -> None:
    machine.install(the_package())
    machine.configure(CPU_MAY_BE_CAPPED)
    machine.hold_a_cap()
    # no process restores the limit: neither the capper nor ExecStopPost of its unit.
    unit = "/run/systemd/system/wattspan-capper.service.d"
    machine.host.run("mkdir", "--parents", unit)
    machine.host.run("tee", f"{unit}/x.conf", stdin="[Service]\nExecStopPost=\nRestart=no\n")
    machine.host.systemctl("daemon-reload")
    # the lease holder is silent: otherwise it would activate the capper again.
    machine.host.systemctl("kill", "--signal=SIGSTOP", "holder.service")
    machine.host.systemctl("kill", "--signal=SIGKILL", "wattspan-capper.service")
    machine.host.systemctl("stop", "wattspan.service", "wattspan-capper.socket")
    machine.host.systemctl("kill", "--signal=SIGKILL", "holder.service")
    machine.until(lambda: not machine.active("wattspan-capper.service"), "it has ended")
    assert machine.limit < machine.original
    machine.configure("this is no configuration")

    machine.apt("remove", "wattspan")

    assert machine.restored()


def test_policy_against_starts_is_obeyed(
    machine: Machine,
) -> None:
    policy = machine.root.path / "usr/sbin/policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    machine.install(the_package())
    assert not machine.active("wattspan.service")
    assert not machine.active("wattspan-capper.socket")
    assert machine.host.property("wattspan.service", "UnitFileState") == "enabled"

    machine.configure(CPU_MAY_BE_CAPPED)
    machine.host.systemctl("start", "wattspan-capper.socket", "wattspan.service")
    machine.measuring()
    machine.hold_a_cap()

    machine.apt("remove", "wattspan")

    assert machine.restored()
    machine.host.systemctl("stop", "holder.service", check=False)
    assert machine.processes() == []
    for unit in UNITS:
        assert machine.host.property(unit, "ActiveState") == "inactive"
