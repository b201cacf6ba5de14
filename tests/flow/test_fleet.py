"""Three emulated hosts share a budget over a real etcd: from nothing, and under faults."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from testbed.etcd import EtcdCluster
from testbed.program import Running, wattspan
from testbed.waiting import eventually

pytestmark = [pytest.mark.needs_etcd, pytest.mark.exhaustive]

BUDGET = 1800
PROFILE = "one-socket-h100"
FLOOR, ORIGINAL = 268.0, 970.0
"""The lowest and the original sum of the limits of one host, in watts."""


class Fleet:
    """An etcd cluster and agents on emulated hosts, which end with the context."""

    def __init__(self, folder: Path, members: int) -> None:
        self.folder = folder
        self.stack = ExitStack()
        self.etcd = self.stack.enter_context(EtcdCluster(folder, members))
        self.hosts: dict[str, Running] = {}

    def start(self, *names: str) -> None:
        for name in names:
            folder = self.folder / name
            folder.mkdir(exist_ok=True)
            run = Running(
                folder,
                emulate=PROFILE,
                fleet__endpoints=json.dumps(self.etcd.urls),
                fleet__name=name,
                fleet__place="row-1",
                fleet__contact="6s",
                fleet__fallback="4s",
                spans__http="",
            )
            self.hosts[name] = self.stack.enter_context(run)

    def command(self, *words: str) -> str:
        endpoints = f"fleet.endpoints={json.dumps(self.etcd.urls)}"
        done = wattspan("fleet", *words, "--set", endpoints)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> dict[str, Any]:
        return json.loads(self.command("status", "--json"))

    def allotments(self) -> dict[str, float]:
        """The limits that the hosts in contact have put in force, in watts."""
        return {
            one["name"]: one["enforceable"]
            for one in self.status()["hosts"]
            if one["in_contact"] and one["acknowledged"]
        }

    def enforced(self, name: str) -> float:
        """The sum of the limits of one host's devices, in watts, as its capper reads them."""
        host = self.hosts[name]
        done = wattspan(
            "caps", "status", "--json",
            "--set", f"agent.run_dir={host.run_dir}",
            "--set", f"agent.state_dir={host.state_dir}",
            "--set", f"emulation.profile={PROFILE}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["allotment"]["enforced"] / 1000


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, 3)
    with fleet.stack:
        yield fleet


def test_three_hosts_share_a_budget_and_lose_a_host_a_member_and_etcd(fleet: Fleet) -> None:
    assert "has a budget of 1800 W" in fleet.command("budget", "row-1", str(BUDGET))
    names = ("host-1", "host-2", "host-3")
    fleet.start(*names)
    eventually(lambda: sum(fleet.allotments().values()) == BUDGET, "the whole budget", 120)
    shares = fleet.allotments()
    assert all(FLOOR < share < ORIGINAL for share in shares.values())
    for name in names:
        assert fleet.enforced(name) <= shares[name]
        assert (fleet.hosts[name].state_dir / "fleet-session.json").exists()

    refused = wattspan(
        "fleet", "budget", "row-1", "700",
        "--set", f"fleet.endpoints={json.dumps(fleet.etcd.urls)}",
    )  # fmt: skip
    assert refused.returncode == 9
    assert "104 W below the floors of its 3 hosts, which are 804 W" in refused.stderr

    fleet.command("drain", "host-3")
    eventually(lambda: fleet.allotments().get("host-3") == FLOOR, "it is drained")
    fleet.command("drain", "host-3", "--undo")

    fleet.etcd.kill(fleet.etcd.leader())
    leader = eventually(lambda: fleet.status()["leader"], "a leader")
    fleet.hosts[leader].end(signal.SIGKILL)

    def followed() -> bool:
        return fleet.status()["leader"] not in ("", leader) and leader not in fleet.allotments()

    eventually(followed, "another leader")
    others = [name for name in names if name != leader]
    eventually(lambda: fleet.allotments().keys() == set(others), "its session has ended")
    hosts = {one["name"]: one for one in fleet.status()["hosts"]}
    assert sum(one["enforceable"] for one in hosts.values()) <= BUDGET

    fleet.start(leader)
    eventually(lambda: fleet.allotments().keys() == set(names), "the killed host joins again", 120)
    eventually(lambda: sum(fleet.allotments().values()) == BUDGET, "the whole budget again", 120)
    assert fleet.enforced(leader) <= fleet.allotments()[leader]
    hosts = {one["name"]: one for one in fleet.status()["hosts"]}

    for member in range(3):
        fleet.etcd.kill(member)
    safe = {name: hosts[name]["safe"] for name in names}
    for name in names:
        eventually(lambda name=name: fleet.enforced(name) <= safe[name], "the safe allotment")
        host = fleet.hosts[name]
        eventually(lambda host=host: "Cannot reach the fleet" in host.said, "the agent reports it")
    for member in range(3):
        fleet.etcd.start(member)
    eventually(lambda: fleet.allotments().keys() == set(names), "the hosts return", 120)

    gone = others[0]
    assert fleet.hosts[gone].end() == 0
    eventually(lambda: gone not in fleet.allotments(), "it has left")
    fleet.command("remove", gone)
    assert gone not in {one["name"] for one in fleet.status()["hosts"]}
