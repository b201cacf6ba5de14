"""The shipped capper's units under a real systemd: the original limit is restored after any end."""

from __future__ import annotations

import signal

import pytest
from testbed.capper_process import HOLDER
from testbed.fixtures import entered_once_in
from testbed.systemd_wattspan import (
    AGENT,
    CAPPER,
    CAPPER_SOCKET,
    PROGRAM,
    PYTHON,
    SOCKET,
    Installed,
    installed,
)
from testbed.waiting import eventually

pytestmark = [pytest.mark.long, pytest.mark.needs_systemd, pytest.mark.needs_cc]

ZONE = "rapl:package-0"
ORIGINAL, CAP = 270, 220
# A lease that no test outlasts: the test ends the cap
CONFIGURED = '[caps]\nlease = "5m"\n[autotune]\nknobs = ["gpu_power", "cpu_power"]\nfloor = 0.5\n'
FIXED = f'[[caps.fixed]]\ndevice = "intel-rapl:0"\nknob = "cpu_power"\nwatts = {CAP}\n'
RETAINED = "1 limit stays in force"
BY_THE_JOURNAL = "1 limit was restored by the journal"
STOP_POST = f"ExecStopPost={PROGRAM} caps restore --tuned"
LOCK = "/var/lib/wattspan-capper/lock"
HOLDER_THAT_LOCKS = f"""
import fcntl, threading
try:
    lock = open({LOCK!r}, "rb")
except OSError as error:
    print("no lock:", error, flush=True)
else:
    threading.Thread(target=fcntl.flock, args=(lock, fcntl.LOCK_EX), daemon=True).start()
"""
"""Goes before HOLDER: waits for the capper's lock, and keeps it."""
GPU = "gpu:GPU-e0e0e0e0-0000-4000-8000-000000000000"


everything = entered_once_in(installed, "capper")


@pytest.fixture
def it(everything: Installed) -> Installed:
    everything.fresh()
    assert everything.limit() == ORIGINAL  # independent of the previous test
    everything.configure(CONFIGURED)
    return everything


def test_capper_unit_is_socket_activated(it: Installed) -> None:
    it.host.systemctl("start", SOCKET)
    assert it.host.property(CAPPER, "ActiveState") == "inactive"
    with it.held(ZONE, CAP * 1000):
        assert it.host.property(CAPPER, "ActiveState") == "active"
        assert it.limit() == CAP
    eventually(lambda: it.limit() == ORIGINAL, "given back when the holder was killed")


def test_capper_socket_is_for_root_and_its_group(it: Installed) -> None:
    it.host.systemctl("start", SOCKET)
    ls = it.host.run("stat", "-c", "%U:%G %a", CAPPER_SOCKET).stdout
    assert ls == "root:wattspan 660\n"
    ask = ("setpriv", "--reuid=12345", "--regid=12345", "--clear-groups", PROGRAM, "caps", "status")
    refused = it.host.run(*ask, check=False)
    assert refused.returncode == 6
    assert "permission denied" in refused.stderr
    assert it.host.run(PROGRAM, "caps", "status").returncode == 0


def test_capper_unit_sets_and_restores_a_gpu_limit(it: Installed) -> None:
    it.host.systemctl("start", SOCKET)
    with it.held(GPU, 600_000, knob="gpu_power"):
        assert it.gpu_limit() == 600_000
    eventually(lambda: it.gpu_limit() == 700_000, "given back")


def test_killed_capper_unit_restores_and_restarts(it: Installed) -> None:
    it.host.systemctl("start", CAPPER)
    with it.held(ZONE, CAP * 1000):
        assert it.limit() == CAP
        pid, before = it.main_pid(CAPPER), it.host.journal().count(BY_THE_JOURNAL)
        it.host.kill(CAPPER, signal.SIGKILL)
        eventually(lambda: it.limit() == ORIGINAL, f"given back: {it.host.journal()[-3000:]}")
        eventually(lambda: it.main_pid(CAPPER) not in (0, pid), "started anew", within=60)
    it.host.wait_for(CAPPER, "ActiveState", "active")
    # by ExecStopPost, not by the next capper
    assert it.host.journal().count(BY_THE_JOURNAL) == before + 1


def test_killed_capper_unit_restores_from_a_read_only_disk(
    it: Installed,
) -> None:
    it.host.systemctl("start", CAPPER)
    stops = f"ExecStopPost=\nExecStopPost=+/bin/mount -o remount,ro /var\n{STOP_POST}\n"
    it.drop_in(CAPPER, f"[Service]\nRestartSec=100ms\n{stops}")
    before = it.host.journal().count(BY_THE_JOURNAL)
    try:
        with it.held(ZONE, CAP * 1000):
            assert it.limit() == CAP
            it.host.kill(CAPPER, signal.SIGKILL)
            eventually(lambda: it.limit() == ORIGINAL, f"given back: {it.host.journal()[-3000:]}")
        eventually(lambda: it.host.journal().count(BY_THE_JOURNAL) == before + 1, "by the journal")
        assert "Cannot write the journal" in it.host.journal()
        eventually(
            lambda: it.host.property(CAPPER, "ActiveState") == "active", "started anew", within=60
        )
    finally:
        it.host.systemctl("stop", CAPPER)  # after which it is read-only once more
        it.host.run("mount", "-o", "remount,rw", "/var")


