"""A pipeline of two real processes, each on an emulated board whose clock the tuner sets."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.tuned_stack import Tuned, TunedHost, stack_config

pytestmark = [pytest.mark.exhaustive, pytest.mark.long]

JOB = "gpt/iteration"
PROFILE = "two-socket-h100"
CONFIG = stack_config(
    """\
max_slowdown = 0.2
dwell = "3s"
[[autotune.job]]
service = "gpt"
span = "iteration"
pipeline = {{stage = "stage", microbatch = "microbatch", instruction = "instruction"}}
""",
    http="127.0.0.1:0",
).replace('["gpu_power"]', '["gpu_clock"]')
RANKS = """
import multiprocessing, os, sys, time
from pathlib import Path

STAGES = (0.05, 0.025)  # seconds of a forward at the highest clock
MICROBATCHES = 3

def rank(number, link, host, endpoint):
    import pynvml
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from wattspan.emulation.control import EmulatedGpu
    from wattspan.emulation.nvml import EmulatedNvml
    from wattspan.tuning.pipeline.dag import InstructionKind
    from wattspan.tuning.pipeline.schedules import PipelineSchedule, scheduled

    resource = Resource({"service.name": "gpt", "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=300))
    tracer = provider.get_tracer("rank")
    nvml = EmulatedNvml(Path(host) / "gpus")
    nvml.nvmlInit()
    sm = pynvml.NVML_CLOCK_SM
    handle = nvml.nvmlDeviceGetHandleByIndex(number)
    highest = nvml.nvmlDeviceGetMaxClockInfo(handle, sm)
    board = EmulatedGpu(number, kernel="train", host=Path(host))
    order = scheduled(PipelineSchedule.ONE_F_ONE_B, 2, MICROBATCHES).orders[number]
    while True:
        with tracer.start_as_current_span("iteration"):
            for one in order:
                forward = one.kind is InstructionKind.FORWARD
                if forward == (number == 1):
                    link.recv()
                attributes = {"stage": one.stage, "microbatch": one.microbatch,
                              "instruction": one.kind.value}
                with tracer.start_as_current_span("pass", attributes=attributes), board.busy(1.0):
                    clock = nvml.nvmlDeviceGetClockInfo(handle, sm)
                    seconds = STAGES[number] * (1 if forward else 2)
                    time.sleep(seconds * highest / clock)
                if forward == (number == 0):
                    link.send(0)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ends = context.Pipe()
    ranks = [
        context.Process(target=rank, args=(number, end, *sys.argv[1:]), daemon=True)
        for number, end in enumerate(ends)
    ]
    for one in ranks:
        one.start()
    print("ready", flush=True)
    sys.stdin.read()
    for one in ranks:
        one.kill()
"""


@contextmanager
def training(agent: Tuned) -> Iterator[subprocess.Popen[str]]:
    process = agent.begin(RANKS)
    try:
        yield process
    finally:
        process.communicate()


def test_rank_with_slack_gets_a_lower_clock_until_the_training_ends(tmp_path: Path) -> None:
    with (
        TunedHost(trains=False, profile=PROFILE) as host,
        Tuned(host, tmp_path, config=CONFIG, job=JOB, profile=PROFILE) as agent,
    ):
        with training(agent):
            agent.until(lambda: agent.reason() == "screening", "the profile is measured", 120)
            plan = agent.until(lambda: _plan(agent), "a plan is compared with the original", 300)
            assert agent.told()["slowdown"] <= 0.2
            assert (plan["shown"]["ranks"], plan["shown"]["stages"]) == (2.0, 2.0)
            slower = min(plan["caps"], key=lambda device: plan["caps"][device])
            assert slower.endswith("1")  # the second stage takes half as long
            assert agent.journal()
        agent.until(lambda: not agent.journal(), "the end of the training restores the clocks")
        agent.until(lambda: agent.reason() == "ended", "the end is reported")


def _plan(agent: Tuned) -> dict[str, dict[str, float]] | None:
    decision = agent.told().get("decision", {})
    planned = decision.get("reason") in ("certifying", "certified")
    return decision if planned and decision.get("caps") else None
