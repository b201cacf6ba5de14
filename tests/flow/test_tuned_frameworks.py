"""Trainers with one callback whose steps run on an emulated board, beside an agent that tunes.

No configuration file names the job. A search to its end is in ``test_declared_jobs.py`` and in
``benchmarks/tuner/stack.py --callback``; here each framework's steps reach it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from testbed import emulated_training
from testbed.apps import EXAMPLES, app_environment
from testbed.requirements import APPS
from testbed.tuned_training import TuningAgent
from testbed.waiting import eventually

pytestmark = [pytest.mark.search, pytest.mark.needs_apps, pytest.mark.needs_training]

WITHIN = 300.0  # seconds
TUNED = {
    "WATTSPAN_AUTOTUNE_MODE": "apply",
    "WATTSPAN_AUTOTUNE_DECLARED": "allow",
    # shorter measurements than by default, so that the first probe takes half a minute
    "WATTSPAN_AUTOTUNE_BLOCK": "300ms",
    "WATTSPAN_AUTOTUNE_BLOCK_UNITS": "5",
    "WATTSPAN_AUTOTUNE_SETTLE": "100ms",
    "WATTSPAN_AUTOTUNE_SETTLE_UNITS": "1",
}
LOOP = """
import itertools
from wattspan.training import Loop

with Loop(service="trainer", max_slowdown=0.1) as loop:
    for _ in loop(itertools.count()):
        board.step()
"""
TRANSFORMERS = """
from tiny_model import tiny_gpt2, token_blocks
from transformers import Trainer, TrainingArguments
from wattspan.integrations.huggingface import WattspanCallback

class OnBoard(Trainer):
    def training_step(self, *inputs, **options):
        loss = super().training_step(*inputs, **options)
        board.step()
        return loss

OnBoard(
    model=tiny_gpt2(),
    args=TrainingArguments(
        output_dir="out", max_steps=10**6, per_device_train_batch_size=1, save_strategy="no",
        logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    ),
    train_dataset=token_blocks(1000),
    callbacks=[WattspanCallback(service="trainer", max_slowdown=0.1)],
).train()
"""
LIGHTNING = """
import lightning.pytorch as lightning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wattspan.integrations.lightning import WattspanCallback

class OnBoard(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def training_step(self, batch, number):
        board.step()
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

lightning.Trainer(
    max_epochs=-1, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[WattspanCallback(service="trainer", max_slowdown=0.1)],
).fit(OnBoard(), DataLoader(TensorDataset(torch.randn(8000, 8)), batch_size=4))
"""


@contextmanager
def job(agent: TuningAgent, program: str) -> Iterator[subprocess.Popen[bytes]]:
    """A training on the board of the agent's host, until it is killed."""
    code = (
        f"{Path(emulated_training.__file__).read_text()}\n"
        f"import sys\nsys.path.insert(0, {str(EXAMPLES / 'tuned-training')!r})\n"
        "import torch\ntorch.set_num_threads(1)\n"
        f"board = EmulatedTraining(step=0.05, noise=0.01)\n{program}"
    )
    log = agent.folder / "job.stderr"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(APPS), "-W", "ignore", "-c", code],
            cwd=agent.folder,
            env=app_environment(
                WATTSPAN_RUN_DIR=str(agent.running.run_dir),
                WATTSPAN_EMULATED_HOST=str(agent.host),
                HF_HUB_OFFLINE="1",
            ),
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        yield process
    except BaseException as error:
        error.add_note(log.read_text()[-2000:])
        raise
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(LOOP, id="loop"),
        pytest.param(TRANSFORMERS, id="transformers"),
        pytest.param(LIGHTNING, id="lightning"),
    ],
)
def test_trainer_with_one_callback_is_tuned_until_it_is_killed(
    program: str, tmp_path: Path
) -> None:
    with TuningAgent(tmp_path, config="", environ=TUNED) as agent:
        original = agent.limit
        with job(agent, program) as process:
            eventually(lambda: agent.limit < original, "a lower limit is tried", WITHIN)
            row = agent.told()
            assert row["declared"]["decision"] == "accepted"
            assert row["budget"] == 0.1
            assert row["units"] > 20
            assert process.poll() is None
            process.kill()
            eventually(lambda: agent.limit == original, "the original limit is restored")
