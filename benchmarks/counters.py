"""Reading the CPU's counters: the agent's reader and pyRAPL on one emulated tree.

Both read the same plain files in memory; a real zone adds its register read to both.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from testbed.powercap_layouts import LAYOUTS

from wattspan.clock import SystemClock
from wattspan.emulation.powercap_engine import CpuLaw, PowercapEngine, on_sockets, open_cpu_load
from wattspan.emulation.powercap_tree import PowercapTree
from wattspan.sources.rapl.powercap import PowercapSource
from wattspan.sources.rapl.pyrapl import PyRaplSensor

CALLS = 2000
REPEATS = 5


def microseconds(call: Callable[[], object]) -> float:
    """The CPU time of one ``call``: the best of several runs, which others disturbed least."""

    def run() -> float:
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        return (time.thread_time_ns() - start) / CALLS / 1000

    call()
    return min(run() for _ in range(REPEATS))


def main() -> None:
    clock = SystemClock()
    print("CPU microseconds to read a zone, best of 5 x 2000 reads of all zones:")
    print("\n| layout | zones | agent, with timestamps | pyRAPL, without | ratio |")
    print("|---|---|---|---|---|")
    for name in ("xeon-2s", "many-sockets"):
        memory = Path("/dev/shm")
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
            tree = PowercapTree(Path(root), LAYOUTS[name])
            load = on_sockets(open_cpu_load(clock), tree.socket_of_cpu)
            PowercapEngine(tree, CpuLaw(), clock, load).step()
            source = PowercapSource(Path(root), clock, emulated=True)
            sockets = range(tree.layout.sockets)
            library = PyRaplSensor(
                Path(root),
                {socket: tree.path(f"intel-rapl:{socket:x}") for socket in sockets},
                {socket: tree.path(f"intel-rapl:{socket:x}:0") for socket in sockets},
            )
            zones = len(source.read().readings)
            ours, theirs = microseconds(source.read), microseconds(library.read)
            print(
                f"| {name} | {zones} | {ours / zones:.2f} | {theirs / zones:.2f} "
                f"| {ours / theirs:.2f} |"
            )
            source.close()
            library.close()
            tree.close()


if __name__ == "__main__":
    main()