@pytest.mark.exhaustive
def test_cap_of_the_configuration_outlives_the_agent_and_no_capper(it: Installed) -> None:
    it.configure(CONFIGURED + FIXED)
    it.drop_in(AGENT, "[Service]\nRestartSec=100ms\n")
    it.host.systemctl("start", AGENT, CAPPER)
    eventually(lambda: it.limit() == CAP, "in force without anybody asking")
    pid = it.main_pid(AGENT)
    it.host.kill(AGENT, signal.SIGKILL)
    eventually(lambda: it.main_pid(AGENT) not in (0, pid), "another agent", within=60)
    assert it.limit() == CAP  # the administrator's, not the agent's
    before = it.host.journal().count(RETAINED)
    capper = it.main_pid(CAPPER)
    it.host.kill(CAPPER, signal.SIGKILL)
    eventually(lambda: it.host.journal().count(RETAINED) > before, "it is retained", within=60)
    assert it.limit() == CAP
    eventually(lambda: it.main_pid(CAPPER) not in (0, capper), "another capper", within=60)
    it.host.wait_for(CAPPER, "ActiveState", "active")
    it.host.systemctl("stop", AGENT, CAPPER, SOCKET)
    assert it.limit() == CAP
    assert it.host.run(PROGRAM, "caps", "restore").returncode == 0
    assert it.limit() == ORIGINAL


def in_the_agents_place(it: Installed, script: str) -> None:
    """Run ``script``, which holds the given cap, in the agent's unit."""
    it.host.inside("/etc/wattspan/holder.py").write_text(script)
    words = f"{CAPPER_SOCKET} cpu_power {ZONE} {CAP * 1000}"
    it.drop_in(
        AGENT,
        "[Service]\nType=exec\nWatchdogSec=0\nRestart=no\n"
        f"ExecStart=\nExecStart={PYTHON} /etc/wattspan/holder.py {words}\n",
    )


def test_lease_holder_killed_in_the_agent_unit_is_released(
    it: Installed,
) -> None:
    # Actions of the agent's tuner, in its sandbox and as its user, followed by silence.
    script = f"{HOLDER}\nimport threading\nthreading.Event().wait()\n"
    in_the_agents_place(it, script)
    it.host.systemctl("start", SOCKET, AGENT)
    eventually(lambda: it.limit() == CAP, f"held: {it.host.journal()[-3000:]}")
    pid = it.main_pid(CAPPER)
    it.host.kill(AGENT, signal.SIGKILL)
    eventually(lambda: it.limit() == ORIGINAL, f"given back: {it.host.journal()[-3000:]}")
    assert it.main_pid(CAPPER) == pid


@pytest.mark.exhaustive
def test_agent_unit_activates_the_capper_and_reports_its_loss(
    it: Installed,
) -> None:
    it.configure(CONFIGURED + 'mode = "apply"\n')
    it.host.systemctl("start", SOCKET, AGENT)
    it.host.wait_for(CAPPER, "ActiveState", "active")
    eventually(
        lambda: "missing" not in it.host.property(AGENT, "StatusText"), "it is answered", within=60
    )
    it.host.systemctl("stop", CAPPER, SOCKET)
    eventually(
        lambda: "missing: capper" in it.host.property(AGENT, "StatusText"), "it says so", within=60
    )
    assert it.host.property(AGENT, "ActiveState") == "active"


BROKEN = "[caps]\nfloor_wats = 100\n"


def test_tuned_limit_is_restored_after_a_kill_with_a_broken_configuration(it: Installed) -> None:
    it.host.systemctl("start", CAPPER)
    with it.held(ZONE, CAP * 1000):
        it.configure(BROKEN)
        it.host.kill(CAPPER, signal.SIGKILL)
        eventually(lambda: it.limit() == ORIGINAL, f"restored: {it.host.journal()[-3000:]}")
        it.host.wait_for(CAPPER, "ActiveState", "failed", within=60)
    assert it.limit() == ORIGINAL


@pytest.mark.exhaustive
def test_fixed_limit_outlives_a_kill_with_a_broken_configuration(it: Installed) -> None:
    it.configure(CONFIGURED + FIXED)
    it.host.systemctl("start", CAPPER)
    eventually(lambda: it.limit() == CAP, "in force")
    it.configure(BROKEN)
    it.host.kill(CAPPER, signal.SIGKILL)
    it.host.wait_for(CAPPER, "ActiveState", "failed", within=60)
    assert it.limit() == CAP
    it.host.run(PROGRAM, "caps", "restore")
    assert it.limit() == ORIGINAL
    it.host.wait_for(CAPPER, "ActiveState", "failed", within=60)  # the restore has started it
    it.configure(CONFIGURED + FIXED)
    it.host.systemctl("start", CAPPER)
    eventually(lambda: it.limit() == CAP, "in force again")
    it.configure(CONFIGURED)
    it.host.run("systemctl", "reload", CAPPER)
    eventually(lambda: it.limit() == ORIGINAL, "lifted by the configuration")


