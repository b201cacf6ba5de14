"""Power limit of a training loop, chosen with the optimizer of Zeus.

Only the imports differ from a script for Zeus: ``zeus.monitor`` and ``zeus.optimizer.power_limit``.
The agent's tuner sets the limit, if the operator has turned it on.
"""

import argparse
import time

from wattspan.compat.zeus import (
    GlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    ZeusMonitor,
)


def train_step(seconds: float) -> None:
    """A step. Replace it by your own."""
    time.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--profile", help="a file for the limits that were tried")
    options = parser.parse_args()

    monitor = ZeusMonitor(gpu_indices=[0])
    optimizer = GlobalPowerLimitOptimizer(
        monitor, MaxSlowdownConstraint(factor=1.1), profile_path=options.profile
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
