"""Span energy against the known truth of an emulated host: workloads, neighbours, errors."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.spans.agent import SpanAgent
from testbed.spans.collector import Collector

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin" / "python"
PROFILE = "one-socket-h100"
WANDERING = "two-socket"  # of one CPU each on a machine with two: processes change sockets often
COUNTERS = "1ms"  # update interval of the emulated CPU counters: like real ones

KINDS = ("single", "recurring", "inside", "nested", "concurrent")
LENGTHS = (0.1, 0.3, 1.0, 5.0)
LEARNED = 50  # spans of one name; the first ones of ``recurring`` are not judged
REPEATS = {"single": (30, 20, 12, 4), "recurring": (110, 90, 70, 0), "inside": (30, 20, 12, 4),
           "nested": (10, 8, 5, 2), "concurrent": (3, 2, 2, 1)}  # fmt: skip
QUICK = {"single": (12, 8, 5, 0), "recurring": (65, 60, 0, 0), "inside": (12, 8, 5, 0),
         "nested": (5, 4, 3, 0), "concurrent": (1, 1, 1, 0)}  # fmt: skip

DEVICES = ("cpu", "memory", "gpu")
SETTLING = 120.0  # seconds, at most
ATTRIBUTE = "wattspan.energy."


@dataclass(frozen=True)
class Judged:
    """One span: the agent's figure and the true one, in microjoules, for one kind of device."""

    device: str
    kind: str
    seconds: float
    exclusive: float
    true_exclusive: float
    inclusive: float
    true_inclusive: float
    uncertainty: float
    coverage: float
    outcome: str
    zeus: float | None = None  # relative error against the whole device's truth

    @property
    def error(self) -> float:
        """Of the exclusive energy, relative."""
        return (self.exclusive - self.true_exclusive) / self.true_exclusive

    @property
    def inclusive_error(self) -> float:
        return (self.inclusive - self.true_inclusive) / self.true_inclusive

    @property
    def within(self) -> bool:
        return abs(self.inclusive - self.true_inclusive) <= self.uncertainty


def measure(
    agent: SpanAgent,
    collector: Collector,
    *,
    gpu: int | None,
    repeats: Mapping[str, Sequence[int]],
    zeus: bool = False,
    seed: int = 1,
    lengths: Sequence[float] = LENGTHS,
) -> list[Judged]:
    """Run the workload, and judge its spans."""
    told: list[dict[str, Any]] = []
    for number, (kind, times) in enumerate(repeats.items()):
        told += run_workload(
            agent,
            {
                "door": str(agent.host / "engine.sock"),
                "socket": str(agent.otlp),
                "gpu": gpu,
                "zeus": zeus and kind in {"single", "inside"},
                "kinds": [kind],
                "lengths": list(lengths),
                "repeats": list(times),
                "seed": 100 * seed + number,
            },
        )
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and any(one["id"] not in collector.spans for one in told):
        time.sleep(0.2)
    lost = [one for one in told if one["id"] not in collector.spans]
    if lost:
        print(f"{len(lost)} of {len(told)} spans never came out", file=sys.stderr)
    law = _law()
    return [
        judged
        for one in after_learning(told)
        if one["id"] in collector.spans
        for judged in _judge(one, collector.spans[one["id"]], law)
    ]


