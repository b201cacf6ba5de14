"""`wattspan service` on a real systemd: there, running, gone, and nothing else changed by it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed.systemd_host import SystemdHost
from testbed.systemd_wattspan import AGENT, BASE, CAPPER, PROGRAM, SHIPPED, SOCKET, UNITS, _program
from testbed.waiting import eventually

pytestmark = pytest.mark.needs_systemd

LOCAL = "/usr/local/lib"
PLACED = {
    *(f"{LOCAL}/systemd/system/{unit}" for unit in UNITS),
    f"{LOCAL}/sysusers.d/wattspan.conf",
    f"{LOCAL}/tmpfiles.d/wattspan.conf",
    f"{LOCAL}/udev/rules.d/60-wattspan.rules",
}
EMULATED = '[emulation]\nprofile = "laptop"\n'


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SystemdHost]:
    """A systemd whose /usr/local/lib is empty, and a program that no service knows of yet."""
    folder = tmp_path_factory.mktemp("service")
    local = folder / "local"
    local.mkdir()
    # this systemd searches /usr/local/lib for units
    binds = {
        **_program(folder / "program"),
        Path("/opt/checkout/systemd"): SHIPPED,
        Path(LOCAL): local,
        Path(LOCAL, "systemd/system"): folder / "host" / "units",
    }
    with SystemdHost(folder / "host", binds=binds) as booted:
        # a shared interpreter library has another location here
        booted.inside("/etc/default/wattspan").write_text(f"LD_LIBRARY_PATH={BASE}/lib\n")
        yield booted


def service(host: SystemdHost, *words: str, code: int = 0) -> str:
    done = host.run(PROGRAM, "service", *words, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def tree(host: SystemdHost) -> dict[str, tuple[str, str]]:
    """Every file where something could be put, with its times and contents."""
    found = host.run(
        *("find", LOCAL, "/etc", "/var/lib", "/run", "-xdev", "-type", "f"),
        *("-not", "-path", "/run/systemd-host/*", "-printf", "%p\t%m %u %T@\n"),
        check=False,  # files may vanish during concurrent work
    ).stdout
    paths = dict(line.split("\t") for line in found.splitlines())
    digests = host.run("sha256sum", *sorted(paths), check=False).stdout.splitlines()
    return {path: (paths[path], digest) for digest, path in (d.split("  ", 1) for d in digests)}


def test_service_installation_lifecycle_leaves_no_files(host: SystemdHost) -> None:
    before = tree(host)

    said = service(host, "install", "--dry-run")
    assert tree(host) == before
    assert {line.split()[1].rstrip(":") for line in said.splitlines() if "Write " in line} == PLACED
    assert "Nothing was changed." in said
    service(host, "status", code=1)

    said = service(host, "install")
    assert set(tree(host)) - set(before) - {"/etc/passwd-", "/etc/group-", "/etc/shadow-"} >= PLACED
    assert host.run("id", "-un", "wattspan").stdout == "wattspan\n"
    assert f"{PROGRAM} run" in host.property(AGENT, "ExecStart")
    assert host.property(AGENT, "ActiveState") == "inactive"
    assert "systemctl enable --now wattspan.service" in said

    host.inside("/etc/wattspan").mkdir(exist_ok=True)
    host.inside("/etc/wattspan/config.toml").write_text(EMULATED)
    host.systemctl("enable", "--now", AGENT, SOCKET)
    host.wait_for(AGENT, "ActiveState", "active")
    assert json.loads(service(host, "status", "--json"))["units"][AGENT]["active"] == "active"

    running = tree(host)
    again = service(host, "install")
    assert "Wrote" not in again
    assert {p: running[p] for p in PLACED} == {p: tree(host)[p] for p in PLACED}
    assert host.property(AGENT, "ActiveState") == "active"

    said = service(host, "uninstall")
    ended = [said.index(f"disable --now {unit}") for unit in (AGENT, SOCKET)]
    assert ended == sorted(ended)
    assert said.rindex("Ran `systemctl disable") < said.index("Removed")
    for unit in (AGENT, CAPPER, SOCKET):
        assert host.property(unit, "LoadState") == "not-found"
    assert not PLACED & set(tree(host))
    assert not host.run("pgrep", "-u", "wattspan", check=False).stdout
    assert "/etc/wattspan/config.toml is kept" in said
    assert "/var/lib/wattspan with the measured data is kept" in said

    assert "Removed /var/lib/wattspan with its content" in service(host, "uninstall", "--purge")
    assert not [path for path in tree(host) if path.startswith("/var/lib/wattspan")]


def test_administrator_changes_survive_install_and_uninstall(host: SystemdHost) -> None:
    service(host, "install")
    unit = host.units / AGENT
    unit.write_text(unit.read_text() + "# ours\n")
    for words in (["install"], ["uninstall"]):
        said = service(host, *words)
        assert f"Left {LOCAL}/systemd/system/{AGENT} unchanged: it was edited" in said
    assert unit.read_text().endswith("# ours\n")
    unit.unlink()
    host.systemctl("daemon-reload")


@pytest.mark.exhaustive
def test_user_without_groups_finds_the_agent(host: SystemdHost) -> None:
    service(host, "install")
    host.inside("/etc/wattspan").mkdir(exist_ok=True)
    config = host.inside("/etc/wattspan/config.toml")
    config.write_text(EMULATED + '[exporters.prometheus]\nlisten = "127.0.0.1:9123"\n')
    host.run("chown", "root:wattspan", "/etc/wattspan/config.toml")
    config.chmod(0o640)
    host.systemctl("start", AGENT)
    host.wait_for(AGENT, "ActiveState", "active")
    nobody = ("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups")
    nobody += ("env", f"LD_LIBRARY_PATH={BASE}/lib")
    for words in (
        ("top", "--json"),
        ("measure", "--", "true"),
        ("report", "--by", "domain"),
        ("advise",),
        ("caps", "status"),
    ):
        # The store has its first energy some seconds after the start.
        eventually(
            lambda: host.run(*nobody, PROGRAM, *words, check=False).returncode == 0,  # noqa: B023
            f"{words[0]} succeeds",
        )
    host.systemctl("stop", AGENT)
    assert not host.inside("/run/wattspan/agent.json").exists()
    service(host, "uninstall")


def test_installation_requires_root(host: SystemdHost) -> None:
    before = tree(host)
    done = host.run("setpriv", "--reuid=65534", PROGRAM, "service", "install", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("wattspan: Only root may change the services of this host")
    assert tree(host) == before
