"""A whole agent on an emulated host, in this process, with real processes whose truth is known."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

from testbed.emulated_faults import FaultyHost
from testbed.history import spent
from wattspan.clock import SystemClock
from wattspan.config import FlagValue, load
from wattspan.emulation.control import Closeable
from wattspan.emulation.host import profile_named
from wattspan.model import Consumer, HwType
from wattspan.plugins import discover
from wattspan.service.assembly import build_agent

BURN = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.nice(int(sys.argv[2]))
print("burning", flush=True)
while True:
    sum(range(1000))
"""


class LiveAgent(Closeable):
    """An agent measuring an emulated host, both real but for the hardware."""

    def __init__(self, profile: str, state_dir: Path, **settings: object) -> None:
        self.host = FaultyHost(profile_named(profile))
        self.clock = SystemClock()
        self.log: list[str] = []
        self._burners: list[subprocess.Popen[str]] = []
        self._sockets = tempfile.TemporaryDirectory(prefix="wattspan-")
        flags = {
            "agent.state_dir": str(state_dir),
            "agent.run_dir": self._sockets.name,
            "spans.http": "127.0.0.1:0",
            "exporters.prometheus.listen": "",
            **settings,
        }
        plugins = discover()
        config = load(
            None,
            environ={},
            flags={key: FlagValue("test", value) for key, value in flags.items()},
            schema=plugins.schema,
            default=Path(os.devnull),
        )
        try:
            self.agent = build_agent(config, plugins, log=self.log.append, emulated=self.host)
        except BaseException:
            self.host.close()
            raise
        self._stopped = False

    def burn(self, cpu: int, nice: int = 0) -> int:
        """Start a process that keeps ``cpu`` as busy as it may; its pid."""
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", BURN, str(cpu), str(nice)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._burners.append(process)
        assert process.stdout.readline() == "burning\n"
        return process.pid

    def rest(self, seconds: float) -> None:
        """Let the host go on for a while."""
        self.clock.sleep_until(self.clock.monotonic() + round(seconds * 1e9))

    def cpu_time(self, pid: int) -> int:
        """The CPU nanoseconds a process has used."""
        return self.clock.read_cpu_clock((~pid << 3) | 2)

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.agent.stop()

    def spent(self, pid: int, hw_type: HwType, start: int, end: int) -> int:
        """The microjoules charged to ``pid`` in a window, over all domains of a kind."""
        history = self.agent.history._attributions  # the agent is stopped
        who = {p for p in history._numbers if isinstance(p, Consumer) and p.pid == pid}
        domains = [
            account.domain.id
            for account in self.agent.view().domains
            if account.domain.hw_type is hw_type
        ]
        return sum(spent(history, d, p, start, end) for d in domains for p in who)

    def idle_error(self, domain_id: str) -> float:
        """The stated half-width of the 95 % range of a learned idle power, in milliwatts."""
        accounts = {account.domain.id: account for account in self.agent.view().domains}
        error = accounts[domain_id].idle_power_error
        assert error is not None, f"the idle power of {domain_id} is not learned"
        return error

    def __enter__(self) -> Self:
        self.agent.start()
        return self

    def close(self) -> None:
        for process in self._burners:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.stop()
        self.host.close()
        self._sockets.cleanup()


def churn(seconds: float, clock: SystemClock) -> int:
    """Start and end short-lived processes as fast as a shell can; how many there were."""
    before = _forks()
    shell = subprocess.Popen(["/bin/sh", "-c", "while :; do /bin/true; done"])
    clock.sleep_until(clock.monotonic() + round(seconds * 1e9))
    shell.kill()
    shell.wait()
    return _forks() - before


def _forks() -> int:
    """Number of processes started since boot."""
    lines = Path("/proc/stat").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("processes "))


def percent(measured: int, true: int) -> float:
    """Deviation from the truth in percent."""
    return 100 * (measured - true) / true
