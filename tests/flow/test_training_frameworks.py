"""Real trainers on the CPU: transformers, TRL, Lightning and a plain loop, as in ``examples/``."""

from __future__ import annotations

import itertools
import math
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from testbed.apps import EXAMPLES, app_environment
from testbed.receiving import receiving
from testbed.requirements import APPS, ROOT

from wattspan.ingest.export_request import WorkAttribute
from wattspan.spans.values import Span
from wattspan.training.session import WORK_ATTRIBUTE

pytestmark = [pytest.mark.exhaustive, pytest.mark.needs_apps, pytest.mark.needs_training]


class Report(NamedTuple):
    """The spans that a training script has sent, and its output."""

    spans: list[Span]
    services: set[str]
    output: str
    errors: str

    def named(self, name: str) -> list[Span]:
        return sorted((s for s in self.spans if s.name == name), key=lambda span: span.start)

    @property
    def work(self) -> list[float | None]:
        return [span.work for span in self.named("train_step")]


def run(run_dir: Path, *command: str) -> Report:
    """Run a Python program of the applications' environment to its end."""
    with receiving(run_dir, work=lambda: [WorkAttribute(WORK_ATTRIBUTE)]) as agent:
        finished = subprocess.run(
            [str(APPS), *command],
            cwd=run_dir,
            env=app_environment(
                WATTSPAN_RUN_DIR=str(run_dir), HF_HUB_OFFLINE="1", PYTHONWARNINGS="ignore"
            ),
            check=False,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert finished.returncode == 0, finished.stderr
        parts = [part for delivery in agent.sink.deliveries for part in delivery.parts]
    spans = [span for part in parts for span in part.spans]
    services = {part.claim.service for part in parts}
    return Report(spans, services, finished.stdout, finished.stderr)


def train(run_dir: Path, script: str, *options: str) -> Report:
    """Run a training script of the examples."""
    return run(run_dir, str(EXAMPLES / "tuned-training" / script), *options)


def assert_units_are_disjoint(report: Report) -> None:
    """Units do not overlap, and each lies in one epoch."""
    units, epochs = report.named("train_step"), report.named("epoch")
    for before, after in itertools.pairwise(units):
        assert before.end <= after.start
    for unit in units:
        (epoch,) = [each for each in epochs if each.id == unit.parent]
        assert epoch.start <= unit.start <= unit.end <= epoch.end


def test_transformers_trainer_reports_every_optimizer_step(tmp_path: Path) -> None:
    report = train(
        tmp_path, "train_with_transformers.py", "--steps", "50", "--accumulate", "2",
        "--evaluate-every", "15",
    )  # fmt: skip
    assert "50 steps, 12800 tokens" in report.output
    assert report.work == [256] * 50  # 2 batches of 4 blocks of 32 tokens
    assert len(report.named("epoch")) == 2  # 25 steps each
    assert report.named("train_step_part") == []
    assert report.services == {"train_with_transformers"}
    assert_units_are_disjoint(report)


TRACED_TRAINER = """
import contextlib, sys, tempfile
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from tiny_model import tiny_gpt2, token_blocks
from transformers import Trainer, TrainerCallback, TrainingArguments
from wattspan.integrations.huggingface import WattspanCallback
from wattspan.training.spans import AgentSpanExporter, otlp_encoder

provider = TracerProvider(resource=Resource.create({"service.name": "application"}))
provider.add_span_processor(BatchSpanProcessor(AgentSpanExporter(otlp_encoder())))
trace.set_tracer_provider(provider)
tracer = trace.get_tracer("application")

class Traced(Trainer):
    def evaluation_loop(self, *args, **options):
        with tracer.start_as_current_span("evaluation"):
            return super().evaluation_loop(*args, **options)

    def _save_checkpoint(self, *args, **options):
        with tracer.start_as_current_span("checkpoint"):
            return super()._save_checkpoint(*args, **options)

class Requests(TrainerCallback):  # an evaluation that the callbacks before it do not foresee
    def on_step_end(self, args, state, control, **_):
        control.should_evaluate = state.global_step % 4 == 0
        return control

def train(folder, steps, *callbacks, checkpoint=None):
    Traced(
        model=tiny_gpt2(),
        args=TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, save_steps=6, report_to=[], use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=token_blocks(80),
        eval_dataset=token_blocks(8),
        callbacks=[*callbacks],
    ).train(resume_from_checkpoint=checkpoint)

callback = WattspanCallback()
with tempfile.TemporaryDirectory() as folder:
    train(folder, 14, callback, Requests())
    resumed = WattspanCallback()
    train(folder, 20, resumed, resumed, WattspanCallback(), Requests(),
          checkpoint=str(Path(folder, "checkpoint-12")))
"""


def test_evaluation_checkpoint_and_resumption_of_a_real_trainer(tmp_path: Path) -> None:
    report = run(tmp_path, "-c", TRACED_TRAINER, str(EXAMPLES / "tuned-training"))
    assert report.services == {"application"}  # its provider is used
    assert report.errors.count("attached twice") == 2
    units = report.named("train_step")
    assert len(units) == 14 + 8  # 20 steps less the 12 of the checkpoint
    assert report.named("train_step_part") == []
    assert report.work == [8] * 22  # samples: the trainer counts no tokens here
    assert_units_are_disjoint(report)
    assert len(report.named("evaluation")) == 3 + 2
    assert len(report.named("checkpoint")) >= 4
    for other in report.named("evaluation") + report.named("checkpoint"):
        assert all(unit.end <= other.start or other.end <= unit.start for unit in units)


def test_sft_trainer_reports_every_optimizer_step(tmp_path: Path) -> None:
    report = train(tmp_path, "train_with_trl.py", "--epochs", "2")
    assert "20 steps, " in report.output
    tokens = int(report.output.split("20 steps, ")[1].split()[0])
    assert len(report.work) == 20
    assert sum(amount or math.nan for amount in report.work) == tokens
    assert len(set(report.work)) > 1  # texts differ in length
    assert (len(report.named("epoch")), report.named("train_step_part")) == (2, [])
    assert_units_are_disjoint(report)


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_reports_every_optimizer_step(package: str, tmp_path: Path) -> None:
    report = train(tmp_path, "train_with_lightning.py", "--epochs", "3", "--package", package)
    assert "9 steps, 3 epochs" in report.output
    # 10 batches of 16 samples, 4 a step; a validation after the fifth interrupts the second step.
    assert report.work == [64, 48, 32] * 3
    assert len(report.named("train_step_part")) == 3
    assert len(report.named("epoch")) == 3
    assert_units_are_disjoint(report)


RESUMED_LIGHTNING = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning.pytorch as lightning
import torch
from testbed.training_spans import RecordedTraining
from torch.utils.data import DataLoader, TensorDataset
from wattspan.integrations.lightning import WattspanCallback

class Line(lightning.LightningModule):
    fails_at = None

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, number):
        if self.global_step == self.fails_at:
            raise ArithmeticError
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(epochs, fails_at=None, checkpoint=None):
    training, model = RecordedTraining(), Line()
    model.fails_at = fails_at
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
        callbacks=[WattspanCallback(**training.options), WattspanCallback(**training.options)],
    )
    data = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=8)
    try:
        trainer.fit(model, data, ckpt_path=checkpoint)
    except ArithmeticError:
        print("failed", end=" ")
    print(training.steps, training.parts, training.epochs, training.answer.withdrawals)
    return trainer

