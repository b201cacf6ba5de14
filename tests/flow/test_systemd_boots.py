"""The systemd that the other tests run units in is a real one, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from testbed.systemd_boot import cgroups, sweep
from testbed.systemd_host import HostError, SystemdHost
from testbed.waiting import eventually

pytestmark = pytest.mark.needs_systemd

SLEEPER = "[Service]\nExecStart=sh -c 'echo it sleeps; exec sleep 1000'\n"


def _unit(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_two_systemd_instances_run_concurrently_and_end(tmp_path: Path) -> None:
    unit = _unit(tmp_path, "sleeper.service", SLEEPER)
    with (
        SystemdHost(tmp_path / "one", units=[unit]) as one,
        SystemdHost(tmp_path / "two", units=[unit]) as two,
    ):
        one.systemctl("start", "sleeper.service")
        assert one.property("sleeper.service", "ActiveState") == "active"
        assert two.property("sleeper.service", "ActiveState") == "inactive"
        eventually(lambda: "it sleeps" in one.journal(), "what it prints is seen")
        assert {one.name, two.name} <= cgroups()
        pids = (one.pid, two.pid)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not {one.name, two.name} & cgroups()


def test_systemd_instance_does_not_write_to_the_host(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.write_text("from the machine")
    with SystemdHost(tmp_path / "host", binds={Path("/opt/deep/shown"): shown}) as host:
        places = ("/etc", "/var/lib", "/home", "/opt", "/tmp", "/run", "/dev/shm")
        for place in places:
            host.run("touch", f"{place}/{host.name}")
        assert host.run("cat", "/opt/deep/shown").stdout == "from the machine"
        assert host.inside(f"/etc/{host.name}").exists()
        assert not [place for place in places if Path(place, host.name).exists()]


def test_systemd_failure_shows_the_journal(tmp_path: Path) -> None:
    unit = _unit(
        tmp_path, "broken.service", "[Service]\nType=oneshot\nExecStart=sh -c 'echo woe; exit 3'\n"
    )
    with SystemdHost(tmp_path / "host", units=[unit]) as host:
        with pytest.raises(HostError) as caught:
            host.systemctl("start", "broken.service")
        assert "woe" in str(caught.value)
        eventually(lambda: "status=3" in host.journal(), "the log names the exit status")


def test_systemd_instance_ends_with_its_killed_user(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from testbed.systemd_host import SystemdHost\n"
        "with SystemdHost(Path(sys.argv[1])) as host: print(host.pid, flush=True); time.sleep(1000)"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "host")],
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    with user, user.stdout:
        pid = int(user.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        user.send_signal(signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "its process 1 ends")
    eventually(lambda: (sweep(), not _of(user.pid))[1], "its cgroup can be removed")


def _of(pid: int) -> set[str]:
    return {name for name in cgroups() if f"-{pid}-" in name}
