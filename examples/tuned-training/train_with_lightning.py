"""Train a small classifier with Lightning; one callback reports the units of work."""

from __future__ import annotations

import argparse
import importlib
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--accumulate", type=int, default=4)
    options.add_argument("--max-slowdown", type=float, default=None)
    options.add_argument(
        "--package", choices=["lightning.pytorch", "pytorch_lightning"], default="lightning.pytorch"
    )
    chosen = options.parse_args()

    lightning = importlib.import_module(chosen.package)
    from wattspan.integrations.lightning import WattspanCallback

    class Classifier(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))

        def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
            inputs, labels = batch
            return nn.functional.cross_entropy(self.layers(inputs), labels)

        def validation_step(self, batch: list[torch.Tensor], number: int) -> None:
            self.log("validation_loss", self.training_step(batch, number))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.randn(160, 8)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            default_root_dir=folder,
            max_epochs=chosen.epochs,
            accumulate_grad_batches=chosen.accumulate,
            val_check_interval=0.5,  # twice in an epoch
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[WattspanCallback(max_slowdown=chosen.max_slowdown)],
        )
        trainer.fit(Classifier(), DataLoader(data, batch_size=16), DataLoader(data, batch_size=80))
    print(f"{trainer.global_step} steps, {trainer.current_epoch} epochs")


if __name__ == "__main__":
    main()
