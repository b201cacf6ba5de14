"""Power limit of a Hugging Face trainer, chosen with the optimizer of Zeus.

Only the imports differ from a script for Zeus: ``zeus.monitor`` and ``zeus.optimizer.power_limit``.
TRL's trainers take the same callback. The model is a tiny one, made without downloads.
"""

import argparse
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from wattspan.compat.zeus import (
    HFGlobalPowerLimitOptimizer,
    MaxSlowdownConstraint,
    ZeusMonitor,
)

TOKENS = 12


def tiny_model() -> GPT2LMHeadModel:
    """A model that a CPU trains in seconds. Replace it by your own."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=TOKENS, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    )


def texts(count: int) -> list[dict[str, list[int]]]:
    """Sequences of tokens that count up. Replace them by your own."""
    rows = [[(first + at) % TOKENS for at in range(32)] for first in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    monitor = ZeusMonitor(gpu_indices=[0])
    optimizer = HFGlobalPowerLimitOptimizer(monitor, MaxSlowdownConstraint(factor=1.1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=tiny_model(),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=options.steps,
                per_device_train_batch_size=4,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,  # leave it out to train on the GPU
            ),
            train_dataset=texts(200),
            callbacks=[optimizer],
        )
        monitor.begin_window("training", sync_execution=False)
        trainer.train()
        training = monitor.end_window("training", sync_execution=False)
    print(f"{trainer.state.global_step} steps: {training.total_energy:.1f} J")


if __name__ == "__main__":
    main()
