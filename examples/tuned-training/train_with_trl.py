"""Fine-tune a tiny GPT-2 on texts with TRL's SFTTrainer; one callback reports the units of work."""

from __future__ import annotations

import argparse
import tempfile

import torch
from tiny_model import texts, tiny_gpt2, tiny_tokenizer
from trl import SFTConfig, SFTTrainer

from wattspan.integrations.huggingface import WattspanCallback


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--max-slowdown", type=float, default=None)
    chosen = options.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=tiny_gpt2(),
            args=SFTConfig(
                output_dir=folder,
                num_train_epochs=chosen.epochs,
                per_device_train_batch_size=4,
                max_length=32,
                include_num_input_tokens_seen="non_padding",
                save_strategy="epoch",
                report_to=[],
                use_cpu=True,
                bf16=False,
                disable_tqdm=True,
            ),
            train_dataset=texts(40),
            processing_class=tiny_tokenizer(),
            callbacks=[WattspanCallback(max_slowdown=chosen.max_slowdown)],
        )
        trainer.train()
    print(f"{trainer.state.global_step} steps, {trainer.state.num_input_tokens_seen} tokens")


if __name__ == "__main__":
    main()
