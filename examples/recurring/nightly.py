"""A training that runs every night: the agent chooses its batch size and records what it costs.

python nightly.py
wattspan recurring status nightly
"""

import time

from wattspan.recurring import BatchSizeOptimizer


def train_epoch(batch_size: int) -> None:
    """A stand-in: small batches take longer."""
    time.sleep(0.4 + 6 / batch_size)


def evaluate(epoch: int, batch_size: int) -> float:
    """A stand-in: large batches need more epochs."""
    return min(0.95, 0.5 + 0.25 * epoch / (1 + batch_size / 64))


def main() -> None:
    optimizer = BatchSizeOptimizer(
        "nightly",
        batch_sizes=[16, 32, 64],
        default_batch_size=32,
        target_metric=0.8,
        higher_is_better_metric=True,
        max_epochs=10,
    )
    batch_size = optimizer.get_batch_size()
    optimizer.on_train_begin()
    for epoch in range(1, 11):
        train_epoch(batch_size)
        accuracy = evaluate(epoch, batch_size)
        optimizer.on_evaluate(accuracy)
        if optimizer.training_finished:
            break
    print(f"batch size {batch_size}: accuracy {accuracy:.2f} after {epoch} epochs")


if __name__ == "__main__":
    main()