fit(2).save_checkpoint("line.ckpt")
fit(3, checkpoint="line.ckpt")
fit(3, fails_at=7)
"""


def test_resumed_and_failed_lightning(tmp_path: Path) -> None:
    report = run(tmp_path, "-c", RESUMED_LIGHTNING, str(ROOT))
    assert report.output.splitlines()[-3:] == [
        "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10] 0 [1, 2] 1",
        "[11, 12, 13, 14, 15] 0 [3] 1",
        "failed [1, 2, 3, 4, 5, 6, 7] 1 [1, 2] 1",
    ]


def test_loop_reports_every_optimizer_step(tmp_path: Path) -> None:
    report = train(tmp_path, "train_with_a_loop.py", "--epochs", "3")
    assert report.work == [16] * 30
    assert (len(report.named("epoch")), report.named("train_step_part")) == (3, [])
    assert_units_are_disjoint(report)


def test_ranks_report_their_own_units_and_the_first_declares(tmp_path: Path) -> None:
    report = run(
        tmp_path,
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        str(EXAMPLES / "tuned-training" / "train_with_transformers.py"),
        *("--steps", "10", "--evaluate-every", "4"),
    )
    units = report.named("train_step")
    assert len(units) == 2 * 10
    assert len({unit.id for unit in units}) == 20  # although both ranks have the same seed
    assert report.errors.count("The training is not tuned") == 1
    for rank in {unit.parent for unit in units}:  # the epoch of a rank
        own = [unit for unit in units if unit.parent == rank]
        assert all(before.end <= after.start for before, after in itertools.pairwise(own))


def test_zeus_optimizer_of_a_real_trainer_reports_its_steps(tmp_path: Path) -> None:
    code = """
import sys, tempfile
from types import SimpleNamespace
sys.path.insert(0, sys.argv[1])
from tiny_model import tiny_gpt2, token_blocks
from transformers import Trainer, TrainingArguments
from wattspan.compat.zeus.optimizer import HFGlobalPowerLimitOptimizer, MaxSlowdownConstraint

monitor = SimpleNamespace(gpu_indices=[0])  # a machine of this test has no GPU
with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=tiny_gpt2(),
        args=TrainingArguments(
            output_dir=folder, max_steps=7, per_device_train_batch_size=4, report_to=[],
            use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=token_blocks(40),
        callbacks=[HFGlobalPowerLimitOptimizer(monitor, MaxSlowdownConstraint(1.1))],
    ).train()
"""
    report = run(tmp_path, "-c", code, str(EXAMPLES / "tuned-training"))
    assert report.work == [4] * 7
    assert_units_are_disjoint(report)


@pytest.mark.parametrize(
    ("package", "base"),
    [
        ("huggingface", "transformers.TrainerCallback"),
        ("lightning", "lightning.pytorch.Callback"),
    ],
)
def test_callback_has_the_base_of_its_framework(package: str, base: str, tmp_path: Path) -> None:
    code = f"""
import pickle, {base.rpartition(".")[0]}
from wattspan.integrations.{package} import WattspanCallback
callback = pickle.loads(pickle.dumps(WattspanCallback(max_slowdown=0.1)))
print(isinstance(callback, {base}))
"""
    assert run(tmp_path, "-c", code).output.strip() == "True"
