"""``wattspan`` on an emulated host that somebody else has started, and that outlives it.

``python -m testbed.agent_on_host DIRECTORY run --emulate PROFILE ...``: limits of real hardware
survive the kill of an agent. An emulated host ends with the agent that started it, so that the
limits it leaves could not be observed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from wattspan.cli import main as wattspan
from wattspan.clock import SystemClock
from wattspan.emulation import host
from wattspan.emulation.control import Closeable
from wattspan.emulation.host import EmulatedHost, HostProfile


class Standing(Closeable):
    """The part of an EmulatedHost that an agent needs, for a host that runs already."""

    def __init__(self, directory: Path, profile: HostProfile) -> None:
        self.directory, self.profile = directory, profile

    @property
    def sysfs(self) -> Path:
        return self.directory / "sys"

    @property
    def resolution(self) -> int:
        return SystemClock.tick()

    lifeline = ()
    counters = EmulatedHost.counters
    nvml = EmulatedHost.nvml
    amdsmi = EmulatedHost.amdsmi

    def close(self) -> None:
        """The host keeps running."""


def main() -> None:
    directory = Path(sys.argv.pop(1))
    host.EmulatedHost = lambda profile, period: Standing(directory, profile)  # type: ignore[assignment,misc]
    wattspan()


if __name__ == "__main__":
    main()
