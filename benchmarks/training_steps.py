"""CPU cost of a training step to the training script, by loop and by callback.

The hooks run in the order of the frameworks, without a model, in a process of their own for each
subject; an agent on an emulated host receives the spans. The hooks run on the training thread,
back to back, after computation that leaves most of the caches alone, and after computation that
evicts them. Another thread encodes and sends the spans. Each step is followed by one span of the
SDK with three attributes and an empty processor, in the same process and under the same conditions;
the ratio of the two does not depend on the load of the machine.

    .venv/bin/python -m benchmarks.training_steps
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from testbed.machine import describe
from testbed.spans.agent import SpanAgent

from wattspan.compat.zeus.optimizer import GlobalPowerLimitOptimizer
from wattspan.integrations.huggingface import TrainerHooks
from wattspan.integrations.lightning import LightningHooks
from wattspan.training import Loop

GOAL = 0.2  # milliseconds a step
STEP = 2_000_000  # nanoseconds of computation between the hooks

Steps = Iterator[Callable[[], object]]


def loop() -> Steps:
    with Loop(service="benchmark") as reported:
        batches = reported(SimpleNamespace(shape=(8, 3)) for _ in iter(int, 1))
        while True:
            yield partial(next, batches)


def huggingface() -> Steps:
    hooks = TrainerHooks(service="benchmark")
    args = SimpleNamespace(train_batch_size=8)
    state = SimpleNamespace(
        global_step=0, epoch=0.0, is_local_process_zero=True, num_input_tokens_seen=0,
        train_batch_size=8,
    )  # fmt: skip
    control = SimpleNamespace(
        should_evaluate=False, should_save=False, should_epoch_stop=False,
        should_training_stop=False,
    )  # fmt: skip

    def step() -> None:
        hooks.on_step_begin(args, state, control)
        hooks.on_substep_end(args, state, control)
        state.global_step += 1
        hooks.on_step_end(args, state, control)

    hooks.on_train_begin(args, state, control)
    hooks.on_epoch_begin(args, state, control)
    while True:
        yield step


def lightning() -> Steps:
    hooks = LightningHooks(service="benchmark")
    trainer = SimpleNamespace(callbacks=[hooks], global_step=0, current_epoch=0, local_rank=0)
    batch = [SimpleNamespace(shape=(8, 3)), SimpleNamespace(shape=(8,))]

    def step() -> None:
        hooks.on_train_batch_start(trainer, None, batch, trainer.global_step)
        trainer.global_step += 1
        hooks.on_train_batch_end(trainer, None, None, batch, trainer.global_step)

    hooks.on_train_start(trainer, None)
    hooks.on_train_epoch_start(trainer, None)
    while True:
        yield step


def zeus() -> Steps:
    monitor: Any = SimpleNamespace(gpu_indices=[0])
    optimizer = GlobalPowerLimitOptimizer(monitor)

    def step() -> None:
        optimizer.on_step_begin()
        optimizer.on_step_end()

    optimizer.on_epoch_begin()
    while True:
        yield step


def sdk() -> Steps:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SpanProcessor())
    tracer = provider.get_tracer("benchmark")

    def step() -> None:
        span = tracer.start_span("train_step")
        span.set_attributes({"step": 1, "work": 8, "unit": "samples"})
        span.end()

    while True:
        yield step


SUBJECTS: dict[str, tuple[str, Callable[[], Steps], bool]] = {
    "loop": ("`wattspan.training.Loop`", loop, True),
    "alone": ("`wattspan.training.Loop`, no agent", loop, False),
    "huggingface": ("Hugging Face callback", huggingface, True),
    "lightning": ("Lightning callback", lightning, True),
    "zeus": ("`GlobalPowerLimitOptimizer`", zeus, True),
}


def measure(subject: str, steps: int) -> list[float]:
    """CPU milliseconds a step, by computation the medians of the hooks and of a bare span.

    The last one is the mean of the other threads.
    """
    hooks, bare = SUBJECTS[subject][1](), sdk()
    figures = []
    process, thread = time.process_time_ns(), time.thread_time_ns()
    for compute in (_nothing, _spin, _evict):
        spent: dict[Steps, list[int]] = {hooks: [], bare: []}
        for _ in range(steps):
            for steps_of, found in spent.items():
                step = next(steps_of)
                compute()
                at = time.thread_time_ns()
                step()
                found.append(time.thread_time_ns() - at)
        figures += [statistics.median(found) / 1e6 for found in spent.values()]
    others = time.process_time_ns() - process - (time.thread_time_ns() - thread)
    return [*figures, others / (3 * steps) / 1e6]


def _nothing() -> None:
    """The next step begins at once."""


def _spin() -> None:
    until = time.thread_time_ns() + STEP
    while time.thread_time_ns() < until:
        pass


def _evict() -> None:
    until = time.thread_time_ns() + STEP
    numbers = list(range(20_000))
    while time.thread_time_ns() < until:
        numbers.sort(key=lambda number: -number)
        numbers.sort()


@contextmanager
def run_directory(with_agent: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        if not with_agent:
            yield Path(folder)
            return
        with SpanAgent(Path(folder)) as agent:
            yield agent.run_dir


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--subject", choices=SUBJECTS, help="measure this one in this process")
    chosen = options.parse_args()
    if chosen.subject:
        print(*measure(chosen.subject, chosen.steps))
        return
    print(describe())
    print(
        f"\nCPU milliseconds a step, medians of {chosen.steps} steps "
        f"(goal: {GOAL} ms in the hooks)\n"
    )
    print("| reported by | back to back | caches evicted | relative to a bare span | sending |")
    print("|---|---|---|---|---|")
    for subject, (title, _, with_agent) in SUBJECTS.items():
        with run_directory(with_agent) as run_dir:
            output = subprocess.run(
                [
                    *(sys.executable, "-m", "benchmarks.training_steps"),
                    *("--subject", subject, "--steps", str(chosen.steps)),
                ],
                env=os.environ | {"WATTSPAN_RUN_DIR": str(run_dir)},
                check=True,
                stdout=subprocess.PIPE,
                text=True,
            ).stdout
        at_once, _, _, _, evicted, bare, sending = map(float, output.split())
        print(
            f"| {title} | {at_once:.3f} | {evicted:.3f} | {evicted / bare:.2f} | {sending:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
