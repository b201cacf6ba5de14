"""Commands of a user without groups and privileges, on a machine with the package."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from testbed.debian_machine import CONFIG, CPU_MAY_BE_CAPPED, Machine
from testbed.debian_root import the_package

pytestmark = [pytest.mark.needs_debian, pytest.mark.exhaustive]

CAPPED = (
    CPU_MAY_BE_CAPPED
    + '[[caps.fixed]]\ndevice = "rapl:package-0"\nknob = "cpu_power"\nwatts = 90\n'
)
KNOWN_IDLE_POWER = "[processes]\ncpu_idle_watts = 1\nmemory_idle_watts = 1\n"
TUNED = '[autotune]\nmode = "advise"\nknobs = ["cpu_power"]\n'
BUSY = "i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done"


@dataclass(frozen=True)
class LocalUser:
    """A new user of a machine."""

    machine: Machine
    name: str = "alice"

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """One command in the user's session; it must end with ``code`` and print no traceback."""
        apart = ("runuser", "-u", self.name, "--", "env", "-C", f"/home/{self.name}")
        done = self.machine.host.run(*apart, *words, check=False, timeout=120)
        assert done.returncode == code, (words, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done


@pytest.fixture(scope="module")
def user() -> Iterator[LocalUser]:
    with Machine() as machine:
        machine.install(the_package())
        machine.host.run("useradd", "--create-home", "alice")
        user = LocalUser(machine)
        restarted(user, "")
        yield user


def restarted(user: LocalUser, text: str) -> None:
    user.machine.configure(KNOWN_IDLE_POWER + text)
    user.machine.host.systemctl("restart", "wattspan.service")
    user.machine.measuring()


def test_new_user_may_not_read_the_configuration_or_the_store(user: LocalUser) -> None:
    assert user.run("id", "-nG").stdout == "alice\n"
    for path in (CONFIG, "/var/lib/wattspan/energy.sqlite"):
        user.run("cat", path, code=1)


def test_published_settings_are_readable_and_hold_no_secret(user: LocalUser) -> None:
    restarted(user, '[spans]\nforward = "http://127.0.0.1:9"\nforward_headers = "x-key=hidden"\n')
    told = user.run("cat", "/run/wattspan/agent.json").stdout
    assert "hidden" not in told
    assert json.loads(told)["settings"]["exporters.prometheus.listen"] == "127.0.0.1:9949"
    found = user.machine.host.run("stat", "--format=%a %U", "/run/wattspan/agent.json").stdout
    assert found == "644 wattspan\n"
    user.machine.host.systemctl("stop", "wattspan.service")
    user.run("test", "-e", "/run/wattspan/agent.json", code=1)
    restarted(user, "")


def test_new_user_measures_a_command(user: LocalUser) -> None:
    done = user.run("wattspan", "measure", "--json", "--", "sh", "-c", BUSY)
    told = json.loads(done.stderr)
    assert told["measured_by"] == "the running agent"
    assert told["mean"]["host_joules"]["cpu"] > 0
    assert told["mean"]["command_joules"]["cpu"] > 0


def test_new_user_sees_top(user: LocalUser) -> None:
    assert "package" in user.run("wattspan", "top", "--once").stdout
    told = json.loads(user.run("wattspan", "top", "--json").stdout)
    assert not told["restricted"]


def test_new_user_sees_top_of_an_agent_at_another_address(user: LocalUser) -> None:
    user.machine.configure('[exporters.prometheus]\nlisten = "127.0.0.1:9123"\n')
    user.machine.host.systemctl("restart", "wattspan.service")
    told = json.loads(user.run("wattspan", "top", "--json").stdout)
    assert not told["restricted"], "it is read at the published address"
    restarted(user, "")


def test_new_user_sees_own_top_where_metrics_need_a_token(user: LocalUser) -> None:
    token = user.machine.root.path / "etc/wattspan/token"
    token.write_text("t" * 40 + "\n")
    user.machine.host.run("chown", "wattspan:", "/etc/wattspan/token")
    token.chmod(0o400)
    user.machine.configure(
        KNOWN_IDLE_POWER + '[exporters.prometheus]\ntoken_file = "/etc/wattspan/token"\n'
    )
    user.machine.host.systemctl("restart", "wattspan.service")
    told = json.loads(user.run("wattspan", "top", "--json").stdout)
    assert told["restricted"]
    assert "Left out: " in user.run("wattspan", "top", "--once").stdout
    restarted(user, "")


def test_new_user_reads_a_report_of_the_host_and_own_energy(user: LocalUser) -> None:
    user.run("sh", "-c", BUSY)
    user.machine.until(
        lambda: "alice" in user.run("wattspan", "report").stdout, "the user has a row"
    )
    done = user.run("wattspan", "report", "--json")
    assert done.stderr.startswith("wattspan: Left out: ")
    told = json.loads(done.stdout)
    named = {line["name"] for line in told["lines"] if line["role"] == "named"}
    assert named == {"alice"}
    assert told["total"]["energy_microjoules"] == sum(
        line["energy_microjoules"] for line in told["lines"]
    )
    everything = user.machine.host.run("wattspan", "report", "--by", "user", "--json").stdout
    assert {line["name"] for line in json.loads(everything)["lines"]} > named
    for by in ("process", "group", "kind", "domain", "span"):
        user.run("wattspan", "report", "--by", by)


def test_new_user_sees_tuning_and_advice(user: LocalUser) -> None:
    assert "Tuning is off" in user.run("wattspan", "tune", "status", code=7).stderr
    restarted(user, TUNED)
    user.run("wattspan", "tune", "status")
    user.run("wattspan", "tune", "explain")
    user.run("wattspan", "tune", "history")
    user.run("wattspan", "advise")
    restarted(user, "")


def test_new_user_sees_caps(user: LocalUser) -> None:
    assert "No capper runs" in user.run("wattspan", "caps", "status").stdout
    assert json.loads(user.run("wattspan", "caps", "status", "--json").stdout)["rows"] == []
    restarted(user, CAPPED)
    user.machine.until(lambda: user.machine.limit == 90_000_000, "the cap is in force")
    told = user.run("wattspan", "caps", "status").stdout
    assert "of the system's service, on /run/wattspan-capper/capper.sock" in told
    assert "90 W" in told
    rows = json.loads(user.run("wattspan", "caps", "status", "--json").stdout)["rows"]
    root = json.loads(user.machine.host.run("wattspan", "caps", "status", "--json").stdout)["rows"]
    assert [row["device"] for row in rows] == [row["device"] for row in root]
    refused = user.run("wattspan", "caps", "restore", code=6).stderr
    assert "nothing was changed" in refused
    assert "nevertheless" not in refused
    assert user.machine.limit == 90_000_000
    user.machine.configure(KNOWN_IDLE_POWER + CPU_MAY_BE_CAPPED)
    user.machine.host.systemctl("reload", "wattspan.service")
    user.machine.until(user.machine.restored, "the removed cap is lifted")
    restarted(user, "")


def test_new_user_checks_an_own_file(user: LocalUser) -> None:
    user.run("sh", "-c", "echo '[agent]\ninterval = \"1s\"' > own.toml")
    assert user.run("wattspan", "config", "check", "own.toml").stdout == "own.toml: ok\n"


def test_new_user_sees_and_compares_on_an_emulated_service(user: LocalUser) -> None:
    restarted(
        user,
        '[emulation]\nprofile = "one-socket-h100"\n[[caps.fixed]]\ndevice = "*"\nwatts = 450\n',
    )
    told = user.machine.until(
        lambda: "450 W of" in (told := user.run("wattspan", "caps", "status").stdout) and told,
        "the cap of the emulated board",
    )
    assert "of the agent process" in told
    assert "/run/wattspan/capper.sock" in told
    root = user.machine.host.run("wattspan", "caps", "status").stdout
    assert "/run/wattspan/capper.sock" in root
    # No other program of this machine uses the emulated board, and none taints a trial.
    user.run(
        *("wattspan", "frontier", "run", "--param", "pause=0.1,0.2", "--unit", r"stdout:unit"),
        *("--warm-up", "1s", "--window", "5s", "--repeat", "1"),
        *("--", "sh", "-c", "while echo unit; do sleep {pause}; done"),
    )
    assert "pause=0.2" in user.run("wattspan", "frontier", "show", "frontier.json").stdout
    restarted(user, "")
