"""The shipped agent's unit under a real systemd: from its start to its upgrade."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from testbed.fixtures import entered_once_in
from testbed.systemd_host import HostError
from testbed.systemd_wattspan import AGENT, PYTHON, Installed, installed
from testbed.waiting import eventually

pytestmark = [pytest.mark.needs_systemd, pytest.mark.needs_cc]

HOST = "hw_host_energy_joules_total"


everything = entered_once_in(installed, "agent")


@pytest.fixture
def it(everything: Installed) -> Installed:
    everything.fresh()
    return everything


def _joules(it: Installed) -> float:
    (joules,) = it.metric(HOST).values()
    return joules


def test_unit_is_active_once_it_serves(it: Installed) -> None:
    it.host.systemctl("start", AGENT)
    assert it.host.property(AGENT, "ActiveState") == "active"
    page = it.page()  # at once: no watchdog is expected
    for counted in ("rapl:package-0", "rapl:package-1/dram", "gpu:GPU-e0e0e0e0"):
        assert f'hw_id="{counted}' in page
    assert "energy counters" in it.host.property(AGENT, "StatusText")


def test_unit_runs_unprivileged_without_capabilities(everything: Installed) -> None:
    it = everything
    it.running(AGENT)
    status = it.host.run("cat", f"/proc/{it.main_pid(AGENT)}/status").stdout
    facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    uid = it.host.run("id", "--user", "wattspan").stdout.strip()
    assert set(facts["Uid"].split()) == {uid}
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(facts[kind], 16) == 0, kind
    assert facts["NoNewPrivs"].strip() == "1"
    assert facts["Seccomp"].strip() == "2"


def test_unit_resource_limits_are_enforced(everything: Installed) -> None:
    it = everything
    it.running(AGENT)
    seen = {
        name: it.host.property(AGENT, name)
        for name in ("CPUQuotaPerSecUSec", "MemoryMax", "TasksMax", "LimitCORE", "Nice")
    }
    assert seen == {
        "CPUQuotaPerSecUSec": "1s",
        "MemoryMax": str(384 * 2**20),
        "TasksMax": "128",
        "LimitCORE": "0",
        "Nice": "5",
    }
    adjusted = it.host.run("cat", f"/proc/{it.main_pid(AGENT)}/oom_score_adj").stdout
    assert adjusted.strip() == "300"


def test_unit_attributes_other_users(everything: Installed) -> None:
    it = everything
    it.running(AGENT)
    work = "import os\nos.setuid(12345)\nprint('begun', flush=True)\nwhile True: pass"
    worker = it.host.popen(PYTHON, "-c", work)
    with worker:
        worker.stdout.readline()
        try:
            eventually(
                lambda: [
                    joules
                    for labels, joules in it.metric("wattspan_group_energy_joules_total").items()
                    if 'group="12345"' in labels and joules > 1
                ],
                f"user 12345 has spent something: {it.host.journal()[-2000:]}",
            )
        finally:
            worker.kill()


def test_unit_reload_keeps_the_process(it: Installed) -> None:
    it.host.systemctl("start", AGENT)
    pid, before = it.main_pid(AGENT), _joules(it)
    it.configure('[exporters.prometheus]\nlisten = "127.0.0.1:9950"\n')
    it.host.systemctl("reload", AGENT)
    page = it.metrics(port=9950)
    assert it.main_pid(AGENT) == pid
    joules = next(line for line in page.splitlines() if line.startswith(f"{HOST}{{"))
    assert float(joules.split()[-1]) >= before


def test_unit_reload_with_an_invalid_configuration_keeps_the_old_one(it: Installed) -> None:
    it.host.systemctl("start", AGENT)
    it.configure("[agent]\ninterwal = 1\n")
    it.host.systemctl("reload", AGENT)
    eventually(
        lambda: "Not reloaded" in it.host.property(AGENT, "StatusText"), "its status says so"
    )
    assert it.host.property(AGENT, "ActiveState") == "active"
    assert it.metrics()


def test_unit_with_an_invalid_configuration_is_not_restarted(it: Installed) -> None:
    it.configure("[agent]\ninterwal = 1\n")
    with pytest.raises(HostError, match="interwal"):
        it.host.systemctl("start", AGENT)
    assert it.host.property(AGENT, "ActiveState") == "failed"
    assert it.host.property(AGENT, "NRestarts") == "0"


def test_agent_that_finds_no_counter_yet_is_tried_until_there_is_one(it: Installed) -> None:
    it.drop_in(AGENT, "[Service]\nRestartSec=100ms\n")
    it.configure('[sources.rapl]\nenabled = true\nsysfs = "/nowhere"\n')
    with pytest.raises(HostError, match="nowhere"):
        it.host.systemctl("start", AGENT)
    assert it.host.property(AGENT, "StartLimitIntervalUSec") == "0"  # it is never given up
    it.configure("")  # the driver has been loaded
    it.host.wait_for(AGENT, "ActiveState", "active", within=60)
    assert it.metrics()


@pytest.mark.exhaustive
def test_hung_unit_is_restarted(it: Installed) -> None:
    it.drop_in(AGENT, "[Service]\nWatchdogSec=5s\nTimeoutAbortSec=1s\nRestartSec=100ms\n")
    it.host.systemctl("start", AGENT)
    pid = it.main_pid(AGENT)
    it.host.kill(AGENT, signal.SIGSTOP)
    eventually(lambda: it.main_pid(AGENT) not in (0, pid), "it has another process")
    it.host.wait_for(AGENT, "ActiveState", "active")
    eventually(lambda: "Watchdog timeout" in it.host.journal(), "that was why")
    assert it.metrics()


def test_totals_continue_after_kill_and_restart(it: Installed) -> None:
    it.drop_in(AGENT, "[Service]\nRestartSec=100ms\n")
    it.configure('[store]\ninterval = "1s"\n')
    it.host.systemctl("start", AGENT)
    before = eventually(lambda: _joules(it), "it has measured")
    it.host.systemctl("restart", AGENT)
    assert _joules(it) >= before
    pid = it.main_pid(AGENT)
    it.host.kill(AGENT, signal.SIGKILL)
    eventually(lambda: it.main_pid(AGENT) not in (0, pid), "it has another process")
    it.host.wait_for(AGENT, "ActiveState", "active")
    assert _joules(it) >= before  # checkpoint of the restart


def test_unit_stop_writes_the_checkpoint_and_leaves_no_files(it: Installed) -> None:
    it.host.systemctl("start", AGENT)
    it.host.systemctl("stop", AGENT)
    assert it.host.property(AGENT, "Result") == "success"
    assert it.host.property(AGENT, "ActiveState") == "inactive"
    assert not it.host.inside("/run/wattspan").exists()
    assert it.host.inside("/var/lib/wattspan").is_dir()


def test_unit_upgrade_by_restart_keeps_totals(it: Installed, tmp_path: Path) -> None:
    it.host.systemctl("start", AGENT)
    before, pid = _joules(it), it.main_pid(AGENT)
    unit = it.host.units / AGENT
    shipped = unit.read_text()
    try:
        unit.write_text(shipped.replace("Nice=5", "Nice=6"))
        it.host.systemctl("daemon-reload")
        it.host.systemctl("try-restart", AGENT)
        assert it.main_pid(AGENT) != pid
        assert it.host.property(AGENT, "Nice") == "6"
        assert _joules(it) >= before
    finally:
        unit.write_text(shipped)
