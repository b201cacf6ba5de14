"""A PyTorch training of one's own, with one line of wattspan: ``Loop`` reports its steps.

    python train.py

A board of an emulated host computes each step as well, because it has a power limit; on a host with
a GPU, leave ``EmulatedBoard`` out.
"""

from __future__ import annotations

import itertools

import torch
from emulated_board import EmulatedBoard
from torch import nn

from wattspan.training import Loop


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(256, 8)
    labels = (inputs.sum(1) > 0).long()
    batches = itertools.cycle(zip(inputs.split(16), labels.split(16), strict=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with EmulatedBoard() as board, Loop(service="own-training", max_slowdown=0.1) as loop:
        for batch, wanted in loop(batches):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), wanted).backward()
            optimizer.step()
            board.step()


if __name__ == "__main__":
    main()
