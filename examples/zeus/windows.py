"""Energy of an epoch and of its steps, measured with the interface of Zeus.

Only the import differs from a script for Zeus: ``from zeus.monitor import ZeusMonitor``.
"""

import argparse
import statistics
import time

from wattspan.compat.zeus import ZeusMonitor


def train_step(seconds: float) -> None:
    """A step: half computation, half waiting. Replace it by your own."""
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end:
        sum(i * i for i in range(1000))
    time.sleep(seconds / 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--log")
    options = parser.parse_args()

    # Without a GPU framework there is no queued work to wait for.
    monitor = ZeusMonitor(gpu_indices=[0], log_file=options.log)
    steps = []
    monitor.begin_window("epoch", sync_execution=False)
    for _ in range(options.steps):
        monitor.begin_window("step", sync_execution=False)
        train_step(options.seconds)
        steps.append(monitor.end_window("step", sync_execution=False))
    epoch = monitor.end_window("epoch", sync_execution=False)

    print(f"epoch: {epoch.time:.2f} s, {epoch.total_energy:.1f} J")
    for gpu, joules in epoch.gpu_energy.items():
        print(f"GPU {gpu}: {joules:.1f} J")
    print(f"step: {statistics.mean(step.time for step in steps):.2f} s on average")
    print(f"step: {statistics.mean(step.total_energy for step in steps):.1f} J on average")


if __name__ == "__main__":
    main()
