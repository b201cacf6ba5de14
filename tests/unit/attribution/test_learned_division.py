"""The ledger divides the energy of a package by learned powers of its processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from testbed.simulated_host import GPU, PACKAGE

from wattspan.attribution.baseline import IdlePower, LoadIntercept
from wattspan.attribution.ledger import Ledger, LedgerSettings, attribute
from wattspan.attribution.power_curve import Extrapolation
from wattspan.model import (
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    Payer,
    PayerInfo,
    Principal,
    Reading,
    Snapshot,
    Tick,
    Usage,
)

CPUS = 16
IDLE = 42.0
CHEAP, DEAR = Consumer(1, 1), Consumer(2, 1)
STEADY = tuple(Consumer(10 + number, 1) for number in range(6))
COSTS = {CHEAP: 9.0, DEAR: 22.5} | dict.fromkeys(STEADY, 15.0)


class Host:
    """A package with the true energy of its processes, and the ledger beside it."""

    def __init__(self, domain: Domain = PACKAGE, idle: int | None = None) -> None:
        powers = {} if idle is None else {HwType.CPU: Milliwatts(idle)}
        self.ledger = Ledger(LedgerSettings(idle_powers=powers))
        self.domain, self.chance = domain, random.Random(1)
        self.at, self.energy = 1000 * SECOND, 1000.0
        self.true: dict[Payer, float] = dict.fromkeys(COSTS, 0.0)
        self.attributions: list[Attribution] = []
        self.births = tuple(PayerInfo(one, "work", principal=Principal(one.pid)) for one in COSTS)
        self._tick({})

    def _tick(self, uses: dict[Consumer, float]) -> None:
        now = Instant(self.at, 0)
        spent: dict[Payer, int] = {one: round(use * SECOND) for one, use in uses.items()}
        usages = ()
        if self.at > 1000 * SECOND:
            start = Instant(self.at - SECOND, 0)
            usages = (Usage("cpu:0", start, now, spent, capacity=CPUS * SECOND),)
        noise = self.chance.gauss(0, 0.1)
        reading = Reading(self.domain.id, now, Microjoules(round((self.energy + noise) * 1e6)))
        domains = {} if usages else {"rapl": (self.domain,)}
        tick = Tick(now, domains, (reading,), self.births, usages)
        self.attributions += self.ledger.apply(tick)
        self.births = ()

    def run(self, seconds: int, uses: Callable[[], dict[Consumer, float]]) -> None:
        for _ in range(seconds):
            now = uses()
            self.energy += IDLE
            for one, use in now.items():
                self.energy += COSTS[one] * use
                self.true[one] += COSTS[one] * use
            self.at += SECOND
            self._tick(now)

    def varying(self) -> dict[Consumer, float]:
        return {one: self.chance.uniform(0.1, 1.0) for one in (CHEAP, DEAR)}

    def beside_steady(self) -> dict[Consumer, float]:
        return self.varying() | dict.fromkeys(STEADY, 0.8)

    def measured(
        self, seconds: int, uses: Callable[[], dict[Consumer, float]]
    ) -> dict[Payer, tuple[float, float]]:
        """Energy relative to the truth, and stated error, of processes in some seconds."""
        before, first = dict(self.true), len(self.attributions)
        self.run(seconds, uses)
        charged, doubts = dict.fromkeys(COSTS, 0.0), dict.fromkeys(COSTS, 0.0)
        for one in self.attributions[first:]:
            for share, doubt in zip(one.shares, one.doubts, strict=True):
                charged[share.payer] += share.energy / 1e6  # type: ignore[index]
                doubts[share.payer] += doubt / 1e6  # type: ignore[index]
        return {
            one: (charged[one] / (now - before[one]), doubts[one] / (now - before[one]))  # type: ignore[index]
            for one, now in self.true.items()
            if now > before[one]
        }

    def snapshot(self) -> Snapshot:
        return self.ledger.snapshot(Instant(self.at, 0), "host")


def at_rest() -> dict[Consumer, float]:
    return {}


def test_processes_are_charged_what_their_cpu_time_costs() -> None:
    host = Host()
    host.run(40, at_rest)
    host.run(60, host.varying)
    for ratio, error in host.measured(30, host.varying).values():
        assert abs(ratio - 1) <= min(0.03, error)
    account = host.snapshot().account(PACKAGE.id)
    assert (account.learned, account.method) == (True, "learned")
    assert account.idle_power == pytest.approx(42_000, rel=0.01)
    assert account.energy == account.consumers + account.idle + account.unattributed


def test_processes_on_a_host_that_never_rests_are_charged_what_they_cost() -> None:
    host = Host()
    host.run(60, host.varying)
    for ratio, _ in host.measured(30, host.varying).values():
        assert ratio == pytest.approx(1, abs=0.03)
    account = host.snapshot().account(PACKAGE.id)
    assert account.idle_power == pytest.approx(42_000, rel=0.02)
    assert not account.idle_power_remembered
    assert account.idle_power_error is not None


def test_varying_process_beside_steady_ones_has_a_close_lower_bound() -> None:
    """The idle power is not identifiable beside steady processes; the powers of others are."""
    host = Host()
    host.run(60, host.beside_steady)
    found = host.measured(30, host.beside_steady)
    account = host.snapshot().account(PACKAGE.id)
    assert account.idle_power is None
    assert account.withheld == account.unattributed > 0  # no use is unclaimed
    for one in (CHEAP, DEAR):
        assert 0.9 <= found[one][0] <= 1.03
    for one in STEADY:
        assert found[one][0] <= 1
        assert abs(found[one][0] - 1) <= found[one][1]


def test_process_whose_whole_energy_is_withheld_has_a_lower_bound() -> None:
    host, late = Host(), Consumer(99, 1)
    host.run(90, host.beside_steady)
    start, end = Instant(host.at, 0), Instant(host.at + SECOND, 0)
    began = (Reading(GPU.id, start, Microjoules(0)),)
    host.ledger.apply(Tick(start, {"nvml": (GPU,)}, began, (PayerInfo(late, "late"),)))
    spent: dict[Payer, int] = dict.fromkeys(COSTS, SECOND // 2)
    usages = (
        Usage("cpu:0", start, end, spent | {late: 1}, capacity=CPUS * SECOND),
        Usage("gpu:GPU-0", start, end, {late: SECOND}),
    )
    package = Microjoules(round((host.energy + 102.75) * 1e6))
    readings = (Reading(PACKAGE.id, end, package), Reading(GPU.id, end, Microjoules(10**8)))
    host.ledger.apply(Tick(end, {}, readings, (), usages))
    rows = {one.info.payer: one for one in host.ledger.snapshot(end, "host").processes}
    assert rows[late].bounded == {HwType.CPU}


def test_configured_idle_power_is_evidence() -> None:
    host = Host(idle=42_000)
    host.run(60, host.beside_steady)
    found = host.measured(30, host.beside_steady)
    for one in (CHEAP, DEAR):
        assert found[one][0] == pytest.approx(1, abs=0.06)
    assert host.snapshot().account(PACKAGE.id).idle_power is not None


def test_energy_of_a_proxy_is_divided_by_use_alone_with_the_error_of_unknown_powers() -> None:
    host = Host(replace(PACKAGE, method="cpu-time-proxy"))
    host.run(40, at_rest)
    host.run(60, host.varying)
    for ratio, error in host.measured(30, host.varying).values():
        assert 0.2 < abs(ratio - 1) <= error
    account = host.snapshot().account(PACKAGE.id)
    assert (account.learned, account.method) == (False, "cpu-time-proxy")


def test_doubts_are_those_of_shares_with_energy() -> None:
    usage = Usage("cpu:0", Instant(0, 0), Instant(1, 1), {CHEAP: 1, DEAR: 10**9, STEADY[0]: 10**9})
    interval = Interval(PACKAGE.id, Instant(0, 0), Instant(1, 1), Microjoules(1000))
    found = attribute(
        interval, usage, doubts=lambda _, shares: [Microjoules(energy // 2) for _, energy in shares]
    )
    assert found.shares == ((DEAR, 500), (STEADY[0], 500))
    assert found.doubts == (250, 250)


def test_energy_of_unsure_use_is_withheld() -> None:
    usage = Usage("cpu:0", Instant(0, 0), Instant(1, 1), {DEAR: 6 * 10**9}, 4 * 10**9)
    interval = Interval(PACKAGE.id, Instant(0, 0), Instant(1, 1), Microjoules(1000))
    found = attribute(interval, usage, withheld_due=500, unsure=3 * 10**9)
    assert found.shares == ((DEAR, 300),)
    assert (found.unattributed, found.withheld) == (700, 650)


def _extrapolation(idle: float, deviation: float) -> Extrapolation:
    return Extrapolation(idle, deviation, 50_000.0, 100_000.0)


def test_joint_idle_power_is_known_if_its_range_is_narrow() -> None:
    idle = IdlePower(LoadIntercept())
    idle.joint = _extrapolation(42_000.0, 1_000.0)
    assert (idle.power, idle.error) == (42_000, pytest.approx(1_960))
    idle.joint = _extrapolation(42_000.0, 20_000.0)
    assert idle.power is None
    assert not idle.doubtful


def test_joint_idle_power_is_never_negative() -> None:
    idle = IdlePower(LoadIntercept(Milliwatts(1_000)))
    idle.joint = _extrapolation(-500.0, 1_000.0)
    assert idle.power == 0
    assert not idle.remembered


def test_idle_power_of_an_earlier_run_is_evidence() -> None:
    configured = IdlePower(LoadIntercept(Milliwatts(40_000))).evidence
    assert configured == pytest.approx((40.0, 2.4))
    earlier = IdlePower(LoadIntercept(Milliwatts(40_000)), Milliwatts(42_000)).evidence
    assert earlier == pytest.approx((42.0, 2.52))
    wide = IdlePower(LoadIntercept(), Milliwatts(42_000), earlier_error=Milliwatts(9_800)).evidence
    assert wide == pytest.approx((42.0, 5.0))
    assert IdlePower(LoadIntercept()).evidence is None


def test_idle_power_is_remembered_with_its_error() -> None:
    """Of a host that never rests: the next run takes it for no more certain than it was."""
    host = Host()
    host.run(90, host.varying)
    saved = host.ledger.checkpoint(host.snapshot())
    again = Ledger(LedgerSettings(), checkpoint=saved)
    later = again.checkpoint(again.snapshot(Instant(host.at, 0), "host"))
    errors = [one.accounts[0].idle_power_error for one in (saved, later)]
    assert errors == [host.snapshot().account(PACKAGE.id).idle_power_error] * 2
    assert errors[0] is not None
