"""Two real processes on one emulated board, both of which send their steps, tuned by one search."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.tuned_stack import Tuned, TunedHost, stack_config

from wattspan.sdk.client import request_json

LEADER, OTHER = "second/train_step", "first/train_step"
CONFIG = stack_config(
    """\
confidence = 0.9
block_units = 5
settle = "100ms"
settle_units = 1
dwell = "1s"
[[autotune.job]]
service = "first"
span = "train_step"
kind = "steps"
max_slowdown = 0.3
[[autotune.job]]
service = "second"
span = "train_step"
kind = "steps"
max_slowdown = 0.2
""",
    http="127.0.0.1:0",
)
PROCESS = """
import os, sys, time
from pathlib import Path
import pynvml
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from wattspan.emulation.control import EmulatedGpu
from wattspan.emulation.nvml import EmulatedNvml

SERVICE, STEP = {service!r}, {step}
resource = Resource({{"service.name": SERVICE, "process.pid": os.getpid()}})
provider = TracerProvider(resource=resource)
if SERVICE:
    exporter = OTLPSpanExporter(sys.argv[2])
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
tracer = provider.get_tracer("training")
nvml = EmulatedNvml(Path(sys.argv[1]) / "gpus")
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByIndex(0)
highest = nvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
board = EmulatedGpu(0, kernel="train", host=Path(sys.argv[1]))
print("ready", flush=True)
while True:
    with tracer.start_as_current_span("train_step"), board.busy(1.0):
        left = STEP
        while left > 0:  # the board may be slowed within a step
            clock = nvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
            time.sleep(0.01)
            left -= 0.01 * clock / highest
"""


@contextmanager
def process(agent: Tuned, service: str = "", step: float = 0.06) -> Iterator[None]:
    """A process on the board; without a ``service`` it sends nothing."""
    running: subprocess.Popen[str] = agent.begin(PROCESS.format(service=service, step=step))
    try:
        yield
    finally:
        running.kill()
        running.communicate()


@contextmanager
def shared_board(folder: Path) -> Iterator[Tuned]:
    with (
        TunedHost(trains=False) as host,
        Tuned(host, folder, config=CONFIG, job=LEADER) as agent,
        process(agent, "first"),
        process(agent, "second", 0.09),
    ):
        yield agent


def row(agent: Tuned, job: str) -> dict[str, Any]:
    jobs = request_json("/v1/tuning", {}, directories=(str(agent.host.sockets),))["jobs"]
    return next((one for one in jobs if one["job"] == job), {})


def reason(agent: Tuned, job: str) -> str:
    return str(row(agent, job).get("decision", {}).get("reason", ""))


@pytest.mark.exhaustive
def test_shared_board_is_tuned_until_a_process_without_a_signal_uses_it(tmp_path: Path) -> None:
    with shared_board(tmp_path) as agent:
        agent.until(agent.host.capped, "a cap is in force", 120)
        agent.until(
            lambda: "which shares its devices" in row(agent, OTHER)["decision"]["sentence"],
            "the other tenant is tuned with the leader",
        )
        assert row(agent, OTHER)["decision"]["caps"] == {}
        with process(agent):
            agent.until(lambda: reason(agent, LEADER) == "shared", "the third process is noticed")
            agent.until(lambda: reason(agent, OTHER) == "shared", "for both tenants")
            agent.until(agent.host.restored, "the original is restored")
        agent.until(agent.host.capped, "a cap is in force again", 120)
