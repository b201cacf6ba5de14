"""Train a small network on the CPU; OpenTelemetry spans say where the epochs and steps are."""

from __future__ import annotations

import argparse

import torch
from opentelemetry import trace
from torch import nn

tracer = trace.get_tracer("train")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--steps", type=int, default=40, help="in an epoch")
    options.add_argument("--batch", type=int, default=64)
    chosen = options.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 5 * 5, 10),
    )  # fmt: skip
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(chosen.epochs):
        with tracer.start_as_current_span("epoch", attributes={"epoch": epoch}):
            images, labels = synthetic_digits(chosen.batch * chosen.steps)
            loss = 0.0
            for first in range(0, len(images), chosen.batch):
                batch = slice(first, first + chosen.batch)
                loss = train_step(model, optimiser, images[batch], labels[batch])
        print(f"epoch {epoch}: loss {loss:.3f}", flush=True)


def train_step(
    model: nn.Module, optimiser: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> float:
    with tracer.start_as_current_span("train_step", attributes={"samples": len(images)}):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimiser.step()
        return loss.item()


def synthetic_digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy images with a bright square whose place is the label."""
    labels = torch.randint(10, (count,))
    images = 0.3 * torch.randn(count, 1, 28, 28)
    for digit in range(10):
        row, column = divmod(digit, 5)
        where = labels == digit
        images[where, :, 4 + 12 * row : 10 + 12 * row, 5 * column : 5 * column + 5] += 1.0
    return images, labels


if __name__ == "__main__":
    main()