def test_hung_capper_unit_is_ended_and_restores(it: Installed) -> None:
    it.drop_in(CAPPER, "[Service]\nWatchdogSec=5s\nTimeoutAbortSec=1s\nRestartSec=100ms\n")
    it.host.systemctl("start", CAPPER)
    pid, before = it.main_pid(CAPPER), it.host.journal().count(BY_THE_JOURNAL)
    with it.held(ZONE, CAP * 1000):
        it.host.kill(CAPPER, signal.SIGSTOP)
        assert it.limit() == CAP
        eventually(lambda: it.limit() == ORIGINAL, f"given back: {it.host.journal()[-3000:]}")
        eventually(lambda: it.main_pid(CAPPER) not in (0, pid), "started anew", within=60)
    eventually(lambda: "Failed with result 'watchdog'" in it.host.journal(), "that was why")
    # by ExecStopPost= after the kill, not by the next capper
    assert it.host.journal().count(BY_THE_JOURNAL) == before + 1


def test_shipped_watchdog_acts_on_a_stopped_capper_within_half_a_minute(it: Installed) -> None:
    """SIGABRT reaches no stopped process; SIGKILL, which systemd sends after it, does."""
    it.host.systemctl("start", CAPPER)
    watchdog = int(it.host.property(CAPPER, "WatchdogUSec").removesuffix("s"))
    abort = int(it.host.property(CAPPER, "TimeoutAbortUSec").removesuffix("s"))
    assert watchdog + abort <= 30
    assert it.host.property(CAPPER, "Restart") == "always"


def test_capper_unit_stop_restores_and_is_not_reactivated(it: Installed) -> None:
    it.host.systemctl("start", CAPPER)
    with it.held(ZONE, CAP * 1000):
        it.host.systemctl("stop", CAPPER)
        assert it.limit() == ORIGINAL
    assert it.host.property(CAPPER, "ActiveState") == "inactive"
    assert it.host.property(CAPPER, "Result") == "success"
    assert it.host.property(SOCKET, "ActiveState") == "active"


def test_capper_unit_restart_keeps_its_socket(it: Installed) -> None:
    it.host.systemctl("start", CAPPER)
    inode = it.host.run("stat", "-c", "%i", CAPPER_SOCKET).stdout
    it.host.systemctl("restart", CAPPER)
    assert it.host.run("stat", "-c", "%i", CAPPER_SOCKET).stdout == inode
    assert it.host.run(PROGRAM, "caps", "status").returncode == 0


def test_agent_reload_reloads_the_capper_and_keeps_leases(it: Installed) -> None:
    it.host.systemctl("start", AGENT, CAPPER)
    pid = it.main_pid(CAPPER)
    with it.held(ZONE, CAP * 1000):
        it.configure(CONFIGURED + "confidence = 0.9\n")
        it.host.systemctl("reload", AGENT)
        eventually(lambda: "Reloaded; limits stay in force" in it.host.journal(), "it says so")
        assert it.limit() == CAP
    assert it.main_pid(CAPPER) == pid


def test_stopping_everything_leaves_the_original_and_no_process(it: Installed) -> None:
    it.host.systemctl("start", AGENT, CAPPER)
    with it.held(ZONE, CAP * 1000):
        it.host.systemctl("stop", AGENT, CAPPER, SOCKET)
        assert it.limit() == ORIGINAL
    for unit in (AGENT, CAPPER):
        assert it.host.property(unit, "Result") == "success"
    left = it.host.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").stdout
    assert str(PROGRAM) not in left
    assert not it.host.inside(CAPPER_SOCKET).exists()


def test_agent_unit_cannot_write_capper_files(it: Installed) -> None:
    it.host.systemctl("start", AGENT, CAPPER)
    with it.held(ZONE, CAP * 1000):
        modes = it.host.run(
            "sh", "-c", "stat -c '%U:%G %a' /var/lib/wattspan-capper /run/wattspan-capper"
        ).stdout.splitlines()
    assert modes == ["root:wattspan 750", "root:wattspan 755"]


@pytest.mark.exhaustive
def test_lock_waiter_in_the_agent_unit_does_not_keep_a_cap(
    it: Installed,
) -> None:
    # One of an earlier version, which the group could open.
    it.host.run("install", "-D", "-m", "640", "/dev/null", LOCK)
    script = f"{HOLDER_THAT_LOCKS}\n{HOLDER}\nthreading.Event().wait()\n"
    in_the_agents_place(it, script)
    it.host.systemctl("start", CAPPER)
    assert it.host.run("stat", "-c", "%U %a", LOCK).stdout == "root 600\n"
    it.host.systemctl("start", AGENT)
    eventually(lambda: it.limit() == CAP, f"held: {it.host.journal()[-3000:]}")
    assert "no lock: " in it.host.journal()
    it.host.kill(CAPPER, signal.SIGKILL)
    eventually(lambda: it.limit() == ORIGINAL, f"given back: {it.host.journal()[-3000:]}")
