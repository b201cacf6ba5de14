"""Power limit of a training loop, chosen by an optimum selector of the application.

Only the imports differ from a script for Zeus: ``zeus.monitor`` and ``zeus.optimizer.power_limit``.
The selector chooses from ``--profile``, a file that ``power_limit.py --profile`` or ``wattspan
frontier run`` has written; the agent's tuner certifies the choice before it holds it.
"""

import argparse
import time

from wattspan.compat.zeus import (
    GlobalPowerLimitOptimizer,
    OptimumSelector,
    PowerLimitMeasurement,
    ZeusMonitor,
)


class EnergyDelayProduct(OptimumSelector):
    """The least product of energy and time."""

    def select(self, measurements: list[PowerLimitMeasurement]) -> int:
        best = min(measurements, key=lambda one: one.energy * one.time)
        print(f"{best.power_limit} W is the choice from {len(measurements)} limits")
        return best.power_limit


def train_step(seconds: float) -> None:
    """A step. Replace it by your own."""
    time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--profile")
    options = parser.parse_args()

    monitor = ZeusMonitor(gpu_indices=[0])
    optimizer = GlobalPowerLimitOptimizer(
        monitor, EnergyDelayProduct(), profile_path=options.profile
    )
    for epoch in range(options.epochs):
        optimizer.on_epoch_begin()
        monitor.begin_window("epoch", sync_execution=False)
        for _ in range(options.steps):
            optimizer.on_step_begin()
            train_step(options.seconds)
            optimizer.on_step_end()
        energy = monitor.end_window("epoch", sync_execution=False).total_energy
        optimizer.on_epoch_end()
        print(f"epoch {epoch}: {energy:.1f} J")


if __name__ == "__main__":
    main()
