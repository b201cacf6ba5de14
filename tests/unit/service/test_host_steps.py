"""The steps of engines' processes beyond their GPUs: CPUs, memory, and shares of idle energy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattspan.inference.host_energy import HostCounter
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PayerInfo,
    Principal,
    Provenance,
    Share,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.service.host_steps import HostStepReader
from wattspan.service.inference_joiner import InferenceJoiner
from wattspan.sharing.pools import PoolName
from wattspan.spans.values import InferenceDetails, Span, SpanColumns, TokenRole

S = SECOND
CPU, DRAM, GPU = (
    Domain(name, kind, name, "fake", Provenance.MEASURED, resource=name)
    for name, kind in (
        ("package-0", HwType.CPU),
        ("dram", HwType.MEMORY),
        ("gpu-0", HwType.GPU),
    )
)
SILENT = replace(CPU, id="package-1", resource="package-1")
ENGINE, OTHER = Consumer(10, 1), Consumer(11, 1)


class Host:
    """Each second, the engine has 3 of 4 J of active energy, and 2 J of each device are idle."""

    def __init__(self, *silent: Domain) -> None:
        self.history = EnergyHistory(600 * S, 10**7)
        self.now, self.withheld = 0, Microjoules(0)
        domains = [CPU, DRAM, GPU, *silent]
        self.history.apply(Tick(Instant(0, 0), domains={"fake": domains}), ())

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            before, self.now = Instant(self.now, 0), self.now + S
            after = Instant(self.now, 0)
            shares = (Share(ENGINE, Microjoules(3)), Share(OTHER, Microjoules(1)))
            settled = []
            for one in (CPU, DRAM, GPU):
                interval = Interval(one.id, before, after, Microjoules(6 + self.withheld))
                settled.append(
                    Attribution(interval, shares, Microjoules(2), self.withheld, self.withheld)
                )
            self.history.apply(Tick(after), settled)

    def gpu_steps(self) -> dict:
        return self.history.group_steps([frozenset([ENGINE]), frozenset([OTHER])], lambda _: 0)


GROUPS = [frozenset([ENGINE]), frozenset([OTHER])]
NONE: list[list[str]] = [[], []]


def _energies(steps: dict) -> dict[tuple[str, str], list[int]]:
    return {tuple(counter): [step.energy for step in own] for counter, own in steps.items()}


def test_engine_has_the_energy_of_its_processes_on_cpus_and_memory() -> None:
    host = Host()
    host.run(2)
    engine, other = HostStepReader(host.history, share_idle=False).read(GROUPS, NONE, {}, 0)
    assert _energies(engine) == {("package-0", "cpu"): [3, 3], ("dram", "memory"): [3, 3]}
    assert _energies(other) == {("package-0", "cpu"): [1, 1], ("dram", "memory"): [1, 1]}
    (first, _) = engine[HostCounter("package-0", "cpu")]
    assert first == (0, S, 3, False)


def test_idle_energy_is_shared_in_proportion_on_devices_that_the_engine_uses() -> None:
    host = Host()
    host.run(1)
    reader, boards = HostStepReader(host.history, share_idle=True), [["gpu-0"], ["gpu-9"]]
    engine, other = reader.read(GROUPS, boards, host.gpu_steps(), 0)
    idle = {("package-0", "idle"): [1], ("dram", "idle"): [1], ("gpu-0", "idle"): [1]}
    assert {key: own for key, own in _energies(engine).items() if "idle" in key} == idle
    assert _energies(other)["package-0", "idle"] == [0]
    assert ("gpu-0", "idle") not in _energies(other)


def test_steps_are_read_once_unless_they_are_wanted_again() -> None:
    host = Host()
    reader = HostStepReader(host.history, share_idle=False)
    host.run(5)

    def count(*, least: int = 0) -> int:
        (engine,) = reader.read(GROUPS[:1], [[]], {}, S, least)
        return sum(map(len, engine.values()))

    assert count() == 2 * 4
    assert count() == 0
    host.run(1)
    assert count() == 2
    reader.reread(3 * S)
    assert count(least=5 * S) == 2
    reader.reread(3 * S)
    assert count() == 2 * 3


def test_step_of_which_the_idle_power_is_unknown_is_blurred() -> None:
    host = Host()
    host.withheld = Microjoules(1)
    host.run(1)
    (engine,) = HostStepReader(host.history, share_idle=False).read(GROUPS[:1], [[]], {}, 0)
    assert all(step.blurred for own in engine.values() for step in own)


def test_device_without_readings_has_no_steps() -> None:
    host = Host(SILENT)
    host.run(2)
    (engine,) = HostStepReader(host.history, share_idle=True).read(GROUPS[:1], [[]], {}, 0)
    assert engine[HostCounter("package-1", "cpu")] == []


def test_another_measurement_of_a_device_with_readings_is_not_missing() -> None:
    host = Host(replace(SILENT, resource=CPU.resource))
    host.run(2)
    (engine,) = HostStepReader(host.history, share_idle=True).read(GROUPS[:1], [[]], {}, 0)
    assert {counter.domain for counter in engine} == {"package-0", "dram"}


@pytest.mark.parametrize("share_idle", [False, True])
def test_requests_have_a_part_of_the_idle_energy_if_they_are_to_share_it(share_idle: bool) -> None:
    host, owner = Host(), Principal(1000)
    born = PayerInfo(ENGINE, "vllm", parent=1, principal=owner)
    host.history.apply(Tick(Instant(0, 0), births=[born]), ())
    joiner = InferenceJoiner(host.history, share_idle=share_idle)
    host.run(4)
    details = InferenceDetails("m", queue=0, first_token=S)
    ids = b"t" * 16, b"s" * 8, b""
    span = Span(*ids, "llm", "request", S, 3 * S, None, 10, 20, TokenRole.ENGINE, details)
    joiner.add(ENGINE, SpanColumns.of([span]), host.now, owner.path, principal=owner)
    joiner.turn(host.now, wait=False)

    (row,) = joiner.rows
    idle = {"idle": 3 * 2} if share_idle else {}
    assert row.host.energy == {"gpu": 6, "cpu": 6, "memory": 6, **idle}
    assert row.host.requests == 1
    assert joiner.host_idle == {"cpu": 3, "memory": 3, **({"idle": 3} if share_idle else {})}


def test_device_that_left_the_cover_is_not_missed_and_its_successor_is() -> None:
    host = Host()
    reader = HostStepReader(host.history, share_idle=False)
    host.run(2)
    successor = replace(CPU, id="rapl-mmio:0", resource="cpu:0")
    outside = replace(CPU, in_cover=False, resource=None)
    host.history.apply(Tick(Instant(host.now, 0), domains={"fake": [outside, successor]}), ())
    (engine,) = reader.read(GROUPS[:1], [[]], {}, 0)
    assert len(engine[HostCounter("package-0", "cpu")]) == 2  # its last steps remain
    assert engine[HostCounter("rapl-mmio:0", "cpu")] == []
    assert reader.left == {"package-0"}
    (engine,) = reader.read(GROUPS[:1], [[]], {}, 0)
    assert HostCounter("package-0", "cpu") not in engine

    host.history.apply(Tick(Instant(host.now, 0), domains={"fake": [CPU]}), ())
    reader.read(GROUPS[:1], [[]], {}, 0)
    assert reader.left == frozenset()


@pytest.mark.parametrize("sender", [Consumer(12, 1), ENGINE])
def test_earlier_requests_have_no_divided_steps_read_again(sender: Consumer) -> None:
    host, owner, read = Host(), Principal(1000), []

    class Counted(EnergyHistory):
        def group_steps(self, groups, since, kind=HwType.GPU):  # type: ignore[no-untyped-def]
            found = super().group_steps(groups, since, kind)
            read.append(sum(map(len, found.values())) if kind is HwType.CPU else 0)
            return found

    host.history = Counted(600 * S, 10**7)
    births = [
        PayerInfo(payer, "vllm", parent=1, principal=owner) for payer in (ENGINE, Consumer(12, 1))
    ]
    domains = {"fake": [CPU, DRAM, GPU]}
    host.history.apply(Tick(Instant(0, 0), births=births, domains=domains), ())
    joiner = InferenceJoiner(host.history, share_idle=False)
    host.run(30)
    details = InferenceDetails("m", queue=0, first_token=S)

    def send(payer: Consumer, start: int) -> None:
        ids = b"t" * 16, payer.pid.to_bytes(8) + start.to_bytes(8), b""
        span = Span(*ids, "llm", "r", start, 29 * S, None, 10, 20, TokenRole.ENGINE, details)
        joiner.add(payer, SpanColumns.of([span]), host.now, owner.path, principal=owner)
        joiner.turn(host.now, wait=False)

    send(ENGINE, 20 * S)
    read.clear()
    for back in range(10):
        send(sender, 10 * S - back)
    assert sum(read) == 0


def test_energy_of_an_engine_that_returns_is_divided_once() -> None:
    host, owner = Host(), Principal(1000)
    born = PayerInfo(ENGINE, "vllm", parent=1, principal=owner)
    host.history.apply(Tick(Instant(0, 0), births=[born]), ())
    joiner = InferenceJoiner(host.history)
    details = InferenceDetails("m", queue=0, first_token=S)

    def send(start: int) -> None:
        ids = b"t" * 16, start.to_bytes(8), b""
        span = Span(*ids, "llm", "r", start, host.now, None, 10, 20, TokenRole.ENGINE, details)
        joiner.add(ENGINE, SpanColumns.of([span]), host.now, owner.path, principal=owner)

    host.run(12)
    send(10 * S)
    for _ in range(PoolName.ENGINES.lifetime // S + 5):
        host.run(1)
        joiner.turn(host.now)
    send(host.now - 200 * S)
    host.run(1)
    joiner.turn(host.now, wait=False)

    (row,) = joiner.rows
    assert row.host.energy["cpu"] == 2 * 3
    assert row.host.energy["cpu"] + joiner.host_idle["cpu"] == 3 * (host.now // S - 10)
