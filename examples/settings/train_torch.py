"""A real PyTorch training on CPU threads: a small convolutional network on random images.

    python train_torch.py THREADS BATCH_SIZE

It prints the samples of each step, and never ends. PyTorch is not a requirement of wattspan:
`pip install torch`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn


def main() -> None:
    threads, batch = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    while True:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        print(f"samples={batch}", flush=True)


if __name__ == "__main__":
    main()
