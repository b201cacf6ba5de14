"""The shipped units of the performance counters' helper under a real systemd.

The test's systemd runs in a pid namespace, where the helper refuses to count: its pids are others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from testbed.systemd_host import PRINTED
from testbed.systemd_wattspan import (
    AGENT,
    COUNTERS,
    COUNTERS_SOCKET,
    PROGRAM,
    PYTHON,
    Installed,
    installed,
)
from testbed.waiting import eventually

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_cc]

PATH = "/run/wattspan-counters/counters.sock"
REFUSED = "a pid namespace has other pids than the kernel"
ASK = f"""
import socket
helper = socket.socket(socket.AF_UNIX)
helper.settimeout(60)
helper.connect({PATH!r})
helper.send(b"?")
print(helper.recv(4096)[8:].decode())
"""
COUNT = """
from pathlib import Path
from wattspan.processes.cpu_socket_times import SocketTimes
from wattspan.processes.ebpf import open_perf_events
from wattspan.util.cpu_topology import CpuTopology
events, nothing = ((1, 0), (1, 3), (1, 2), (1, 0)), Path("/nothing")
SocketTimes(CpuTopology(nothing), "0-1023", nothing, events).close()
print("opened:", len(open_perf_events(events, 0)), flush=True)
"""
"""Neither the emulated CPUs of this host's /sys nor its pid namespace matter."""


@pytest.fixture(scope="module")
def it(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with installed(tmp_path_factory.mktemp("counters")) as it:
        it.host.systemctl("start", COUNTERS_SOCKET)
        yield it


def instances(it: Installed) -> str:
    return it.host.systemctl("list-units", "--all", "--plain", "--no-legend", "wattspan-counters@*")


def test_socket_of_counters_is_for_root_and_the_agents_user(it: Installed) -> None:
    assert it.host.run("stat", "-c", "%U %a", PATH).stdout == "wattspan 600\n"
    stranger = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups")
    assert it.host.run(*stranger, PYTHON, "-c", ASK, check=False).returncode == 1
    member = ("setpriv", "--reuid=12345", "--regid=wattspan", "--clear-groups")
    assert it.host.run(*member, PYTHON, "-c", ASK, check=False).returncode == 1


@pytest.mark.parametrize("user", ["root", "wattspan"])
def test_each_connection_starts_a_helper_that_ends_with_it(it: Installed, user: str) -> None:
    who = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    assert it.host.run(*who, PYTHON, "-c", ASK).stdout.strip() == REFUSED
    eventually(lambda: not instances(it), "no helper is left")


def test_agents_unit_may_connect_and_reports_why_nothing_is_counted(it: Installed) -> None:
    it.host.systemctl("start", AGENT)

    def told() -> list[str]:
        sections = json.loads(it.host.run(PROGRAM, "doctor", "--json").stdout)["sections"]
        (agent,) = (one["findings"] for one in sections if one["title"] == "Agent")
        return [finding["detail"] for finding in agent if PATH in finding["detail"]]

    assert REFUSED in eventually(told, "the agent has asked", within=60)[0]
    it.host.systemctl("stop", AGENT)


def test_sandbox_of_the_helper_permits_the_program_and_its_events(it: Installed) -> None:
    text = (it.host.units / COUNTERS).read_text()
    probing = f"ExecStart={PYTHON} -c {COUNT!r}"
    changed = re.sub(r"(?m)^ExecStart=.*$", lambda _: probing, text)
    changed = re.sub(r"(?m)^Standard\w+=.*\n", "", changed).replace(
        "[Service]\n", "[Service]\nType=oneshot\n"
    )
    (it.host.units / "probing-counters.service").write_text(changed)
    it.host.systemctl("daemon-reload")
    it.host.systemctl("start", "probing-counters.service")
    assert "opened: 4\n" in it.host.inside(PRINTED).read_text()
