"""Actions forbidden by the shipped units, tried by a process in their sandbox.

Each act is tried outside as well, where it succeeds: failures inside the sandbox are caused by the
unit.
The prober's unit is the shipped one with another program in it, and nothing else.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from testbed import sandbox_prober
from testbed.sandbox_prober import ACTS, MARK, PORT
from testbed.systemd_host import PRINTED
from testbed.systemd_wattspan import AGENT, CAPPER, PYTHON, Installed, installed

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_cc]

PROBER = Path("/opt/prober/sandbox_prober.py")

NEITHER_CAN = frozenset(
    {
        "read another user's file",
        "read /etc/shadow",
        "read a file in a home",
        "open a raw socket",
        "open a packet socket",
        "trace another user's process",
        "mount",
        "make a user namespace",
        "load a module",
        "set the host's name",
        "write where everybody may",
        "write /var/tmp of everybody",
        "write a kernel setting",
        "make a cgroup",
        "open a device that everybody may",
        "run what it has written",
        "map memory that can be written and run",
        "raise its own priority",
    }
)
AGENT_CANNOT = NEITHER_CAN | {
    "write a package's limit",
    "set a GPU's limit",
    "take the capper's lock",
    "write where the capper keeps its journal",
    "become root by a setuid program",
}
CAPPER_CANNOT = NEITHER_CAN | {
    "open an internet socket",
    "open a netlink socket",
    "reach the host's loopback",
    "see another's process",
}
MAY_BE_DENIED_TO_ALL = {
    "load a module",  # a kernel without modules
    "set the host's name",
    "raise its own priority",
    "open a device that everybody may",
}
"""Actions that this machine forbids anyway, such as a container; they do not test the unit."""

ROOT_ALREADY = {"become root by a setuid program"}  # the capper is user 0, with one capability

PREPARE = """
mkdir -p /opt/probed/open /etc/wattspan /run/wattspan /var/lib/wattspan
chmod 0777 /opt/probed/open
echo secret >/opt/probed/secret && chown 12345 /opt/probed/secret && chmod 0600 /opt/probed/secret
echo open >/home/open
cp "$(command -v id)" /opt/probed/id && chmod 4755 /opt/probed/id
echo probed >/var/tmp/probed && chmod 0666 /var/tmp/probed
touch /etc/wattspan/config.toml
"""
VICTIM = "import os, time; print(os.getpid(), flush=True); os.setuid(12345); time.sleep(1000)"
LISTENER = f"""
import socket
with socket.create_server(("127.0.0.1", {PORT})) as here:
    print("listening", flush=True)
    while True: here.accept()[0].close()
"""


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    shown = tmp_path_factory.mktemp("prober")
    shown.chmod(0o755)
    shutil.copy(sandbox_prober.__file__, shown)
    with (
        installed(tmp_path_factory.mktemp("sandbox"), binds={PROBER.parent: shown}) as it,
        it.host.popen(PYTHON, "-c", LISTENER) as listener,
        it.host.popen(PYTHON, "-c", VICTIM) as victim,
    ):
        try:
            it.host.run("sh", "-ec", PREPARE)
            # its own lock from then on, without other holders
            it.host.systemctl("start", CAPPER)
            it.host.systemctl("stop", CAPPER)
            listener.stdout.readline()
            it.host.inside("/opt/probed/victim").write_text(victim.stdout.readline())
            yield it
        finally:
            listener.kill()
            victim.kill()


def _told(text: str) -> dict[str, str]:
    (line,) = (line for line in text.splitlines() if line.startswith(MARK))
    told: dict[str, str] = json.loads(line.removeprefix(MARK))
    assert told.keys() == ACTS.keys()
    return told


def _in_the_sandbox_of(it: Installed, unit: str) -> dict[str, str]:
    """Report of the prober in place of ``unit``."""
    text = (it.host.units / unit).read_text()
    program = re.search(r"^ExecStart=.*$", text, re.MULTILINE)
    assert program is not None
    probing = f"ExecStart={PYTHON} {PROBER} {unit.removesuffix('.service')}"
    (it.host.units / f"probing-{unit}").write_text(text.replace(program[0], probing))
    it.host.systemctl("daemon-reload")
    before = len(it.host.inside(PRINTED).read_text()) if it.host.inside(PRINTED).exists() else 0
    it.host.systemctl("start", f"probing-{unit}")
    it.host.systemctl("stop", f"probing-{unit}")
    return _told(it.host.inside(PRINTED).read_text()[before:])


@pytest.fixture(scope="module")
def outside(it: Installed) -> dict[str, str]:
    """Report of the prober without a sandbox, as root."""
    variables = it.host.inside("/etc/default/wattspan").read_text().split()
    return _told(it.host.run("env", *variables, PYTHON, PROBER, "wattspan").stdout)


def _stopped(told: dict[str, str], outside: dict[str, str]) -> set[str]:
    """The acts that only the sandbox can have stopped."""
    return {act for act, why in told.items() if why and not outside[act]}


def test_outside_of_a_sandbox_every_act_can_be_done(it: Installed, outside: dict[str, str]) -> None:
    stopped = {act: why for act, why in outside.items() if why}
    assert stopped.keys() <= MAY_BE_DENIED_TO_ALL, stopped
    # Root need not become root: an unprivileged user shows that the setuid program works
    nobody = ("setpriv", "--reuid=12345", "--clear-groups", "/opt/probed/id", "-u")
    assert it.host.run(*nobody).stdout == "0\n"


def test_agent_sandbox_permits_only_its_work(it: Installed, outside: dict[str, str]) -> None:
    told = _in_the_sandbox_of(it, AGENT)
    denied = {act for act, why in outside.items() if why}
    assert _stopped(told, outside) == AGENT_CANNOT - denied, told


def test_capper_sandbox_permits_only_limits(it: Installed, outside: dict[str, str]) -> None:
    told = _in_the_sandbox_of(it, CAPPER)
    denied = {act for act, why in outside.items() if why}
    assert _stopped(told, outside) - ROOT_ALREADY == CAPPER_CANNOT - denied, told
