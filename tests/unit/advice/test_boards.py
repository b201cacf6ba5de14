"""The learner of static powers: windows of waiting spans, choice of the basis, facts."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace

import pytest

from wattspan.advice import boards
from wattspan.advice.boards import ACTIVE_TIME, WINDOW_DELAY, StaticPowerLearner
from wattspan.advice.static_power import StaticPowerFit, StaticPowerRefusal
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    DomainAccount,
    GpuStatus,
    HwType,
    Instant,
    Interval,
    Microjoules,
    Milliwatts,
    Payer,
    Principal,
    Provenance,
    Share,
    Snapshot,
    SpanAccounts,
    SpanRow,
    StaticBasis,
    StaticPower,
    Tick,
)
from wattspan.service.energy_history import EnergyHistory
from wattspan.spans.values import Span, SpanColumns

GPU = Domain(
    "gpu0", HwType.GPU, "A100 0", "nvml", Provenance.MEASURED, resource="gpu0",
    resolution=100 * MILLISECOND,
)  # fmt: skip
CPU = Domain("cpu0", HwType.CPU, "package-0", "fake", Provenance.MEASURED, resource="cpu")
TRAIN, OTHER = Consumer(10, 1), Consumer(11, 1)
TICK = 100 * MILLISECOND
IDLE, BLOCK, WORK = 60_000, 85_000, 320_000


class Host:
    """A board whose power is that of waiting in a part of each second."""

    def __init__(self, domain: Domain = GPU) -> None:
        self.domain = domain
        self.now = 1000 * SECOND
        self.account = DomainAccount(domain, idle_power=Milliwatts(IDLE))
        self.clock_hz: int | None = 1_400_000_000
        self.utilisation: float | None = 1.0
        self.status = True
        self.drawn: Milliwatts | None = Milliwatts(200_000)
        self.senders: dict[str, tuple[Consumer, ...]] = {"train": (TRAIN,)}
        self.owners: tuple[str, ...] = ()
        self.principals: dict[Consumer, Principal] = {}
        self.learner = StaticPowerLearner(
            ("all_reduce", "recv"), self.view, principal=self.principals.get
        )
        self.history = EnergyHistory(300 * SECOND, 10**7, self.learner.powers)
        self.apply(Tick(Instant(self.now, 0), domains={"nvml": [domain], "fake": [CPU]}), ())
        self.number = 0

    def view(self) -> Snapshot:
        status = GpuStatus(
            self.domain.id, Instant(self.now, 0), power_instant=self.drawn,
            sm_clock_hz=self.clock_hz, utilisation=self.utilisation, temperature_celsius=61,
            throttling=("power_cap",),
        )  # fmt: skip
        return Snapshot(
            Instant(self.now, 0), 1, "host", (self.account,),
            gpus=(status,) if self.status else (),
            spans=SpanAccounts(
                senders=self.senders,
                rows=tuple(SpanRow("train", "step", {}, owner=owner) for owner in self.owners),
            ),
        )  # fmt: skip

    def apply(self, tick: Tick, settled: Sequence[Attribution]) -> None:
        self.history.apply(tick, settled)
        self.learner.apply(tick, settled)

    def run(
        self,
        seconds: int,
        shares: Sequence[float],
        *,
        users: Sequence[Payer] = (TRAIN,),
        send: bool = True,
    ) -> None:
        """In each second some users wait for a part of it, which is sent at its end."""
        for second in range(seconds):
            share = shares[second // 4 % len(shares)]
            begin = self.now
            for tick in range(10):
                start, self.now = self.now, self.now + TICK
                waiting = min(1.0, max(0.0, share * 10 - tick))
                power = BLOCK * waiting + WORK * (1 - waiting) if users else IDLE
                energy = round(power * TICK / 1e6)
                idle = IDLE * TICK // 10**6
                parts = [(energy - idle) // len(users) for _ in users]
                interval = Interval(
                    self.domain.id, Instant(start, 0), Instant(self.now, 0), Microjoules(energy)
                )
                given = tuple(
                    Share(user, Microjoules(part)) for user, part in zip(users, parts, strict=True)
                )
                rest = energy - idle - sum(parts)
                settled = Attribution(interval, given, Microjoules(idle), Microjoules(rest))
                self.apply(Tick(Instant(self.now, 0)), [settled])
            if send and share:
                self.learner.add_spans(TRAIN, self.spans(begin, share), self.now)

    def spans(self, begin: int, share: float, name: str = "all_reduce") -> SpanColumns:
        self.number += 1
        wait = begin + round(share * SECOND)
        return SpanColumns.of(
            [
                Span(bytes(16), self.number.to_bytes(8), b"", "train", name, begin, wait),
                Span(bytes(16), bytes(8), b"", "train", "forward", wait, begin + SECOND),
                Span(bytes(16), bytes(8), b"", "train", name, wait, wait),
            ]
        )

    @property
    def power(self) -> StaticPower | None:
        return self.learner.powers().get(self.domain.id)


VARIED = tuple(0.1 + 0.5 * (7 * i % 17) / 17 for i in range(17))


def test_static_power_is_fitted_from_waiting_spans() -> None:
    host = Host()
    host.run(100, VARIED)
    assert host.power.basis is StaticBasis.FITTED
    assert host.power.power == pytest.approx(BLOCK, rel=0.02)
    (facts,) = host.learner.facts()
    assert isinstance(facts.fit, StaticPowerFit)
    assert facts.fit.celsius == (61, 61)
    (use,) = facts.uses
    assert (use.service, facts.in_use) == ("train", True)
    assert use.use.waiting / use.use.windows == pytest.approx(sum(VARIED) / len(VARIED), rel=0.05)
    assert len(facts.samples) >= 50
    assert all(sample.capped for sample in facts.samples)


def test_static_power_is_the_idle_power_without_waiting_spans() -> None:
    host = Host()
    host.run(60, (0.0,))
    assert host.power == StaticPower(Milliwatts(IDLE), StaticBasis.LOWER_BOUND)
    (facts,) = host.learner.facts()
    assert facts.fit is StaticPowerRefusal.FEW_WINDOWS


def test_static_power_is_refused_where_the_share_of_waiting_is_constant() -> None:
    host = Host()
    host.run(100, (0.3,))
    assert host.power == StaticPower(Milliwatts(IDLE), StaticBasis.LOWER_BOUND)
    assert host.learner.facts()[0].fit is StaticPowerRefusal.NO_SPREAD


def test_configured_static_power_comes_first() -> None:
    host = Host(replace(GPU, static_power=Milliwatts(90_000)))
    host.run(100, VARIED)
    assert host.power == StaticPower(Milliwatts(90_000), StaticBasis.CONFIGURED)


def test_static_power_is_unknown_without_an_idle_power() -> None:
    host = Host()
    host.account = DomainAccount(GPU)
    host.run(5, (0.0,))
    assert host.power is None
    host.status = False
    host.account = DomainAccount(CPU)
    host.run(5, (0.0,))
    assert host.power is None


def test_windows_of_a_shared_board_are_ignored() -> None:
    host = Host()
    host.run(100, VARIED, users=(TRAIN, OTHER))
    assert host.power == StaticPower(Milliwatts(IDLE), StaticBasis.LOWER_BOUND)
    assert host.learner.facts()[0].uses == ()


def test_spans_without_waiting_tell_the_time_of_known_processes_only() -> None:
    host = Host()
    host.run(20, VARIED)
    times = [(host.now, host.now), (host.now, host.now + SECOND)]
    work = SpanColumns.of([Span(bytes(16), bytes(8), b"", "train", "forward", *t) for t in times])
    host.learner.add_spans(OTHER, work, host.now)
    host.learner.add_spans(TRAIN, work, host.now)
    host.run(80, VARIED)
    assert host.power.basis is StaticBasis.FITTED


def many(count: int) -> list[Consumer]:
    return [Consumer(pid, 1) for pid in range(100, 100 + count)]


def test_many_users_of_one_owner_displace_none_of_another_owner() -> None:
    host = Host()
    host.utilisation = None
    host.principals |= {TRAIN: Principal(1), **dict.fromkeys(many(600), Principal(2))}
    host.run(5, (0.1,))
    for user in many(600):
        start, host.now = host.now, host.now + TICK
        interval = Interval(GPU.id, Instant(start, 0), Instant(host.now, 0), Microjoules(1000))
        share = Share(user, Microjoules(1000))
        settled = Attribution(interval, (share,), Microjoules(0), Microjoules(0))
        host.apply(Tick(Instant(host.now, 0)), [settled])
        host.learner.add_spans(user, host.spans(start - SECOND, 0.5), host.now)
    shown: list[Consumer] = []
    (facts,) = host.learner.facts(lambda process: bool(shown.append(process)) or True)
    assert len(facts.uses) == 512
    assert {TRAIN, many(600)[-1]} < set(shown)
    host.run(30, (0.1,))
    (facts,) = host.learner.facts(lambda process: process == TRAIN)
    assert facts.uses[0].use.windows > 20 * SECOND


def test_user_without_a_place_has_no_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "_MAX_USERS", 1)
    host = Host()
    host.principals |= {TRAIN: Principal(1), OTHER: Principal(2)}
    host.run(8, (0.1,))
    host.run(60, (0.1,), users=(OTHER,))
    (facts,) = host.learner.facts()
    assert [one.use.time for one in facts.uses] == [8 * SECOND]


@pytest.mark.parametrize("case", ["future", "long ago", "inverted", "no user", "no board"])
def test_waiting_spans_outside_of_windows_take_no_memory(case: str) -> None:
    host = Host()
    host.run(1, (0.1,), users=() if case == "no user" else many(8)[:1])
    if case == "no board":
        host.learner = StaticPowerLearner(("recv",), host.view)
    ahead = {"future": 10**17, "long ago": -ACTIVE_TIME - SECOND, "inverted": -SECOND}
    begin = host.now + ahead.get(case, -SECOND)
    length = -1 if case == "inverted" else 1
    spans = SpanColumns.of(
        [
            Span(bytes(16), bytes(8), b"", "train", "recv", begin + at, begin + at + length)
            for at in range(0, 8000, 2)
        ]
    )
    tracemalloc.start()
    for process in many(8):
        host.learner.add_spans(process, spans, host.now)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 400_000


def test_unattributed_energy_is_not_that_of_an_unused_board() -> None:
    host = Host()
    host.apply(Tick(Instant(host.now, 0), domains={"nvml": [GPU]}), ())  # listed again
    for at in range(5):
        start, end = (Instant(host.now + (at + i) * SECOND, 0) for i in (0, 1))
        interval = Interval(GPU.id, start, end, Microjoules(100))
        whole = Attribution(interval, (), Microjoules(0), Microjoules(100))
        other = replace(whole, interval=interval._replace(domain_id=CPU.id))
        host.apply(Tick(end), [other, whole])
    (facts,) = host.learner.facts()
    assert (facts.observed, facts.unused) == (5 * SECOND, 0)


def test_clock_without_a_power_is_no_sample() -> None:
    host = Host()
    host.drawn = None
    host.run(10, (0.1,))
    assert host.learner.facts()[0].samples == ()


def test_host_without_gpus_has_no_facts() -> None:
    learner = StaticPowerLearner((), Host().view)
    learner.apply(Tick(Instant(0, 0), domains={"fake": [CPU]}), ())
    assert learner.facts() == ()


def test_windows_wait_for_late_spans() -> None:
    host = Host()
    host.run(5, VARIED)
    host.run(WINDOW_DELAY // SECOND - 6, (0.5,), send=False)
    assert host.learner.facts()[0].uses[0].use.windows == 0


def test_no_window_is_kept_without_waiting_spans() -> None:
    host = Host()
    host.run(30, VARIED)
    before = host.learner.facts()[0].uses[0].use.windows
    host.run(ACTIVE_TIME // SECOND + 20, (0.0,))
    after = host.learner.facts()[0].uses[0].use.windows
    host.run(20, (0.0,))
    assert before < after == host.learner.facts()[0].uses[0].use.windows


def test_unused_time_and_invisible_uses_are_told_apart() -> None:
    host = Host()
    host.run(10, (0.0,), users=())
    host.run(5, (0.5,))
    (facts,) = host.learner.facts(lambda process: process != TRAIN)
    assert facts.uses == ()
    assert facts.unused == pytest.approx(10 * SECOND, abs=2 * SECOND)
    assert facts.unused_energy == pytest.approx(facts.unused * IDLE / 1e6)
    host.run(70, (0.0,), users=())
    assert not host.learner.facts()[0].in_use


def test_use_keeps_its_service_after_the_process_has_ended() -> None:
    host = Host()
    host.run(5, (0.5,))
    host.senders = {}
    host.run(70, (0.0,), users=())
    (use,) = host.learner.facts()[0].uses
    assert use.service == "train"
    assert not host.learner.facts()[0].in_use


def test_service_has_its_owner_only_where_services_have_several_owners() -> None:
    host = Host()
    host.senders = {"train@alice": (TRAIN,)}
    host.run(5, (0.5,))

    def service() -> str:
        (use,) = host.learner.facts()[0].uses
        return use.service

    assert service() == "train@alice"
    host.owners = ("alice", "alice")
    assert service() == "train"
    host.owners = ("alice", "bob")
    assert service() == "train@alice"


def test_clock_is_not_sampled_while_the_board_rests() -> None:
    host = Host()
    host.utilisation = 0.0
    host.run(20, (0.0,))
    assert host.learner.facts()[0].samples == ()
    host.utilisation, host.clock_hz = 1.0, None
    host.run(20, (0.0,))
    assert host.learner.facts()[0].samples == ()


def test_a_changed_domain_is_followed() -> None:
    host = Host()
    changed = replace(GPU, static_power=Milliwatts(77_000))
    host.apply(Tick(Instant(host.now, 0), domains={"nvml": [changed]}), ())
    host.run(2, (0.0,))
    assert host.power == StaticPower(Milliwatts(77_000), StaticBasis.CONFIGURED)


def test_split_of_a_process_is_dynamic_while_it_works() -> None:
    host = Host()
    host.run(100, VARIED)
    host.history.watch(TRAIN)
    start = host.now
    host.run(12, (0.5,))
    found = host.history.process(TRAIN, start, host.now)
    split, basis = found.split
    assert basis is StaticBasis.FITTED
    assert split.static + split.dynamic == found.energy[HwType.GPU]
    # The idle account has 60 W of the static power of 85 W.
    assert split.static == pytest.approx(12 * (BLOCK - IDLE) * 1e3, rel=0.1)
    earlier = host.history.process(TRAIN, start - 20 * SECOND, start - 10 * SECOND)
    assert earlier.split is not None
