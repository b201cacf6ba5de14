"""Metrics of sections of a program for Prometheus, with the interface of Zeus.

Only the import differs from a script for Zeus: ``from zeus.metric import EnergyHistogram``. The
figures are pushed to a Pushgateway. Without one, Prometheus scrapes the agent:
``wattspan_span_energy_joules_total`` has the energy of each section by this process,
``hw_power_watts`` the power of each device.
"""

import argparse
import time

from wattspan.compat.zeus import EnergyCumulativeCounter, EnergyHistogram, PowerGauge


def train_step(seconds: float) -> None:
    """A step. Replace it by your own."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(i * i for i in range(1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--gateway", default="", help="such as http://localhost:9091")
    options = parser.parse_args()

    steps = EnergyHistogram([0], [0], options.gateway, "histogram")
    epochs = EnergyCumulativeCounter([0], [0], 2, options.gateway, "counter")
    power = PowerGauge([0], 2, options.gateway, "gauge")
    power.begin_window("power")
    epochs.begin_window("epoch")
    for _ in range(options.steps):
        steps.begin_window("step", sync_execution=False)
        train_step(options.seconds)
        steps.end_window("step", sync_execution=False)
    epochs.end_window("epoch")
    power.end_window("power")
    print(f"{options.steps} steps are measured")


if __name__ == "__main__":
    main()
