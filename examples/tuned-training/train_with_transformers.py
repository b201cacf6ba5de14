"""Fine-tune a tiny GPT-2 with transformers' Trainer; one callback reports the units of work."""

from __future__ import annotations

import argparse
import tempfile

import torch
from tiny_model import tiny_gpt2, token_blocks
from transformers import Trainer, TrainingArguments

from wattspan.integrations.huggingface import WattspanCallback


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--accumulate", type=int, default=2)
    options.add_argument("--evaluate-every", type=int, default=20)
    options.add_argument("--max-slowdown", type=float, default=None)
    chosen = options.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    callback = WattspanCallback(max_slowdown=chosen.max_slowdown)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=tiny_gpt2(),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=chosen.steps,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=chosen.accumulate,
                include_num_input_tokens_seen="all",
                eval_strategy="steps",
                eval_steps=chosen.evaluate_every,
                save_steps=chosen.evaluate_every,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            train_dataset=token_blocks(200),
            eval_dataset=token_blocks(8),
            callbacks=[callback],
        )
        trainer.train()
    print(f"{trainer.state.global_step} steps, {trainer.state.num_input_tokens_seen} tokens")
    if callback.declined:
        print(callback.declined)


if __name__ == "__main__":
    main()
