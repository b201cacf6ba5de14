"""An emulated powercap host with the test's clock and load, and the reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from testbed.emulated_faults import FaultyPowercapEngine, FaultyPowercapTree
from testbed.powercap_layouts import LAYOUTS
from wattspan.emulation.control import Closeable
from wattspan.emulation.powercap_engine import CpuLaw
from wattspan.emulation.powercap_tree import PowercapLayout
from wattspan.ports import Batch
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.testing import ManualClock


class PowercapHost(Closeable):
    """Sockets do the given ``work``; ``pass_time`` advances the time."""

    def __init__(self, root: Path, layout: str | PowercapLayout = "xeon-2s") -> None:
        self.layout = LAYOUTS[layout] if isinstance(layout, str) else layout
        self.clock = ManualClock()
        self.tree = FaultyPowercapTree(root, self.layout, cpus=2)
        self._busy = [0] * self.layout.sockets
        self.engine = FaultyPowercapEngine(
            self.tree, CpuLaw(), self.clock, lambda: tuple(self._busy)
        )
        self.source = PowercapSource(root, self.clock, emulated=True)
        self.pass_time(1)

    def work(self, socket: int, seconds: float) -> None:
        """CPUs of ``socket`` are busy for ``seconds`` of CPU time, in no time."""
        self._busy[socket] += round(seconds * 1e9)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.engine.step()

    def read_after(self, seconds: float = 0.1) -> Batch:
        self.pass_time(seconds)
        return self.source.read()

    def close(self) -> None:
        self.source.close()
        self.engine.close()
        self.tree.close()


def run_on(sysfs: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a program that has ``/sys`` hard-coded, with ``sysfs`` in its place. Needs root.

    The mount is private to the program: the machine's own /sys is never touched.
    """
    script = 'mount --make-rprivate / && mount --bind "$1" /sys && shift && exec "$@"'
    return subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", str(sysfs), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def python_on(sysfs: Path, code: str) -> subprocess.CompletedProcess[str]:
    """``run_on`` with this interpreter and ``code``."""
    return run_on(sysfs, [sys.executable, "-c", code])


def counters(batch: Batch) -> dict[str, int]:
    return {reading.domain_id: reading.counter for reading in batch.readings}


def epochs(batch: Batch) -> dict[str, int]:
    return {reading.domain_id: reading.epoch for reading in batch.readings}
