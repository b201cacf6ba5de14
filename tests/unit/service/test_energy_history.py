"""The energy history: devices, processes, families, idle energy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from testbed.constant_history import ConstantPast

from wattspan.api.energy import energy_response
from wattspan.model import (
    MILLISECOND,
    SECOND,
    Attribution,
    Consumer,
    Domain,
    HwType,
    Instant,
    Interval,
    Microjoules,
    PayerInfo,
    Provenance,
    Share,
    Tick,
)
from wattspan.service.energy_history import (
    BACKFILL,
    IN_USE,
    MAX_AWAITED,
    SETTLEMENT_TIMEOUT,
    EnergyHistory,
)
from wattspan.spans.profiles import EnergyProfile

CPU = Domain("cpu0", HwType.CPU, "package-0", "fake", Provenance.MEASURED, resource="cpu")
GPU = Domain("gpu0", HwType.GPU, "gpu", "fake", Provenance.MEASURED, resource="gpu")
SHELL, CHILD, GRANDCHILD, STRANGER = (Consumer(pid, 100 + pid) for pid in (10, 11, 12, 13))
TICK = 100 * MILLISECOND


class Host:
    """Two domains whose energy is settled tick by tick; each process spends 1 mJ a tick."""

    def __init__(
        self, *domains: Domain, span: int = 300 * SECOND, errors: Mapping[str, float] | None = None
    ) -> None:
        self.edges: dict[Consumer, Sequence[int]] = {}
        self.past = EnergyHistory(
            span,
            10**7,
            baseline_errors=lambda: errors or {},
            edges=lambda process: self.edges.get(process, ()),
        )
        self.domains = domains
        self.now = 1000 * SECOND
        self.past.apply(Tick(Instant(self.now, 0), domains={"fake": domains}), ())

    def born(self, *infos: PayerInfo) -> None:
        self.past.apply(Tick(Instant(self.now, 0), births=infos), ())

    def run(self, ticks: int, payers: tuple[Consumer, ...], silent: tuple[Domain, ...] = ()) -> int:
        """Let time go on; the monotonic time at which it began."""
        began = self.now
        for _ in range(ticks):
            start, self.now = self.now, self.now + TICK
            energy = 1000 * len(payers) + 500
            settled = [
                Attribution(
                    Interval(d.id, Instant(start, 0), Instant(self.now, 0), Microjoules(energy)),
                    tuple(Share(payer, Microjoules(1000)) for payer in payers),
                    Microjoules(500),
                    Microjoules(0),
                )
                for d in self.domains
                if d not in silent
            ]
            self.past.apply(Tick(Instant(self.now, 0)), settled)
        return began


def family() -> list[PayerInfo]:
    return [
        PayerInfo(SHELL, "sh", parent=1),
        PayerInfo(CHILD, "make", parent=SHELL.pid),
        PayerInfo(GRANDCHILD, "cc", parent=CHILD.pid),
        PayerInfo(STRANGER, "top", parent=1),
    ]


def test_error_of_the_idle_power_is_that_of_the_payers_by_their_shares() -> None:
    """Half of 0.05 W is the error of each of two processes with equal energy."""
    host = Host(CPU)
    start = host.run(20, (SHELL, STRANGER))
    sure = host.past.process(SHELL, start, start + 20 * TICK).uncertainty[HwType.CPU]
    host = Host(CPU, errors={CPU.id: 50.0})
    start = host.run(20, (SHELL, STRANGER))
    unsure = host.past.process(SHELL, start, start + 20 * TICK).uncertainty[HwType.CPU]
    assert unsure**2 - sure**2 == pytest.approx(50_000.0**2, rel=0.2)


class Crowded(EnergyProfile):
    """It never has room, however often it is thinned."""

    crowded, steps = True, 0

    def thin(self) -> None:
        self.steps += 1


@pytest.mark.parametrize(("count", "most"), [(1, 1), (16, 3), (1000, 16), (5000, 16)])
def test_steps_of_thinning_in_a_tick_are_few_of_any_number_of_processes(
    count: int, most: int
) -> None:
    host, profiles = Host(CPU), [Crowded() for _ in range(count)]
    host.past._crowded.update(dict.fromkeys(profiles))
    host.run(1, ())
    assert sum(one.steps for one in profiles) == most


def test_old_steps_of_a_gpu_that_no_group_has_used_are_not_read() -> None:
    host = Host(GPU)
    host.run(20, (SHELL,))
    users, others = frozenset((SHELL,)), frozenset((STRANGER,))
    assert len(host.past.group_steps([others, users], lambda _: 0)[GPU.id]) == 20
    (step,) = host.past.group_steps([others], lambda _: 0)[GPU.id]
    assert (step.end, step.energies) == (host.now, [0])
    assert not host.past.group_steps([others], lambda _: host.now)


def test_process_energy_is_equal_with_and_without_a_profile() -> None:
    host = Host(CPU)
    start = host.run(20, (SHELL, STRANGER))
    before = host.past.process(SHELL, start + TICK, start + 11 * TICK)
    host.past.watch(SHELL)
    after = host.past.process(SHELL, start + TICK, start + 11 * TICK)
    assert before.energy == after.energy == {HwType.CPU: 10_000}
    assert before.covered == after.covered == 10 * TICK


def test_family_is_the_process_and_its_descendants() -> None:
    host = Host(CPU)
    host.born(*family())
    start = host.run(20, (SHELL, CHILD, GRANDCHILD, STRANGER))
    alone = host.past.process(SHELL, start, host.now)
    whole = host.past.process(SHELL, start, host.now, family=True)
    assert (alone.energy[HwType.CPU], whole.energy[HwType.CPU]) == (20_000, 60_000)


def test_energy_is_missing_of_a_family_if_it_is_of_one_member() -> None:
    gaps = {CHILD: {HwType.GPU: 7}, GRANDCHILD: {HwType.GPU: 9, HwType.CPU: 3}}
    past = EnergyHistory(
        300 * SECOND,
        10**7,
        missing_until=lambda payer: gaps.get(payer, {}),  # type: ignore[call-overload]
    )
    past.apply(Tick(Instant(0, 0), births=tuple(family())), ())
    assert past.missing_until(SHELL) == {}
    assert past.missing_until(SHELL, family=True) == {HwType.GPU: 9, HwType.CPU: 3}
    assert past.bounded(SHELL, 0) == set()
    assert past.bounded(SHELL, 3, family=True) == {HwType.GPU}
    assert past.bounded(GRANDCHILD, 2) == {HwType.GPU, HwType.CPU}


def test_watched_family_includes_later_children() -> None:
    host = Host(CPU)
    host.born(*family()[:1])
    start = host.run(10, (SHELL,))
    host.past.watch(SHELL, family=True)
    host.born(*family()[1:])
    host.run(10, (SHELL, CHILD, GRANDCHILD, STRANGER))
    assert host.past.payees == {SHELL, CHILD, GRANDCHILD}
    whole = host.past.process(SHELL, start, host.now, family=True)
    assert whole.energy[HwType.CPU] == 10_000 + 30_000


def test_reused_pid_has_no_older_children() -> None:
    host = Host(CPU)
    older = Consumer(20, SHELL.started - 50)
    host.born(*family(), PayerInfo(older, "old", parent=SHELL.pid))
    start = host.run(10, (SHELL, older))
    assert host.past.process(SHELL, start, host.now, family=True).energy[HwType.CPU] == 10_000


def test_energy_of_the_far_future_is_not_awaited_for_ever() -> None:
    host = Host(CPU)
    host.run(1, (SHELL,))
    host.past.expect(host.now + 10**18)
    assert host.past.awaited
    host.run(MAX_AWAITED // TICK, (SHELL,))
    assert not host.past.awaited


def test_profile_reaches_back_further_than_the_history() -> None:
    host = Host(CPU, span=2 * SECOND)
    host.past.watch(SHELL)
    start = host.run(100, (SHELL,))
    assert host.past.process(SHELL, start, host.now).energy == {HwType.CPU: 100_000}
    host.past.forget(SHELL)
    assert host.past.process(SHELL, start, host.now).covered < 3 * SECOND


def test_late_reads_of_a_process_and_its_family_have_the_energy_between_edges() -> None:
    host = Host(CPU, span=5 * SECOND)
    host.born(*family())
    host.past.watch(SHELL, family=True, holder="questions")
    for _ in range(20):
        for payers in ((SHELL,), (SHELL, CHILD), (STRANGER,)):
            host.run(3, payers)
    window, other = (
        (host.now - n * TICK + 7, host.now - (n - 4) * TICK + 7 * MILLISECOND) for n in (100, 60)
    )

    def read(start: int, end: int) -> list[tuple[int, int]]:
        found = [host.past.process(SHELL, start, end, family=wanted) for wanted in (False, True)]
        return [(one.energy[HwType.CPU], one.uncertainty[HwType.CPU]) for one in found]

    early, unregistered = read(*window), read(*other)
    host.edges[SHELL] = window
    host.run(5000, (SHELL,))
    assert read(*window) == early
    assert read(*other) != unregistered
    for (energy, _), (late, uncertainty) in zip(unregistered, read(*other), strict=True):
        assert abs(late - energy) <= uncertainty


def test_new_profile_includes_the_history() -> None:
    host = Host(CPU, GPU)
    start = host.run(700, (SHELL,))
    host.past.watch(SHELL)
    spent = host.past.process(SHELL, host.now - BACKFILL, host.now)
    assert spent.energy == {HwType.CPU: 600_000, HwType.GPU: 600_000}
    assert host.past.process(SHELL, start, start + SECOND).energy[HwType.CPU] == 10_000


def test_settled_waits_for_the_slower_domain_but_not_for_a_lost_one() -> None:
    host = Host(CPU, GPU)
    assert host.past.settled() == 0
    host.run(10, (SHELL,))
    both = host.now
    host.run(10, (SHELL,), silent=(GPU,))
    assert host.past.settled() == both
    host.run(SETTLEMENT_TIMEOUT // TICK, (SHELL,), silent=(GPU,))
    assert host.past.settled() == host.now


@pytest.mark.parametrize("watched", [False, True])
def test_answer_of_a_window_in_an_outage_of_a_gpu_outlasts_its_return(watched: bool) -> None:
    """Four ticks of CPU energy are known; of the GPU, which returns after 10 s, none is."""
    host = Host(CPU, GPU)
    host.run(20, (SHELL,))
    if watched:
        host.past.watch(SHELL)
    start = host.run(100, (SHELL,), silent=(GPU,)) + 20 * TICK
    devices = ConstantPast(host.now, known_domains=(CPU, GPU), devices={})
    period = start, start + 4 * TICK
    during = energy_response(host.past, devices, *period, SHELL)["process"]
    host.run(20, (SHELL,))
    after = energy_response(host.past, devices, *period, SHELL)["process"]
    for told in (during, after):
        assert told["joules"] == {"cpu": 0.004}
        assert told["certainty"] == {"cpu": "known"}
        assert told["static_joules"] is None
    both = energy_response(host.past, devices, start, host.now, SHELL)["process"]
    # Without a watch, the ledger's gaps say so.
    assert both["certainty"] == {"cpu": "known", "gpu": "lower_bound" if watched else "known"}


def half_busy() -> tuple[Host, Callable[[], list[tuple[int, int]]]]:
    """A host, and the samples of SHELL, which works in the first half of the next interval."""
    host = Host(CPU)
    host.run(5, (SHELL,))
    samples = [(host.now + i * TICK // 10, min(i, 5) * TICK // 10) for i in range(11)]
    return host, lambda: [samples.pop(0) for _ in range(len(samples))]


def test_cpu_samples_locate_energy_inside_an_interval() -> None:
    host, samples = half_busy()
    host.past.watch(SHELL, samples=samples)
    start = host.run(1, (SHELL,))
    host.run(30, (SHELL,))
    first = host.past.process(SHELL, start, start + TICK // 2).energy[HwType.CPU]
    assert first == pytest.approx(1000, rel=0.01)


def test_cpu_samples_apply_to_a_family_of_one_process() -> None:
    host, samples = half_busy()
    host.past.watch(SHELL, family=True, samples=samples)
    start = host.run(1, (SHELL,))
    host.run(30, (SHELL,))
    spent = host.past.process(SHELL, start, start + TICK // 2, family=True)
    assert spent.energy[HwType.CPU] == pytest.approx(1000, rel=0.01)


def test_profile_is_kept_until_the_last_holder_ends() -> None:
    host = Host(CPU)
    host.past.watch(SHELL)
    host.past.watch(SHELL, holder="questions")
    host.past.forget(SHELL)
    assert host.past.watched == (SHELL,)
    host.past.forget(SHELL, holder="questions")
    host.past.forget(SHELL, holder="questions")
    assert host.past.watched == () == tuple(host.past.payees)


def test_settled_includes_the_watermark_of_a_pooled_profile() -> None:
    coarse = replace(CPU, resolution=MILLISECOND * 50)
    host = Host(coarse)
    host.run(5, (SHELL,))
    samples: list[tuple[int, int]] = []
    host.past.watch(SHELL, family=True, samples=lambda: [samples.pop() for _ in samples[:]])
    lags = set()
    for _ in range(25):
        samples.append((host.now + TICK, host.now // 2))
        host.run(1, (SHELL,))
        settled = host.past.settled(SHELL)
        spent = host.past.process(SHELL, settled - TICK, settled)
        assert spent.covered == TICK
        assert host.past.process(SHELL, settled - TICK, settled, family=True).covered == TICK
        lags.add(host.past.settled() - settled)
    assert 0 <= min(lags) < max(lags) <= SECOND
    assert host.past.settled(STRANGER) == host.past.settled() == host.now


def test_family_includes_the_earlier_energy_of_its_root() -> None:
    host = Host(CPU, GPU)
    host.born(PayerInfo(SHELL, "sh", parent=1))
    host.run(5, (SHELL,))
    host.past.watch(SHELL, family=True, samples=lambda: [(host.now, host.now // 3)])
    start = host.run(30, (SHELL,))
    host.born(PayerInfo(CHILD, "make", parent=SHELL.pid))
    host.run(30, (SHELL, CHILD))
    end = host.past.settled(SHELL)
    alone = host.past.process(SHELL, start, start + 20 * TICK, family=True).energy
    assert alone == {HwType.CPU: 20_000, HwType.GPU: 20_000}
    own = host.past.process(SHELL, start, end).energy[HwType.CPU]
    family = host.past.process(SHELL, start, end, family=True)
    assert family.energy[HwType.CPU] == pytest.approx(
        own + (end - start - 30 * TICK) // TICK * 1000
    )
    assert family.covered == end - start


def test_idle_energy_is_known_where_the_history_separates_it() -> None:
    host = Host(CPU)
    start = host.run(20, (SHELL,))
    assert host.past.idle("cpu0", start, host.now) == 20 * 500
    assert host.past.idle("cpu0", start + TICK // 2, start + TICK) == 250
    assert host.past.idle("cpu0", start - TICK, host.now) is None
    assert host.past.idle("no such", start, host.now) is None


def test_idle_energy_is_unknown_while_it_is_charged_to_processes() -> None:
    host = Host(CPU)
    start = host.now
    end = start + TICK
    interval = Interval("cpu0", Instant(start, 0), Instant(end, 0), Microjoules(1000))
    shares = (Share(SHELL, Microjoules(1000)),)
    charged = Attribution(interval, shares, Microjoules(0), Microjoules(0))
    host.past.apply(Tick(Instant(end, 0)), [charged])
    assert host.past.idle("cpu0", start, end) is None


def test_end_of_time_without_a_baseline_is_known_by_hardware_type() -> None:
    host = Host(CPU, GPU)
    assert host.past.baseline_unknown() == {}
    started = host.now
    for at, withheld in ((1, 200), (2, 0)):
        interval = Interval(
            CPU.id,
            Instant(started + (at - 1) * TICK, 0),
            Instant(started + at * TICK, 0),
            Microjoules(1000),
        )
        spent = Attribution(
            interval,
            (Share(SHELL, Microjoules(800 + 200 - withheld)),),
            Microjoules(0),
            Microjoules(withheld),
            Microjoules(withheld),
        )
        host.past.apply(Tick(interval.end), [spent])
    assert host.past.baseline_unknown() == {HwType.CPU: started + TICK}
    assert host.past.idle(CPU.id, started, started + TICK) is None


@pytest.mark.parametrize(
    ("watched", "busy"), [(True, range(100)), (False, range(100)), (True, range(30, 70))]
)
def test_doubt_of_a_division_is_in_the_uncertainty(watched: bool, busy: range) -> None:
    """The doubts of all intervals are one error, at most the own energy or that of the others.

    The period may begin and end without energy.
    """
    host = Host(GPU)
    zero = Microjoules(0)
    if watched:
        host.past.watch(SHELL)
    begin = host.now
    for number in range(100):
        start, end = begin + number * TICK, begin + (number + 1) * TICK
        used = 600 if number in busy else 0
        shares = (Share(SHELL, Microjoules(used)), Share(CHILD, Microjoules(1000 - used)))
        interval = Interval(GPU.id, Instant(start, 0), Instant(end, 0), Microjoules(1000))
        doubts = (Microjoules(used // 2), Microjoules(used // 2))
        spent = Attribution(interval, shares[not used :], zero, zero, doubts=doubts[not used :])
        host.past.apply(Tick(Instant(end, 0)), [spent])
    found = host.past.process(SHELL, begin + 10 * TICK, begin + 90 * TICK)
    steps = len(set(busy) & set(range(10, 90)))
    assert found.energy[HwType.GPU] == steps * 600
    assert found.uncertainty[HwType.GPU] == pytest.approx(steps * 300, rel=0.1)


def test_idle_watched_process_costs_no_merge() -> None:
    host = Host(CPU, GPU)
    for pid in range(100, 200):
        host.past.watch(Consumer(pid, 1))
    host.run(300, (SHELL,))
    assert host.past.merged == 0


def test_idle_period_is_merged_as_one_interval() -> None:
    """One interval of each domain, and another for its own share."""
    host = Host(CPU, GPU)
    host.past.watch(CHILD)
    start = host.run(300, (SHELL,))
    host.run(1, (SHELL, CHILD))
    spent = host.past.process(CHILD, start, host.now)
    assert spent.energy == {HwType.CPU: 1000, HwType.GPU: 1000}
    assert spent.covered == 301 * TICK
    assert host.past.merged == 4


def test_process_that_is_idle_for_longer_than_the_steps_are_kept_is_covered() -> None:
    host = Host(CPU, GPU)
    host.run(1, (SHELL, CHILD))
    host.past.watch(CHILD)
    start = host.run(2000, (SHELL,))
    host.run(1, (SHELL, CHILD))
    spent = host.past.process(CHILD, start - TICK, host.now)
    assert spent.energy == {HwType.CPU: 2000, HwType.GPU: 2000}
    assert spent.covered == 2002 * TICK


@pytest.mark.exhaustive
def test_shares_of_busy_watched_processes_are_merged_in_turns() -> None:
    """Each at least once in ``MERGE_AFTER`` and the time over which merges are spread."""
    busy = tuple(Consumer(pid, 1) for pid in range(100, 200))
    host = Host(CPU)
    for one in busy:
        host.past.watch(one)
    most = 0
    for _ in range(400):
        before = host.past.merged
        host.run(1, busy)
        most = max(most, host.past.merged - before)
    assert host.past.merged > 100 * 400 / 2
    assert most <= 100 * 400 / 20
    start = host.now - 300 * TICK
    assert {host.past.process(one, start, host.now).energy[HwType.CPU] for one in busy} == {300_000}


def test_ended_member_of_a_family_is_forgotten_after_the_history() -> None:
    host = Host(CPU, span=SECOND)
    host.born(*family())
    host.past.watch(SHELL, family=True)
    start = host.run(20, (SHELL, CHILD, GRANDCHILD))
    host.past.apply(Tick(Instant(host.now, 0), exits=(CHILD,)), ())
    host.run(100, (SHELL, GRANDCHILD))
    whole = host.past.process(SHELL, start, host.now, family=True)
    assert whole.energy == {HwType.CPU: 20 * 3000 + 100 * 2000}


def test_family_ends_with_its_holder_and_the_process_remains() -> None:
    host = Host(CPU)
    host.born(*family()[:1])
    host.past.watch(SHELL)
    host.past.watch(SHELL, family=True, holder="queries")
    host.born(*family()[1:])
    host.past.forget(SHELL, holder="queries")
    start = host.run(20, (SHELL, CHILD))
    assert host.past.process(SHELL, start, host.now).energy == {HwType.CPU: 20_000}
    assert host.past.process(SHELL, start, host.now, family=True).energy == {HwType.CPU: 40_000}


def test_history_is_in_use_while_spans_or_queries_want_energy() -> None:
    host = Host(CPU)
    assert not host.past.in_use
    host.past.watch(SHELL)
    host.run(IN_USE // TICK - 1, (SHELL,))
    assert host.past.in_use
    host.run(1, (SHELL,))
    assert not host.past.in_use
    host.past.merge(SHELL)
    assert host.past.in_use
    host.run(IN_USE // TICK, (SHELL,))
    host.past.watch(SHELL, holder="queries")
    host.run(IN_USE // TICK, (SHELL,))
    assert host.past.in_use


def test_many_samples_of_a_cpu_clock_are_merged() -> None:
    host = Host(CPU)
    host.run(5, (SHELL,))
    samples: list[tuple[int, int]] = []
    host.past.watch(SHELL, samples=lambda: [samples.pop(0) for _ in range(len(samples))])
    for _ in range(4):
        began = host.run(5, (SHELL,))
        samples += [(began + i * MILLISECOND, i * MILLISECOND) for i in range(500)]
        host.past.sample(SHELL)
    assert host.past.merged > 0


def test_samples_are_those_of_the_first_holder_that_has_any() -> None:
    host, samples = half_busy()
    host.past.watch(SHELL, samples=list)
    host.past.watch(SHELL, samples=samples, holder="queries")
    start = host.run(31, (SHELL,))
    first = host.past.process(SHELL, start, start + TICK // 2).energy[HwType.CPU]
    assert first == pytest.approx(1000, rel=0.01)
