"""An emulated host and its owner: queries, termination, and cleanup."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from testbed.emulated_faults import FaultyHost
from testbed.program import alive
from testbed.waiting import eventually

from wattspan.attribution.counted_uses import credible
from wattspan.clock import SystemClock
from wattspan.emulation import host as hosts
from wattspan.emulation.host import profile_named
from wattspan.model import SECOND, Consumer, Usage
from wattspan.ports import WattspanError
from wattspan.processes import open_processes
from wattspan.processes.performance_counters import CountersClient


@pytest.mark.parametrize(
    "question",
    [
        {"do": "fault", "zone": "no such zone", "fault": "deny"},
        {"do": "fault", "zone": "intel-rapl:0", "fault": "explode"},
        {"do": "fault", "gpu": 7, "fault": "lost", "on": True},
        {"do": "attach", "gpu": 0, "pid": 1, "load": 0.5},
        {"do": "dance"},
        {},
    ],
)
def test_invalid_request_does_not_end_the_host(question: dict[str, object]) -> None:
    with FaultyHost(profile_named("laptop")) as host:
        with pytest.raises(WattspanError, match="The emulated host refuses: "):
            host.ask(**question)
        assert host.ask(do="truth")["zones"]


def test_only_the_owner_ends_the_host() -> None:
    with FaultyHost(profile_named("laptop")) as host:
        host._process.send_signal(signal.SIGTERM)
        assert host.ask(do="truth")["zones"]
    assert host._process.returncode == 0
    assert not host.directory.exists()


def test_files_of_a_killed_host_are_removed_by_the_next_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        tempfile.TemporaryDirectory() as apart,  # other tests' hosts are newborn, too
        monkeypatch.context() as patch,
    ):
        patch.setattr(hosts, "_STARTUP_GRACE", -1)
        patch.setattr(hosts, "_SHARED_MEMORY", Path(apart))
        with FaultyHost(profile_named("laptop")) as living:
            dead = FaultyHost(profile_named("laptop"))
            dead._process.kill()
            dead._process.wait()
            os.close(dead._lock_fd)  # like the end of its owner
            dead._lock_fd = -1
            assert dead.directory.exists()
            with FaultyHost(profile_named("laptop")):
                assert not dead.directory.exists()
                assert living.directory.exists()
            assert living.ask(do="truth")["zones"]
            dead.close()


def test_killed_host_is_named_and_its_jobs_end() -> None:
    with FaultyHost(profile_named("laptop")) as host:
        jobs = frozenset(host.start_jobs().values())
        host._process.kill()
        with pytest.raises(WattspanError, match="The emulated host has ended"):
            host.ask(do="truth")
        eventually(lambda: not alive(jobs), "its jobs end")
    assert not host.directory.exists()


def test_jobs_have_performance_counters_and_other_processes_have_none() -> None:
    clock = SystemClock()
    with FaultyHost(profile_named("two-socket")) as host:
        client = CountersClient(clock, host.counters, 30 * SECOND, of_kernel=False)
        processes = open_processes(clock, sysfs=host.sysfs, counters=client)
        with closing(processes.usage):
            processes.usage.poll()
            jobs = frozenset(host.start_jobs().values())

            def counted() -> list[Usage] | None:
                usages = [one for one in processes.usage.poll().usages if one.resource == "cpu"]
                payers = [payer for one in usages for payer in one.counts or ()]
                pids = {one.pid for one in payers if isinstance(one, Consumer)}
                return usages if pids == jobs else None

            eventually(counted, "each job has counts")
            found = eventually(counted, "each job has the counts of a whole period")
    for usage in found:
        for payer, counts in (usage.counts or {}).items():
            assert credible(usage.spent[payer], counts)
            assert counts.cycles == counts.reference


def test_unwritable_directory_is_an_error_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hosts, "_SHARED_MEMORY", tmp_path / "absent")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "absent as well"))
    with pytest.raises(WattspanError, match=r"Cannot set up an emulated host in .*: No such file"):
        FaultyHost(profile_named("laptop"))
