"""Pipelines of two real processes, each on an emulated board whose clock the tuner sets."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from testbed.etcd import EtcdCluster
from testbed.program import wattspan
from testbed.tuned_stack import Tuned, TunedHost, stack_config

pytestmark = [pytest.mark.exhaustive, pytest.mark.long]

JOB = "gpt/iteration"
PROFILE, FOUR_GPUS = "two-socket-h100", "four-h100"
TOP = 1980  # MHz
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
REPLICATED = CONFIG.replace(
    'instruction = "instruction"', 'instruction = "instruction", replica = "dp"'
)
STAGED = CONFIG + "hosts = 2\n"
FLEET = """\
[fleet]
endpoints = {urls}
name = "{name}"
contact = "6s"
fallback = "4s"
"""
STRAGGLE = "straggle"
"""A file in the directory of the host: while it exists, the second pipeline is slower."""

RANKS = """
import multiprocessing, os, sys, time
from pathlib import Path

STAGES = (0.05, 0.025)  # seconds of a forward at the highest clock
MICROBATCHES = 3
REPLICAS = 1
SPREAD = False  # the ranks of a pipeline are on several hosts

def rank(replica, device, number, link, together, host, endpoint):
    import pynvml
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from wattspan.emulation.control import EmulatedGpu
    from wattspan.emulation.nvml import EmulatedNvml
    from wattspan.tuning.pipeline.dag import InstructionKind
    from wattspan.tuning.pipeline.dag import PipelineSchedule, scheduled

    resource = Resource({"service.name": "gpt", "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=300))
    tracer = provider.get_tracer("rank")
    nvml = EmulatedNvml(Path(host) / "gpus")
    nvml.nvmlInit()
    sm = pynvml.NVML_CLOCK_SM
    handle = nvml.nvmlDeviceGetHandleByIndex(device)
    highest = nvml.nvmlDeviceGetMaxClockInfo(handle, sm)
    board = EmulatedGpu(device, kernel="train", host=Path(host))
    order = scheduled(PipelineSchedule.ONE_F_ONE_B, 2, MICROBATCHES).orders[number]
    while True:
        longer = 1.4 if replica and (Path(host) / "straggle").exists() else 1.0
        with tracer.start_as_current_span("iteration"):
            for one in order:
                forward = one.kind is InstructionKind.FORWARD
                if forward == (number == 1):
                    link.recv()
                attributes = {"stage": one.stage, "microbatch": one.microbatch,
                              "instruction": one.kind.value, "dp": replica}
                with tracer.start_as_current_span("pass", attributes=attributes), board.busy(1.0):
                    clock = nvml.nvmlDeviceGetClockInfo(handle, sm)
                    seconds = longer * STAGES[number] * (1 if forward else 2)
                    time.sleep(seconds * highest / clock)
                if forward == (number == 0):
                    link.send(0)
            together.wait()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    together = context.Barrier(2 * REPLICAS)
    hosts = list(zip(sys.argv[1::2], sys.argv[2::2]))
    ranks = [
        context.Process(target=rank, daemon=True, args=(
            one, 0 if SPREAD else 2 * (one // len(hosts)) + number, number, end, together,
            *hosts[number if SPREAD else one % len(hosts)],
        ))
        for one in range(REPLICAS)
        for number, end in enumerate(context.Pipe())
    ]
    for one in ranks:
        one.start()
    print("ready", flush=True)
    sys.stdin.read()
    for one in ranks:
        one.kill()
"""


@contextmanager
def training(
    agent: Tuned, *others: Tuned, replicas: int = 1, spread: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A training whose pipelines, or stages if ``spread``, are on these agents' hosts in turn."""
    program = RANKS.replace("REPLICAS = 1", f"REPLICAS = {replicas}")
    process = agent.begin(program.replace("SPREAD = False", f"SPREAD = {spread}"), *others)
    try:
        yield process
    finally:
        process.communicate()


def test_rank_with_slack_gets_a_lower_clock_until_the_training_ends(tmp_path: Path) -> None:
    # With a larger budget, the best clocks of both stages are nearly equal, and noise decides.
    config = CONFIG.replace("slowdown = 0.2", "slowdown = 0.05")
    with (
        TunedHost(trains=False, profile=PROFILE) as host,
        Tuned(host, tmp_path, config=config, job=JOB, profile=PROFILE) as agent,
    ):
        with training(agent):
            agent.until(lambda: agent.reason() == "screening", "the profile is measured", 120)
            # The second stage takes half as long. A first plan may be of a noisy profile.
            plan = agent.until(lambda: _plan(agent), "the second rank has a lower clock", 300)
            assert agent.told()["slowdown"] <= 0.05
            assert (plan["shown"]["ranks"], plan["shown"]["stages"]) == (2.0, 2.0)
            assert agent.journal()
        agent.until(lambda: not agent.journal(), "the end of the training restores the clocks")
        agent.until(lambda: agent.reason() == "ended", "the end is reported")


def test_faster_pipeline_follows_a_straggler_until_it_recovers(tmp_path: Path) -> None:
    with (
        TunedHost(trains=False, profile=FOUR_GPUS) as host,
        Tuned(host, tmp_path, config=REPLICATED, job=JOB, profile=FOUR_GPUS) as agent,
    ):
        straggle = Path(host.emulated.directory) / STRAGGLE
        with training(agent, replicas=2):
            agent.until(lambda: _planned(agent, "0"), "the first pipeline has a plan", 300)
            assert {one["name"] for one in agent.told()["pipelines"]} == {"0", "1"}
            straggle.touch()
            found = agent.until(lambda: _follower(agent), "the first pipeline follows", 300)
            assert found["straggler_time_seconds"] > found["original_time_seconds"]
            explained(agent, "Pipeline 0, straggler")
            assert agent.told()["slowdown"] <= 0.2
            straggle.unlink()
            agent.until(lambda: not _follower(agent), "the straggler has recovered", 60)
        agent.until(lambda: not agent.journal(), "the end of the training restores the clocks")


@contextmanager
def fleet(
    folder: Path, config: str, floor: float = 0.5
) -> Iterator[tuple[EtcdCluster, Tuned, Tuned]]:
    """Two hosts with this configuration in a fleet."""
    with ExitStack() as stack:
        etcd = stack.enter_context(EtcdCluster(folder))
        agents = []
        for name in ("host-1", "host-2"):
            own = folder / name
            own.mkdir()
            host = stack.enter_context(TunedHost(trains=False, profile=PROFILE))
            member = config + FLEET.format(urls=json.dumps(etcd.urls), name=name)
            tuned = Tuned(host, own, config=member, job=JOB, profile=PROFILE, floor=floor)
            agents.append(stack.enter_context(tuned))
        yield etcd, agents[0], agents[1]


@pytest.mark.needs_etcd
def test_stages_on_two_hosts_get_the_clocks_of_one_plan(tmp_path: Path) -> None:
    """One host plans for both; without etcd the original clocks return on both."""
    with (
        fleet(tmp_path, STAGED, 0.8) as (etcd, agent, other),
        training(agent, other, spread=True),
    ):
        both = {"host-1": agent, "host-2": other}
        name = agent.until(lambda: _planner(both), "a host plans for both", 600)
        planner = both.pop(name)
        (follower,) = both.values()
        ranks = _pipeline(planner, "")["ranks"]
        assert len(ranks) == 2
        assert ranks[1]["device"].startswith(f"{next(iter(both))}/gpu:")
        follower.until(
            lambda: _sentence(follower).startswith(f"{name} plans: The ranks have"),
            "the other host uses the plan",
        )
        # The second stage takes half as long: its GPU has a lower clock.
        other.until(other.journal, "the clock of the second stage is lower", 60)
        assert planner.told()["slowdown"] <= 0.2
        explained(follower, f"Host {name} (record of", "It plans the clocks of this pipeline.")
        etcd.kill(0)
        for one in (agent, other):
            one.until(lambda: "out of contact" in _sentence(one), "the loss", 60)  # noqa: B023
            one.until(lambda: not one.journal(), "the clocks return")  # noqa: B023


@pytest.mark.needs_etcd
def test_pipeline_follows_a_straggler_of_another_host_while_it_has_contact(tmp_path: Path) -> None:
    """Both hosts explore one after the other; without etcd the original clocks return."""
    with fleet(tmp_path, REPLICATED) as (etcd, agent, other):
        straggle = Path(other.host.emulated.directory) / STRAGGLE
        with training(agent, other, replicas=2):
            for one, name in ((agent, "0"), (other, "1")):
                one.until(lambda: _planned(one, name), "the pipeline has a plan", 400)  # noqa: B023
            agent.until(lambda: _partners(agent) == {"host-2": True}, "the other host is known")
            straggle.touch()
            found = agent.until(lambda: _follower(agent), "the first host follows", 300)
            assert found["sentence"].startswith("Pipeline 1 of host-2 takes")
            explained(
                agent,
                "Pipeline 1 of host-2 takes",
                "pipeline 1 is the straggler): Its pipeline 1 takes",
            )
            told = agent.until(agent.told, "the agent answers")
            assert told["slowdown"] <= 0.2
            etcd.kill(0)
            agent.until(lambda: not _follower(agent), "the record has expired", 60)
            agent.until(lambda: "" in _partners(agent), "the lost contact is explained", 60)
            told = agent.until(agent.told, "the agent answers")
            assert told["state"] != "declined"


def _planner(agents: dict[str, Tuned]) -> str:
    """The name of the host whose plan for both ranks is in force; "" for none."""
    for name, one in agents.items():
        ranks = _pipeline(one, "").get("ranks", ())
        if ranks and all(rank["planned"] == rank["clock"] for rank in ranks):
            return name
    return ""


def _sentence(agent: Tuned) -> str:
    sentence: str = agent.told().get("decision", {}).get("sentence", "")
    return sentence


def explained(agent: Tuned, *words: str) -> None:
    """Wait for `wattspan tune explain` to print these: a late or noisy iteration ends a state."""

    def printed() -> bool:
        text = wattspan("tune", "explain", "--config", str(agent.config)).stdout
        return all(one in text for one in words)

    agent.until(printed, f"{words} are explained", 300)


def _partners(agent: Tuned) -> dict[str, bool]:
    """The other hosts of the job, and whether their records are used."""
    return {one["host"]: one["used"] for one in agent.told().get("partners", ())}


def _pipeline(agent: Tuned, name: str) -> dict[str, Any]:
    found = (one for one in agent.told().get("pipelines", ()) if one["name"] == name)
    return next(found, {})


def _planned(agent: Tuned, name: str) -> bool:
    return any(one["planned"] is not None for one in _pipeline(agent, name).get("ranks", ()))


def _follower(agent: Tuned) -> dict[str, Any] | None:
    """The first pipeline while its clocks are those for the second one."""
    found = _pipeline(agent, "0")
    lowered = any((one["clock"] or TOP) < TOP for one in found.get("ranks", ()))
    return found if found.get("reason") == "straggler" and lowered else None


def _plan(agent: Tuned) -> dict[str, dict[str, float]] | None:
    decision = agent.told().get("decision", {})
    if decision.get("reason") not in ("certifying", "certified"):
        return None
    caps = {device[-1]: clock for device, clock in decision["caps"].items()}
    return decision if caps.get("1", TOP) < caps.get("0", TOP) else None