def after_learning(told: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """All spans but the first ``LEARNED`` recurring ones of each length."""
    seen: Counter[float] = Counter()
    for one in told:
        if one["kind"] == "recurring":
            seen[one["seconds"]] += 1
            if seen[one["seconds"]] <= LEARNED:
                continue
        yield one


def _law() -> Callable[[float], float]:
    from wattspan.emulation.host import PROFILES

    watts = PROFILES[PROFILE].law.package_active / 1000
    return lambda cpu_ns: cpu_ns * watts / 1000  # microjoules


def _judge(
    one: Mapping[str, Any], said: Mapping[str, Any], law: Callable[[float], float]
) -> Iterator[Judged]:
    zeus = one.get("zeus", {})
    truths = {"cpu": (law(one["cpu_exclusive"]), law(one["cpu_inclusive"]))}
    if one["gpu_exclusive"] is not None:
        truths["gpu"] = (one["gpu_exclusive"], one["gpu_inclusive"])
    for device, (exclusive, inclusive) in truths.items():
        if exclusive < 1000 or f"{ATTRIBUTE}{device}.inclusive" not in said:
            if exclusive >= 1000:
                print(f"no {device} figure for a span: {dict(said)}", file=sys.stderr)
            continue  # less than a millijoule: no energy to judge
        found = zeus.get(device)
        yield Judged(
            device,
            one["kind"],
            one["seconds"],
            said[f"{ATTRIBUTE}{device}.exclusive"] * 1e6,
            exclusive,
            said[f"{ATTRIBUTE}{device}.inclusive"] * 1e6,
            inclusive,
            said[f"{ATTRIBUTE}{device}.uncertainty"] * 1e6,
            said[f"{ATTRIBUTE}coverage"],
            said[f"{ATTRIBUTE}outcome"],
            None if found is None else found / zeus[f"{device}_true"] - 1,
        )


def run_workload(agent: SpanAgent, plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One process of the workload from start to end; its reported spans."""
    script = ROOT / "testbed" / "spans" / "workload.py"
    command: list[str] = [sys.executable, str(script)]
    environ = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if plan["zeus"]:
            from testbed.nvml_library import build, environment

            # Zeus has /sys hard-coded: the emulated tree is mounted there, in a mount namespace.
            mount = 'mount --make-rprivate / && mount --bind "$1" /sys && shift && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", mount, "sh", str(agent.host / "sys"),
                       str(CLIENTS), str(script)]  # fmt: skip
            environ |= environment(build(Path(folder)), agent.host / "gpus")
            environ["PYTHONWARNINGS"] = "ignore"
        run = subprocess.run(
            command,
            input=json.dumps(dict(plan)) + "\n",
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env=environ,
        )
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


@contextmanager
def neighbour(agent: SpanAgent, gpu: int | None) -> Iterator[None]:
    """A neighbour on the machine: a third of a CPU, and a quarter of a GPU all the time."""
    process = subprocess.Popen(
        [sys.executable, "-m", "wattspan.emulation.jobs", '{"name": "neighbour", "duty": 0.3}'],
        stdin=subprocess.PIPE,
    )
    guest = None
    if gpu is not None:
        code = (
            "import sys; from wattspan.emulation.control import EmulatedGpu\n"
            f"with EmulatedGpu({gpu}, kernel='train') as g, g.busy(0.25): sys.stdin.read()"
        )
        guest = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            env={**os.environ, "WATTSPAN_EMULATED_HOST": str(agent.host)},
        )
    try:
        yield
    finally:
        for one in (process, guest):
            if one is not None:
                one.stdin.close()
                one.wait()


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that ``part`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * part) - 1)]


@contextmanager
def judged_host(profile: str) -> Iterator[tuple[SpanAgent, Collector]]:
    """An agent that knows the host's idle power, and the collector of its spans."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Collector() as collector,
        SpanAgent(
            Path(folder),
            profile=profile,
            emulation__counters=COUNTERS,
            spans__forward=collector.url,
        ) as agent,
    ):
        settle(agent, collector)
        yield agent, collector
        print(agent.said(), file=sys.stderr)


def settle(agent: SpanAgent, collector: Collector) -> None:
    """Rest and work in turns until idle power is known; on a busy machine it may never be."""
    deadline = time.monotonic() + SETTLING
    while True:
        time.sleep(8)
        measure(agent, collector, gpu=None, repeats={"inside": (0, 0, 2, 1)}, seed=9)
        idle = {kind: agent.samples("wattspan_idle_power_watts", hw_type=kind) for kind in DEVICES}
        domains = {kind: agent.samples("hw_energy_joules_total", hw_type=kind) for kind in DEVICES}
        if all(len(idle[kind]) == len(domains[kind]) for kind in DEVICES):
            break
        if time.monotonic() > deadline:
            print("the machine is too busy: idle power is not known", file=sys.stderr)
            break
    print(f"idle power learned, in watts: {idle}", file=sys.stderr)
