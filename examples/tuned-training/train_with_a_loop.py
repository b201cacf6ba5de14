"""Train a small classifier in a loop of plain PyTorch; ``Loop`` reports the units of work."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wattspan.training import Loop


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--max-slowdown", type=float, default=None)
    chosen = options.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(160, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def accuracy() -> float:
        with torch.no_grad():
            guesses = model(inputs).argmax(1)
        return float((guesses == data.tensors[1]).float().mean())

    with Loop(max_slowdown=chosen.max_slowdown) as loop:
        for epoch in range(chosen.epochs):
            for batch, labels in loop(DataLoader(data, batch_size=16)):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(batch), labels).backward()
                optimizer.step()
            print(f"epoch {epoch}: accuracy {loop.evaluate(accuracy):.2f}")
        if loop.declined:
            print(loop.declined)


if __name__ == "__main__":
    main()
