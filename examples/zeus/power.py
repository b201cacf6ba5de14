"""Power of a GPU over time, measured with the interface of Zeus.

Only the import differs from a script for Zeus: ``from zeus.monitor import PowerMonitor``.
"""

import time

from wattspan.compat.zeus import PowerMonitor


def main() -> None:
    monitor = PowerMonitor(gpu_indices=[0], update_period=0.1)
    start = time.time()
    time.sleep(3)  # replace it by your own work
    end = time.time()
    power = monitor.get_power()
    energy = monitor.get_energy(start, end)
    timeline = monitor.get_power_timeline("device_instant", start_time=start, end_time=end)
    monitor.stop()
    assert power is not None
    assert energy is not None
    print(f"now: {power[0]:.1f} W")
    print(f"in {end - start:.1f} s: {energy[0]:.1f} J")
    seconds, watts = zip(*timeline[0], strict=True)
    print(f"highest: {max(watts):.1f} W")
    print(f"in order: {list(seconds) == sorted(seconds)}")


if __name__ == "__main__":
    main()
