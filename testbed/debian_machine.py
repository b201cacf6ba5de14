"""A fresh Debian that is booted on emulated hardware, as its administrator knows it.

The powercap tree of an emulated host is its /sys, so that the installed program reads it without
changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

from testbed.debian_root import DebianRoot
from testbed.journals import journal_entries
from testbed.program import counters
from testbed.systemd_host import SystemdHost
from testbed.waiting import eventually
from wattspan.emulation.control import Closeable
from wattspan.emulation.host import EmulatedHost, profile_named

T = TypeVar("T")

UNITS = (
    *("wattspan.service", "wattspan-capper.service", "wattspan-capper.socket"),
    "wattspan-counters.socket",
)
PYTHON = "/opt/wattspan/bin/python3"
CONFIG = "/etc/wattspan/config.toml"
# A lease that no test outlasts: the test ends the cap
CPU_MAY_BE_CAPPED = '[autotune]\nknobs = ["cpu_power"]\n[caps]\nlargest_step = 1.0\nlease = "5m"\n'

_SCRAPE = """
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:9949/metrics", timeout=20).read().decode())
"""
_HOLDER = """
import threading
from pathlib import Path
from wattspan.capper.protocol import CapperClient
from wattspan.clock import SystemClock
from wattspan.model import CapKey, Knob

capper = Path("/run/wattspan-capper/capper.sock")
client = CapperClient(capper, SystemClock(), who="a test", timeout=20.0)
client.hold("job", {CapKey(Knob.CPU_POWER, "rapl:package-0"): 60_000}, "a test")
while True:
    threading.Event().wait(1)
    client.rows(renew=True)
"""


class Machine(Closeable):
    """The machine runs for the duration of the ``with`` block; wattspan is not installed at
    first."""

    def __init__(self, root: DebianRoot | None = None) -> None:
        """``root`` is by default a new one of this machine's release."""
        self._fresh = root or DebianRoot()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.emulated = stack.enter_context(EmulatedHost(profile_named("two-socket")))
            self.root = stack.enter_context(self._fresh)
            sysfs = self.emulated.sysfs
            (sysfs / "fs" / "cgroup").mkdir(parents=True)
            self._zone = sysfs / "devices/virtual/powercap/intel-rapl/intel-rapl:0"
            self.original = self.limit
            self.host: SystemdHost = stack.enter_context(
                self.root.boot(binds={Path("/sys"): sysfs})
            )
            self._stack = stack.pop_all()
        return self

    def close(self) -> None:
        self._stack.close()

    # -------------------------------------------------------------------------- actions

    def apt(self, *words: str) -> str:
        """Run apt-get without network; return its output and that of the maintainer scripts."""
        quiet = ("-y", "-qq", "-o", "Dpkg::Use-Pty=0", "-o", "Dpkg::Options::=--force-confdef")
        done = self.host.run(
            *("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", *quiet, *words), timeout=180
        )
        return done.stdout + done.stderr

    def install(self, package: Path, *words: str) -> str:
        (name,) = self.root.put(package)
        return self.apt("install", *words, name)

    def configure(self, text: str) -> None:
        """Replace the configuration; the caller reloads the agent."""
        (self.root.path / CONFIG.lstrip("/")).write_text(text)

    def hold_a_cap(self) -> None:
        """Have a process of the agent's user hold one, until it or the capper ends."""
        words = ("systemd-run", "--quiet", "--collect", "--unit=holder", "--uid=wattspan")
        self.host.run(*words, PYTHON, "-c", _HOLDER)
        self.until(lambda: self.limit < self.original, "a cap is in force")

    # ------------------------------------------------------------------------------- queries

    @property
    def limit(self) -> int:
        """Power limit of the package in microwatts, as the kernel shows it.

        A file, unlike the kernel's, is empty while it is written.
        """
        return int(eventually((self._zone / "constraint_0_power_limit_uw").read_text, "a limit"))

    def journal(self) -> list[dict[str, Any]]:
        """Originals in the capper's journal."""
        return journal_entries(self.root.path / "var/lib/wattspan-capper")

    def restored(self) -> bool:
        """True if the original limit is in force and the journal is empty."""
        return self.limit == self.original and self.journal() == []

    def active(self, unit: str) -> bool:
        return self.host.property(unit, "ActiveState") == "active"

    def totals(self) -> dict[str, float]:
        """Every counter that /metrics shows, by name and labels; none while it does not answer."""
        done = self.host.run(PYTHON, "-c", _SCRAPE, check=False)
        return counters(done.stdout) if done.returncode == 0 else {}

    def energy(self) -> float:
        """Joules of the host so far."""
        totals = self.totals()
        return sum(v for k, v in totals.items() if k.startswith("hw_host_energy_joules_total"))

    def measuring(self) -> float:
        """Energy of the machine, once positive."""
        return self.until(self.energy, "it measures")

    def until(self, holds: Callable[[], T | None], what: str) -> T:
        """The first truthy result; an AssertionError quotes the machine's logs."""
        try:
            return eventually(holds, what, within=60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.host.journal()}") from None

    def processes(self) -> list[str]:
        """Command lines of the running wattspan processes."""
        found = self.host.run("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '", check=False)
        return [line for line in found.stdout.splitlines() if "/opt/wattspan" in line]
